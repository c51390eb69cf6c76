"""Whether an owner fits in, and its tables built from what was found: leases, blocks brought back, a block in part."""

from __future__ import annotations

from headrace.kvcache.claim import Claim
from headrace.kvcache.lookup import Lookup
from headrace.kvcache.promises import Promises
from headrace.kvcache.radix import NONE, Tokens
from headrace.kvcache.reuse import EVICTED, GRANULARITY, NO_PREFIX, NOTHING, SALT, Found, first_needed, num_sinks
from headrace.kvcache.snapshots import Snapshots, positions
from headrace.kvcache.store import Store
from headrace.kvcache.table import NEVER, Part, Table
from headrace.kvcache.tiers import Tiers
from headrace.seam import DUMMY_BLOCK, HOST


class Admission:
    def __init__(self, store: Store, tiers: Tiers, lookup: Lookup, snapshots: Snapshots, promises: Promises) -> None:
        self._store = store
        self._tiers = tiers
        self._lookup = lookup
        self._snapshots = snapshots
        self._promises = promises
        self._size = store.settings.tokens_per_block
        self._copies = store.settings.copy_on_partial_reuse

    def can_admit(
        self, tokens: Tokens, claim: Claim, *, num_tokens: int, headroom: int, reuse: bool, slides: bool
    ) -> bool:
        promises, size = self._promises, self._size
        num_prompt_blocks = (len(tokens) - 1) // size
        wanted = -(-num_tokens // size)
        short: list[int] = []
        for group in promises.attention:
            most = promises.most(group, num_tokens, slides=slides)
            kept_back = promises.more_kept_back(group, wanted - most)
            if most == wanted:  # all that is found is leased, even beyond num_tokens
                most = max(most, num_prompt_blocks)
            if most + kept_back > promises.spare(group) - headroom:
                if not reuse or self._store.groups[group].window is not None:
                    return False
                short.append(group)
        if not short:
            return True
        if any(wanted - num_prompt_blocks > promises.spare(group) - headroom for group in short):
            return False
        found = self._lookup.find(tokens, claim)
        wanted = max(wanted, found.length + (found.num_partial > 0))
        for group in short:
            blocks, leases = self._store.index.blocks[group], self._store.pools[group].leases
            held = [blocks[node] for node in found.path[: found.length]]
            num_held = sum(block != NONE and leases[block] > 0 for block in held)
            if wanted - num_held > promises.spare(group) - headroom:
                return False
        return True

    def table(self, owner: int, tokens: Tokens, claim: Claim, *, reuse: bool, slides: bool) -> tuple[Table, int]:
        """The owner's table and the tokens reused."""
        settings, index, size = self._store.settings, self._store.index, self._size
        found = self._lookup.find(tokens, claim) if reuse and settings.reuse else NOTHING
        if found.length and not self._snapshots.has_room(found.path[found.length - 1]):
            found = NOTHING
        cursor, index_at = NONE, NEVER
        if settings.reuse:
            cursor = found.path[found.length - 1] if found.length else index.root(claim.space)
            index.pin(cursor)
            index_at = (found.length + 1) * size
            if reuse:
                self._count(found, tokens, claim)
        table = Table(claim, self._parts(owner, found, claim), cursor, index_at)
        table.num_reused = table.num_indexed = found.length
        table.num_blocks = found.length + (found.num_partial > 0)
        table.capacity = table.num_blocks * size
        prompt_len = claim.prompt_len or len(tokens)
        if slides:
            table.landmarks = len(found.path), (prompt_len - 1) // size, prompt_len // size
        if settings.reuse and len(self._promises.attention) < self._store.num_groups:
            branch = len(found.path) * size
            table.stops = positions(
                settings, prompt_len=prompt_len, num_tokens=len(tokens), start=found.num_tokens, branch=branch
            )
        return table, found.num_tokens

    def _count(self, found: Found, tokens: Tokens, claim: Claim) -> None:
        counters, num_groups = self._store.counters, len(self._promises.attention)
        missing = len(tokens) - found.num_tokens
        counters.lookups += 1
        counters.hit_tokens += found.num_tokens
        counters.miss_tokens += missing
        reason = self._lookup.reason(found, tokens, claim)
        if reason == NO_PREFIX:
            counters.miss_tokens_no_prefix += missing
        elif reason == EVICTED:
            counters.miss_tokens_evicted += missing
        elif reason == GRANULARITY:
            counters.miss_tokens_granularity += missing
        else:
            assert reason == SALT, reason
            counters.miss_tokens_salt += missing
        num_partial = found.num_partial > 0
        counters.reused_blocks += (found.length + num_partial) * num_groups
        counters.partial_reused_blocks += num_partial * num_groups
        num_blocks = -(-len(tokens) // self._size)
        num_missed = num_blocks - found.length - num_partial
        counters.missed_blocks += num_missed * num_groups
        for group in self._promises.attention:
            mine = self._store.by_group[group]
            mine.reused_blocks += found.length + num_partial
            mine.partial_reused_blocks += num_partial
            mine.missed_blocks += num_missed
            on_host = self._num_on_host(group, found) if found.num_tokens and self._store.num_tiers > HOST else 0
            mine.host_hit_tokens += on_host
            mine.device_hit_tokens += found.num_tokens - on_host

    def _num_on_host(self, group: int, found: Found) -> int:
        """Reused tokens that aren't on the device."""
        blocks = self._store.index.blocks[group]
        needed = self._lookup.needed(group, found.length)
        count = sum(blocks[found.path[at]] == NONE for at in needed) * self._size
        away = found.source != NONE and blocks[found.source] == NONE
        return count + (found.num_partial if away else 0)

    def _parts(self, owner: int, found: Found, claim: Claim) -> tuple[Part, ...]:
        """Leases what was found and orders the copies that bring the rest; the caller knows that there are blocks."""
        made: list[Part] = []
        for group, spec in enumerate(self._store.groups):
            part = Part()
            made.append(part)
            if not spec.is_recurrent:
                self._reuse(group, part, found)
                if claim.retention is not None:
                    self._store.keeping.retain_all(group, found.path[: found.length], claim, 0)
        if found.length:
            self._snapshots.take(owner, found.path[found.length - 1])
        return tuple(made)

    def _reuse(self, group: int, part: Part, found: Found) -> None:
        store, length = self._store, found.length
        spec, pool, blocks = store.groups[group], store.pools[group], store.index.blocks[group]
        if not found.num_tokens:
            return
        mine = part.blocks
        mine += [blocks[node] for node in found.path[:length]]
        part.first = first = first_needed(spec, length * self._size, self._size)
        kept = num_sinks(spec, self._size)
        if first > kept:
            mine[kept:first] = [DUMMY_BLOCK] * (first - kept)
        leased = [block for block in mine if block > DUMMY_BLOCK]
        pool.lease_all(leased)
        part.num_held = length - max(0, first - kept)
        if found.source == NONE:
            self._onboard(group, part, found)
            return
        where = group if blocks[found.source] != NONE else group + store.num_groups
        source = store.block_of(where, found.source)
        store.pools[where].lease(source)  # not to be evicted for the very blocks that are taken now
        self._onboard(group, part, found)
        self._reuse_front(group, part, found.source)
        store.pools[where].unlease(source)

    def _onboard(self, group: int, part: Part, found: Found) -> None:
        """Device blocks for what is on the host, which taking them must not evict meanwhile."""
        store = self._store
        host = group + store.num_groups
        away = [at for at, block in enumerate(part.blocks) if block == NONE]
        if not away:
            return
        sources = [store.block_of(host, found.path[at]) for at in away]
        store.pools[host].lease_all(sources)
        for at, source in zip(away, sources, strict=True):
            node = found.path[at]
            block = part.blocks[at] = self._tiers.take(group, 1)[0]
            self._tiers.onboard(group, node, block)
            store.name(group, node, block)
            store.keeping.inherit(group, node, host, source)
        store.pools[host].unlease_all(reversed(sources))

    def _reuse_front(self, group: int, part: Part, node: int) -> None:
        """A block of its own that begins like the node's; that block itself when it is the last one to be had."""
        store = self._store
        pool, block = store.pools[group], store.block_of(group, node)
        if block != NONE and (not self._copies or not pool.num_available):
            pool.lease(block)
            store.unname(group, node)
            part.blocks.append(block)
        else:
            part.blocks += self._tiers.take(group, 1)
            self._tiers.fill(group, node, part.blocks[-1])
        part.num_held += 1
