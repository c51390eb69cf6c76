"""From a report of `headrace bench` to what its device makes of the rooflines."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace.bench.report import Point, Report, Spread, Step
from headrace.hub.shape import ModelShape
from headrace.simulate.cost import Calibration, Cost
from headrace.simulate.jitter import spread_of
from headrace.simulate.work import Work

MIN_STEPS = 8
"""Fewer tell nothing."""
MAX_KNOTS = 16
LEAST_ERROR = 0.02
"""No step is known better than this."""
ROUNDS = 8
TOLERANCE = 0.25
"""Relative error beyond which a step counts less: somebody else had the machine."""

Floats = NDArray[np.float64]


def calibrated(report: Report, cost: Cost, *, source: str) -> Calibration:
    """Factors that make the cost of what was measured equal to its time.

    From the report's steps where it has them (`--record_steps`), else from TTFT and TPOT of its closed loops.

    Args:
        cost: of the model and device that were measured, before any correction.

    Raises:
        ValueError: the report says too little, with the remedy.
    """
    if len(report.steps) >= MIN_STEPS:
        return _from_steps(report.steps, cost, source=source)
    return _from_points(report, cost, source=source)


def _from_steps(steps: Sequence[Step], cost: Cost, *, source: str) -> Calibration:
    works = [work_of(step) for step in steps]
    measured = np.array([step.seconds for step in steps])
    tokens = np.array([work.num_tokens for work in works], np.float64)
    linear = np.array([cost.linear_s(work) for work in works])
    attention = np.array([float(cost.attention_s(work)) for work in works])
    knots = _knots(tokens)
    basis = _hats(np.log2(tokens), np.log2(knots)) * linear[:, None]  # [steps, knots]
    factors, on_attention = _fit(basis, attention, measured, octaves=np.diff(np.log2(knots)))
    modelled = basis @ factors + on_attention * attention
    only_generates = np.array([work.num_tokens == work.num_rows for work in works])
    ratios = measured / np.maximum(modelled, 1e-12)
    spreads = [spread_of(ratios[kind]) if kind.sum() >= MIN_STEPS else () for kind in (only_generates, ~only_generates)]
    return Calibration(
        knots=tuple(zip(knots.tolist(), factors.tolist(), strict=True)),
        attention=on_attention,
        overhead_s=0.0,
        host_s=float(np.median([step.host_s for step in steps])),
        source=source,
        error=float(np.mean(np.abs(modelled - measured) / measured)),
        generation_spread=spreads[0],
        context_spread=spreads[1],
    )


def work_of(step: Step) -> Work:
    return Work(step.num_rows, step.num_tokens, step.num_sampled, tuple(step.pairs), tuple(step.reads))


def _knots(tokens: Floats) -> Floats:
    """Token counts that steps really had: each of them, or those next to powers of two."""
    values, counts = np.unique(tokens, return_counts=True)
    if len(values) <= MAX_KNOTS:
        return values
    common = values[counts >= np.quantile(counts, 0.5)]
    wanted = 2.0 ** np.arange(np.floor(np.log2(values[0])), np.ceil(np.log2(values[-1])) + 1)
    near = [common[np.abs(np.log2(common) - np.log2(each)).argmin()] for each in wanted]
    return np.unique([values[0], *near, values[-1]])


def _hats(places: Floats, knots: Floats) -> Floats:
    """[places, knots] The weights of linear interpolation."""
    return np.stack([np.interp(places, knots, row) for row in np.eye(len(knots))], axis=1)


def _fit(basis: Floats, attention: Floats, measured: Floats, *, octaves: Floats) -> tuple[Floats, float]:
    """Least squares of the relative errors; steps far off count less and less (Huber, 1964).

    The factors are a random walk along the knots, which may move by a typical factor in an octave; it is weighed by how
    far steps scatter. So few steps at one knot, slow by chance, can't make it another than its close neighbours.

    Args:
        octaves: between neighbouring knots.
    """
    num_knots = basis.shape[1]
    scale = float(np.median(measured / np.maximum(basis.sum(1), 1e-12)))  # of the factors
    smooth = np.zeros((num_knots - 1, num_knots + 1))
    for row in range(num_knots - 1):
        smooth[row, row], smooth[row, row + 1] = 1 / scale, -1 / scale
    smooth /= np.sqrt(octaves)[:, None]
    prior = np.zeros((1, num_knots + 1))
    prior[0, -1] = 1 / scale  # attention is near the typical factor
    scatter = LEAST_ERROR
    columns = np.concatenate([basis, attention[:, None]], axis=1) / measured[:, None]
    weights = np.ones(len(measured))
    found = np.zeros(num_knots + 1)
    for _ in range(ROUNDS):
        root = np.sqrt(weights)
        left = np.concatenate([columns * root[:, None], scatter * smooth, scatter * prior])
        right = np.concatenate([root, np.zeros(num_knots - 1), [scatter]])
        found = _not_negative(left, right)
        error = np.abs(columns @ found - 1)
        weights = np.minimum(1, TOLERANCE / np.maximum(error, 1e-9))
        scatter = max(float(np.median(error)), LEAST_ERROR)
    return found[:-1], float(found[-1])


def _not_negative(left: Floats, right: Floats) -> Floats:
    """Least squares; what would be below zero is zero."""
    kept = np.ones(left.shape[1], np.bool_)
    found = np.zeros(left.shape[1])
    while kept.any():
        found[:] = 0
        found[kept] = np.linalg.lstsq(left[:, kept], right, rcond=None)[0]
        if (found >= 0).all():
            break
        kept &= found > 0
    return np.maximum(found, 0)


def _from_points(report: Report, cost: Cost, *, source: str) -> Calibration:
    """Of a closed loop of c requests a step has c tokens and takes their TPOT; alone, a prompt takes its TTFT."""
    typical = cost.calibration
    found: dict[float, list[float]] = {}
    for point in report.points:
        count = _concurrency(point)
        if count is None:
            continue
        tpot, ttft = point.latency.get("tpot_s"), point.latency.get("ttft_s")
        prompt = round(report.workload.input_len.mean)
        if isinstance(tpot, Spread):
            length = prompt + round(report.workload.output_len.mean / 2)
            _note(found, cost, [(length, 1)] * count, tpot.p50)
        if isinstance(ttft, Spread) and count == 1:
            _note(found, cost, [(0, prompt)], ttft.p50)
    if not found:
        raise ValueError(
            f"{source}: it has neither steps nor a closed loop: measure again with --record_steps, or --concurrency"
        )
    knots = tuple((tokens, float(np.mean(factors))) for tokens, factors in sorted(found.items()))
    return Calibration(
        knots=knots, attention=typical.attention, overhead_s=0.0, host_s=typical.host_s, source=source, error=None
    )


def _note(found: dict[float, list[float]], cost: Cost, rows: Sequence[tuple[int, int]], seconds: float) -> None:
    """rows: (tokens in the cache, tokens to compute)"""
    seen = sum(count * start + count * (count + 1) // 2 for start, count in rows)
    reads = sum(start + count for start, count in rows)
    groups = len(cost.caches)
    work = Work(len(rows), sum(count for _, count in rows), len(rows), (seen,) * groups, (reads,) * groups)
    rest_s = seconds - cost.calibration.attention * float(cost.attention_s(work))
    found.setdefault(float(work.num_tokens), []).append(max(rest_s, seconds / 2) / cost.linear_s(work))


def _concurrency(point: Point) -> int | None:
    if point.load.pattern != "closed":
        return None
    return min(point.load.concurrency or point.result.num_requests, point.result.num_requests)


def check_model(report: Report, shape: ModelShape, *, source: str) -> None:
    """Raises ValueError: the report is of another kind of model, whose steps say nothing of this one's."""
    measured = report.model.get("type")
    if measured != shape.model_type and report.steps:
        raise ValueError(
            f"{source}: its steps are of a {measured} model and this is a {shape.model_type}: calibrate with this one"
        )


def check_device(report: Report, device: str | None, *, source: str) -> None:
    """
    Args:
        device: the GPU that is modelled, by the name of its data sheet; None is a CPU.

    Raises:
        ValueError: the report is of another device.
    """
    measured = str(report.machine.get("device", ""))
    was_cpu = measured.startswith(str(report.machine.get("cpu", "?")))
    is_other = not was_cpu if device is None else was_cpu or _letters(device.split("-")[0]) not in _letters(measured)
    if is_other and report.kind != "serve":
        modelled = "a CPU" if device is None else device
        raise ValueError(
            f"{source}: it was measured on {measured or 'an unknown device'} and {modelled} is modelled: "
            "measure there, or leave --calibrate out"
        )


def _letters(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())
