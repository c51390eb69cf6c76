"""H1 of the targets: plan + commit + encoding the outbox, on one core, with an engine that returns at once.

    python benchmarks/host_cost.py [--rows 4096] [--steps 300]

Steady state: `rows` running requests, and every step about rows/128 of them end and as many are admitted.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import time

import numpy as np

from headrace import wire
from headrace.engine.instant import InstantEngine
from headrace.kvcache.manager import KvCache
from headrace.kvcache.settings import CacheSettings
from headrace.scheduler.scheduler import Scheduler
from headrace.scheduler.settings import SchedulerSettings
from headrace.seam import PoolSizes
from headrace.types import Request, Sampling


def measure(rows: int, steps: int, depth: int) -> list[float]:
    """Milliseconds a step."""
    rng = random.Random(0)
    engine = InstantEngine()
    settings = SchedulerSettings(
        max_batch_size=rows,
        max_num_tokens=2 * rows + 8192,
        max_seq_len=4096,
        num_slots=rows + 256,
        tokens_per_block=32,
        depth=depth,
    )
    blocks = rows * 16
    cache = KvCache(engine.open().groups, PoolSizes((blocks,), settings.num_slots), CacheSettings(tokens_per_block=32))
    scheduler = Scheduler(settings, [cache])
    next_id = 0

    def submit(count: int, max_tokens: int | None = None) -> None:
        nonlocal next_id
        for _ in range(count):
            prompt = [rng.randrange(32_000) for _ in range(128)]
            length = max_tokens or 128
            scheduler.add(Request(id=next_id, prompt=prompt, sampling=Sampling(), max_tokens=length))
            next_id += 1

    gc.collect()
    gc.freeze()  # as in a runtime's own process, the threshold included
    gc.set_threshold(20_000)
    for _ in range(rows):  # staggered ends, so that each step sees its share
        submit(1, rng.randint(1, 128))
    times: list[float] = []
    waiting = rows
    for step in range(steps + 140):
        begin_s = time.perf_counter()
        plan = scheduler.plan(time.monotonic())
        planned_s = time.perf_counter() - begin_s
        if plan is not None:
            engine.submit(plan)
        begin_s = time.perf_counter()
        ended = 0
        if scheduler.num_in_flight > (depth if plan is not None else 0):
            outbox = scheduler.commit(engine.collect())
            wire.encode(wire.Outputs(step, outbox.ids.tobytes(), outbox.tokens.tobytes(), outbox.deltas))
            ended = sum(delta.finish is not None for delta in outbox.deltas)
        total_s = planned_s + time.perf_counter() - begin_s
        submit(ended)
        waiting = len(scheduler.queue)
        if step >= 140:
            times.append(total_s * 1000)
    assert waiting < rows
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="*", default=[256, 1024, 4096])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--depth", type=int, default=1)
    args = parser.parse_args()
    print(f"{'rows':>6} {'median ms':>10} {'p90 ms':>8} {'us/row':>8}")
    for rows in args.rows:
        times = measure(rows, args.steps, args.depth)
        median = statistics.median(times)
        print(f"{rows:>6} {median:>10.3f} {np.quantile(times, 0.9):>8.3f} {median / rows * 1000:>8.3f}")


if __name__ == "__main__":
    main()
