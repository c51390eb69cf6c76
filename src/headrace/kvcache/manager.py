"""The KV cache of one data-parallel section, as integers: the blocks each owner has, shares, may reuse or waits for.

A block's life is told in docs/kv-cache.md. Only one block per group and tier stands in the index for the same tokens in
the same namespace. An owner that computed the same tokens again keeps its own block as well, so a table never changes
under a step in flight, except that entries out of the window leave it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import Any

from headrace.kvcache.admission import Admission
from headrace.kvcache.claim import Claim
from headrace.kvcache.growth import Growth, NoBlocks
from headrace.kvcache.integrity import check_cache
from headrace.kvcache.lookup import Lookup
from headrace.kvcache.naming import Naming
from headrace.kvcache.pins import Pinned, Pins
from headrace.kvcache.promises import Promises
from headrace.kvcache.radix import NONE, Namespace, Tokens
from headrace.kvcache.reuse import NOTHING
from headrace.kvcache.saving import NoSaving, Saving
from headrace.kvcache.settings import CacheSettings, check_sizes
from headrace.kvcache.snapshots import Snapshots
from headrace.kvcache.stats import CacheStats
from headrace.kvcache.store import Store
from headrace.kvcache.table import NEVER, Table
from headrace.kvcache.tiers import Tiers
from headrace.kvcache.turns import policy_of
from headrace.seam import DISK, HOST, GroupSpec, Ints, PoolSizes
from headrace.types import MediaSpan, Request, Retention

__all__ = ["KvCache", "NoBlocks"]


class KvCache:
    """Blocks, tables and reuse of one section. Calls come from one thread.

    An owner is a request or a beam, any integer. With `reuse` off there is no index: nothing is found, nothing stays.
    Source of the idea: RadixAttention (Zheng et al., 2024) over the paged blocks of PagedAttention (Kwon et al., 2023).
    """

    def __init__(
        self,
        groups: tuple[GroupSpec, ...],
        sizes: PoolSizes,
        settings: CacheSettings,
        *,
        section: int = 0,
        num_sections: int = 1,
    ) -> None:
        check_sizes(groups, sizes, settings)
        self.groups = groups
        self.settings = settings
        self.store = Store(groups, sizes, settings)
        self.index = self.store.index
        self.tables: dict[int, Table] = {}
        self.tiers = Tiers(self.store, sizes, settings, section, num_sections)
        self.saving = NoSaving()
        if settings.reuse and self.tiers.has_disk:
            self.saving = Saving(self.store, self.tiers, min_priority=settings.offload_min_priority)
        self.promises = Promises(self.store)
        self.lookup = Lookup(self.store)
        self.snapshots = Snapshots(self.store, self.tiers)
        self.pins = Pins(self.store, settings.max_pinned_share)
        self._admission = Admission(self.store, self.tiers, self.lookup, self.snapshots, self.promises)
        naming = Naming(self.store)
        self._policy = policy_of(settings, self.store)
        self._growth = Growth(
            self.store, self.tables, tiers=self.tiers, promises=self.promises, naming=naming,
            snapshots=self.snapshots, policy=self._policy,
        )  # fmt: skip
        base = Namespace(revision=settings.fingerprint, dtypes=tuple(group.dtype for group in groups))
        self._base = Claim(base)

    @property
    def tokens_per_block(self) -> int:
        return self.settings.tokens_per_block

    @property
    def pools(self):
        """Of the device, by group."""
        return self.store.pools[: len(self.groups)]

    @property
    def counters(self):
        return self.store.counters

    @property
    def extra_leases(self) -> dict[tuple[int, int], int]:
        return self.store.extra_leases

    @property
    def stats(self) -> CacheStats:
        pools, host, disk = self.pools, self.store.tier(HOST), self.store.tier(DISK)
        return CacheStats(
            num_total=tuple(pool.num_total for pool in pools),
            num_free=tuple(pool.num_free for pool in pools),
            num_cached=tuple(pool.num_cached for pool in pools),
            num_leased=tuple(pool.num_leased for pool in pools),
            pinned_blocks=sum(self.pins.num_pinned[: len(pools)]),
            host_total=tuple(pool.num_total for pool in host),
            host_used=tuple(pool.num_total - pool.num_free for pool in host),
            disk_total=tuple(pool.num_total for pool in disk),
            disk_used=tuple(pool.num_total - pool.num_free for pool in disk),
            by_group=tuple(replace(counters) for counters in self.store.by_group),
            **asdict(self.counters),
        )

    # ---- admission ---------------------------------------------------------------------------

    def claim(
        self,
        *,
        salt: str = "",
        adapter: int = 0,
        scope: str = "",
        media: tuple[MediaSpan, ...] = (),
        retention: Retention | None = None,
        prompt_len: int = 0,
    ) -> Claim:
        space = self._base.space._replace(salt=salt, adapter=adapter, scope=scope)
        return Claim(space, media, retention, prompt_len)

    def claim_of(self, request: Request) -> Claim:
        """What decides who shares the request's blocks and how long they stay; made once a request."""
        return self.claim(
            salt=request.cache_salt,
            adapter=request.adapter,
            # Nobody shares what computes an embedding: it goes with its request.
            scope=f"request {request.id} embedding" if request.pooling else self._policy.scope_of(request),
            media=request.media,
            retention=request.retention,
            prompt_len=len(request.prompt),
        )

    def blocks_needed(self, num_tokens: int) -> int:
        """Blocks of each attention group that hold `num_tokens` tokens."""
        return -(-num_tokens // self.tokens_per_block)

    def num_available(self) -> int:
        """Blocks that every attention group can bring now: free and evictable ones, in the scarcest group."""
        return min((pool.num_available for pool in self._attention_pools()), default=NEVER)

    def _attention_pools(self):
        return [self.store.pools[group] for group in self.promises.attention]

    def max_tokens(self, *, width: int = 1, beside_pins: bool = True) -> int:
        """Tokens that one sequence may have when nobody but pins is there, of `width` that grow at once."""
        pinned = self.pins.num_pinned if beside_pins else [0] * len(self.store.pools)
        return self.promises.max_tokens(pinned, width=width)

    def match(self, tokens: Tokens, *, claim: Claim | None = None, limit: int | None = None) -> int:
        """Leading tokens that could be reused now, at most `limit`, and never the last token.

        Changes nothing, the eviction order included.
        """
        return self.lookup.find(tokens, claim or self._base, limit).num_tokens if self.settings.reuse else 0

    def can_admit(
        self,
        tokens: Tokens,
        *,
        claim: Claim | None = None,
        num_tokens: int,
        headroom: int = 0,
        reuse: bool = True,
        slides: bool = True,
    ) -> bool:
        """Whether `admit` and `extend` to `num_tokens` in all would succeed and keep all promises.

        `headroom`: blocks of each group that have to be left besides. `reuse` and `slides` as they will be given.
        """
        reuse = reuse and self.settings.reuse
        return self._admission.can_admit(
            tokens, claim or self._base, num_tokens=num_tokens, headroom=headroom, reuse=reuse, slides=slides
        )

    def admit(
        self,
        owner: int,
        tokens: Tokens,
        *,
        claim: Claim | None = None,
        reuse: bool = True,
        limit: int = 0,
        grows: bool = False,
        slides: bool = True,
    ) -> int:
        """Starts the owner's tables with the blocks that hold a prefix of `tokens`; returns the tokens reused.

        Without tiers and partial reuse it needs no free block. With `reuse` off the owner finds nothing, but what it
        computes can be found by others.

        Args:
            limit: length up to which the owner's blocks are promised from now on; 0 promises none.
            grows: it may take more than that, when there is more.
            slides: blocks out of the window are given back while the owner runs.
        """
        assert owner not in self.tables, f"owner {owner} is admitted already"
        claim = claim or self._base
        table, num_reused = self._admission.table(owner, tokens, claim, reuse=reuse, slides=slides)
        self.tables[owner] = table
        self.tiers.fetches.end((owner,))
        self._growth.plan_slide(table)
        table.grows = grows
        if limit:
            self.promises.entitle(table, limit)
        return num_reused

    def fetch(self, owner: int, tokens: Tokens, claim: Claim) -> bool:
        """Starts to bring blocks from disk for a request that isn't admitted. True: it waits until `take_arrived`.

        What has come is held until `admit` or `abandon`.
        """
        if self.store.num_tiers <= DISK or not self.settings.reuse or self.is_fetch_full:
            return False
        return self.tiers.fetch(owner, self.lookup.to_fetch(tokens, claim))

    @property
    def is_fetch_full(self) -> bool:
        """Nothing is fetched until some who wait are admitted: it may be worth asking again."""
        return self.tiers.fetches.is_full

    def has_fetched(self, owner: int) -> bool:
        return self.tiers.fetches.has(owner)

    # ---- growing -----------------------------------------------------------------------------

    def commit_at(self, owner: int) -> int:
        """Computed tokens at which `commit` has something to do next."""
        return self.tables[owner].commit_at

    @property
    def has_windows(self) -> bool:
        """Whether entries may leave at all."""
        return self._growth.has_windows

    def has_left(self, owner: int) -> bool:
        """Whether entries have left the window since `take_new_blocks`."""
        return bool(self.tables[owner].gone)

    def num_tokens_capacity(self, owner: int) -> int:
        """Tokens that fit into the owner's blocks: up to there `extend` has nothing to do."""
        return self.tables[owner].capacity

    def extend(self, owner: int, num_tokens: int, *, headroom: int = 0) -> bool:
        """Grows every table of the owner to hold `num_tokens`, evicting cached blocks as needed, and returns True, or
        changes nothing, when some group can't and leave `headroom` blocks."""
        return not self.extend_each(((owner, num_tokens, headroom),))

    def extend_each(self, wants: Iterable[tuple[int, int, int]]) -> set[int]:
        """`extend` of each (owner, number of tokens, headroom) in turn; returns the owners for which it is False."""
        return self._growth.extend_each(wants)

    def take_new_blocks(self, slots: Mapping[int, int]) -> list[list[int]]:
        """By group, flat: (slot, index in the table, block) of what changed in the tables of these owners since each
        was last asked for, reused and shared blocks included. `slots` is by owner.

        Entries that have left the window are the dummy block.
        """
        return self._growth.take_new_blocks(slots)

    def table(self, owner: int, group: int = 0) -> list[int]:
        return list(self.tables[owner].parts[group].blocks)

    def commit(self, owner: int, tokens: Tokens, num_computed: int) -> int:
        """Indexes the blocks that have become full and gives back those out of the window.

        `tokens` is the owner's whole sequence, read only where blocks are new; the KV of the first `num_computed` is
        in the cache and won't be written again. Returns at how many there is something to do again.
        """
        return self._growth.commit(owner, tokens, num_computed)

    # ---- leaving -----------------------------------------------------------------------------

    def release(
        self, owner: int, *, index: bool = True, tokens: Tokens = (), num_computed: int = 0, final: bool = False
    ) -> None:
        """Ends the owner's tables and gives its leases back; indexed blocks stay cached, the others are free.

        With `tokens`, whose first `num_computed` are computed, the partly filled last block is indexed as well.
        With `index` off nothing that this owner computed, and nothing computed on top of it, is found again. `final`:
        the owner's request is over, and the reuse policy decides what of it stays.
        """
        self._growth.release(owner, index=index, tokens=tokens, num_computed=num_computed, final=final)

    def fork(self, parent: int, child: int, num_tokens: int) -> list[tuple[int, int, int]]:
        """Starts `child` with the parent's first `num_tokens` tokens, all of them computed.

        Full blocks are shared. A partial last block is a new one per group; returns the copies that fill it, (group,
        source block, destination block), which the caller orders with `copy`. Raises NoBlocks.
        """
        return self._growth.fork(parent, child, num_tokens)

    def set_aside(self, count: int) -> None:
        """The caller has promised so many blocks of each group besides."""
        self.promises.set_aside = count

    def set_prefill_speed(self, tokens_per_s: float) -> None:
        """As measured: copying blocks back is weighed against computing them."""
        self.lookup.prefill_tokens_per_s = tokens_per_s

    def may_resume(self) -> bool:
        """Whether the pools are empty enough for a preempted request to come back."""
        most = self.settings.max_util_for_resume
        return all(pool.num_total - pool.num_available < most * pool.num_total for pool in self._attention_pools())

    def abandon(self, owner: int) -> None:
        """The owner of `fetch` waits no longer, and isn't admitted here."""
        self.tiers.fetches.end((owner,))

    def copy(self, group: int, source: int, destination: int) -> None:
        """The next plan copies a device block, before whoever writes either."""
        self.tiers.copy(group, source, destination)

    # ---- pins --------------------------------------------------------------------------------

    def pin(self, name: str, tokens: Tokens, claim: Claim, *, longest: int = 0) -> str:
        """Keeps the whole blocks of a prompt whatever the pressure, until `unpin`; returns why not, or "".

        `longest`: a sequence of so many tokens has to fit in beside the pins.
        """
        found = self.lookup.find(tokens, claim, claim.prompt_len) if self.settings.reuse else NOTHING
        wanted: list[Pinned] = []
        for group in range(len(self.groups)):
            for at in self.lookup.needed(group, found.length):
                node = found.path[at]
                pool = group if self.index.blocks[group][node] != NONE else group + len(self.groups)
                wanted.append(Pinned(pool, at, self.store.block_of(pool, node)))
        spare = [self.promises.spare(group) for group in range(len(self.groups))]
        spare += [pool.num_available for pool in self.store.pools[len(self.groups) :]]
        needs = [self.promises.alone(group, longest) for group in range(len(self.groups))]
        return self.pins.pin(name, claim, found.path[: found.length], wanted, spare=spare, needs=needs)

    def unpin(self, name: str) -> bool:
        """False: there is no such pin."""
        return self.pins.unpin(name)

    # ---- the plan's part ---------------------------------------------------------------------

    def advance(self, now_s: float) -> None:
        """The time goes on: priorities end."""
        self.store.keeping.advance(now_s)

    def begin(self, owner: int, slot: int) -> None:
        """An admitted owner got its slot, whose recurrent state begins with what was found."""
        self.snapshots.begin(owner, slot)

    def next_stop(self, owner: int, num_planned: int) -> int:
        """Where the next chunk has to end at the latest, since a state is saved there."""
        return self.snapshots.next_stop(self.tables[owner], num_planned)

    def save(self, owner: int, position: int, slot: int) -> None:
        """The plan's rows bring the owner to `position`."""
        self.snapshots.save(self.tables[owner], position, slot)

    def take_copies(self) -> Ints:
        return self.tiers.take_copies()

    def take_transfers(self) -> Ints:
        if self.store.num_tiers > HOST:
            self.tiers.look_ahead([self.promises.spare(group) for group in range(len(self.groups))])
        self.saving.step(is_idle=not self.tables)
        return self.tiers.take_transfers()

    def take_restores(self) -> Ints:
        return self.snapshots.take_restores()

    def take_saves(self) -> Ints:
        return self.snapshots.take_saves()

    def take_arrived(self) -> list[int]:
        """Owners of `fetch` that need not wait any longer."""
        return self.tiers.fetches.take_arrived()

    def finish_copies(self, ids: Iterable[int]) -> None:
        self.tiers.finish(ids)

    def fail_copies(self, ids: Iterable[int]) -> None:
        self.tiers.fail(ids)

    @property
    def copies_in_flight(self) -> bool:
        """Copies and transfers, those included that would begin now that nobody runs."""
        return self.tiers.is_busy or (not self.tables and self.saving.has_more)

    def take_events(self) -> list[dict[str, Any]]:
        return self.store.events.take()

    def close(self) -> None:
        """Another process may have the disk's folder."""
        self.tiers.close()

    def check(self) -> None:
        """Recounts everything, in time linear in the pools; raises AssertionError with what disagrees."""
        check_cache(self.store, self.tables, self.promises)
