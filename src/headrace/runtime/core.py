"""Building a runtime: open the engine, settle, and make the loop. Used in a process of its own or on a thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace import wire
from headrace.config.llm_args import LlmArgs
from headrace.config.show import as_dict
from headrace.hub.quantisation import quantisation_name
from headrace.hub.source import ModelSource
from headrace.kvcache.manager import KvCache
from headrace.log import phase
from headrace.runtime.caching import cache_settings
from headrace.runtime.kv_stats import KvStats
from headrace.runtime.loop import Link, Loop
from headrace.runtime.reuse import reuse_of
from headrace.runtime.settle import Settled, settle
from headrace.runtime.stats import IterationStats
from headrace.scheduler.external import Connect, External, no_external
from headrace.scheduler.scheduler import Scheduler
from headrace.seam import EngineFacts, EnginePort
from headrace.transfer._loading import load_scheduler
from headrace.transfer.port import ConnectorSetup

log = logging.getLogger("headrace.runtime")


@dataclass(frozen=True, slots=True)
class Core:
    engine: EnginePort
    facts: EngineFacts
    settled: Settled
    scheduler: Scheduler
    clock: Callable[[], float] = time.monotonic

    def loop(self, args: LlmArgs, link: Link) -> Loop:
        limit = args.iter_stats_max_iterations
        settings = self.settled.scheduler
        kv = KvStats(
            self.facts.groups,
            max_seq_len=settings.max_seq_len,
            tokens_per_block=settings.tokens_per_block,
            interval=args.kv_cache_config.iteration_stats_interval,
        )
        stats = IterationStats(
            kv,
            enabled=args.enable_iter_perf_stats,
            max_iterations=1000 if limit is None else limit,
            print_log=args.print_iter_log,
        )
        return Loop(self.scheduler, self.engine, link, stats, clock=self.clock)

    def close(self) -> None:
        """End the engine, then what the caches keep for the next start; safe to call twice."""
        self.engine.close()
        for section in self.scheduler.sections:
            section.kv.close()
            section.external.close()


def open_core(
    args: LlmArgs,
    engine: EnginePort,
    *,
    clock: Callable[[], float] = time.monotonic,
    settled: Settled | None = None,
) -> Core:
    """Load, settle, allocate. Closes the engine when any of it fails.

    Args:
        clock: what deadlines and times are of.
        settled: where the same was settled for an engine just like this one.
    """
    try:
        facts = engine.open()
        settled = settled or settle(args, facts)
        connect = _connector(args, facts, settled)
        with phase("allocating the KV cache"):
            engine.allocate(settled.sizes)
        caches = [
            KvCache(
                facts.groups,
                settled.sizes,
                cache_settings(args, facts, settled),
                section=section,
                num_sections=facts.num_sections,
            )
            for section in range(facts.num_sections)
        ]
    except BaseException:
        engine.close()  # the disk tier's files among others: the next one to start may want them
        raise
    log.info("%s", settled.table)
    log.info("%s", reuse_of(caches[0].settings, facts.groups).text)
    scheduler = Scheduler(settled.scheduler, caches, connect=connect, clock=clock)
    return Core(engine, facts, settled, scheduler, clock)


def _connector(args: LlmArgs, facts: EngineFacts, settled: Settled) -> Connect:
    """Raises ValueError: there is no such connector, or the model can't use one."""
    config = args.kv_connector_config
    if config is None:
        return no_external
    if any(group.is_recurrent for group in facts.groups):
        raise ValueError("kv_connector_config: stores hold no recurrent states, which this model has; leave it out")
    setup, count = ConnectorSetup(config, facts.groups, settled.scheduler.tokens_per_block), facts.num_sections
    ports = [load_scheduler(setup) for _ in range(count)]
    return lambda kv, section: External(kv, ports[section], section=section, num_sections=count)


def request_limits(name: str, args: LlmArgs, facts: EngineFacts, settled: Settled) -> wire.ModelInfo:
    """What a request may ask for; of an engine that runs or of one that is planned.

    Args:
        name: of the model, as users know it.
    """
    settings = settled.scheduler
    return wire.ModelInfo(
        model=name,
        model_type=facts.model_type,
        vocab_size=facts.vocab_size,
        num_valid_ids=facts.num_valid_ids,
        hidden_size=facts.hidden_size,
        max_seq_len=settings.max_seq_len,
        max_num_tokens=settings.max_num_tokens,
        max_batch_size=settings.max_batch_size,
        max_beam_width=args.max_beam_width,
        enable_chunked_prefill=settings.chunked_prefill,
        kv_num_blocks=settled.usable_blocks,
        tokens_per_block=settings.tokens_per_block,
    )


def model_info(args: LlmArgs, source: ModelSource, core: Core, *, started_s: float) -> wire.ModelInfo:
    cache = core.scheduler.sections[0].kv.settings
    reuse = reuse_of(cache, core.facts.groups)
    return msgspec.structs.replace(
        request_limits(source.name, args, core.facts, core.settled),
        reuse=wire.ReuseInfo(
            granularity=reuse.granularity, event_buffer=cache.event_buffer_size if reuse.granularity else 0
        ),
        startup=wire.Startup(
            memory=core.settled.memory.as_dict(),
            settings=as_dict(args, everything=True),
            quantization=quantisation_name(source),
            kv_scales={layer: (k, v) for layer, k, v in core.facts.kv_scales},
            seconds=time.monotonic() - started_s,
        ),
    )
