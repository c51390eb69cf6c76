from __future__ import annotations

import numpy as np
import pytest

from headrace.runtime import codec
from headrace.seam import RowLogprobs, Section, SectionResult, SlotInit, StepPlan, StepResult, int_rows, ints
from headrace.types import Sampling


def test_a_plan_comes_back_as_it_was() -> None:
    init = SlotInit(3, 9, Sampling(top_k=4, logit_bias={7: 1.5}), 5, 0, 40, (1, 2), ints([1, 2, 3, 4, 5]))
    section = Section(
        slot=ints([3]),
        num_tokens=ints([5]),
        start=ints([0]),
        num_drafts=ints([0]),
        tree=ints([0]),
        flags=ints([1]),
        num_context_rows=1,
        ids=ints([1, 2, 3, 4, 5]),
        next_ids=ints([-1]),
        blocks=(int_rows([(3, 0, 17)], 3), int_rows([], 3)),
        inits=(init,),
        copies=int_rows([(1, 0, 0, 4, 0, 5)], 6),
    )
    step = codec.decode_to_rank(codec.encode(codec.Step(StepPlan(8, (section, Section())))))
    assert isinstance(step, codec.Step)
    got, empty = step.plan.sections
    for name in ("slot", "num_tokens", "start", "flags", "ids", "next_ids", "copies"):
        np.testing.assert_array_equal(getattr(got, name), getattr(section, name))
        assert getattr(got, name).dtype == np.int32
    np.testing.assert_array_equal(got.blocks[0], section.blocks[0])
    assert got.blocks[1].shape == (0, 3) and empty.num_rows == 0
    assert got.inits[0].sampling == init.sampling and got.inits[0].stop_ids == (1, 2)
    got.slot[0] = 1  # not a view of the message


def test_a_result_comes_back_as_it_was() -> None:
    logprobs = RowLogprobs(ints([[5, 6]]), np.asarray([[-0.5, -1.5]], np.float32), ints([1]))
    result = StepResult(4, (SectionResult(ints([1]), ints([5]), {0: logprobs}, errors={2: "bad"}),), ints([7]))
    done = codec.decode_from_rank(codec.encode(codec.Done(result)))
    assert isinstance(done, codec.Done)
    got = done.result.sections[0]
    assert got.errors == {2: "bad"} and got.tokens.tolist() == [5] and done.result.finished_copies.tolist() == [7]
    np.testing.assert_array_equal(got.logprobs[0].values, logprobs.values)


def test_what_cannot_travel_is_an_error() -> None:
    result = StepResult(1, (SectionResult(ints([1]), ints([5]), logits={0: object()}),))
    with pytest.raises(TypeError, match="cannot travel"):
        codec.encode(codec.Done(result))
