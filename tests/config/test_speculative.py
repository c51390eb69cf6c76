from __future__ import annotations

from typing import Any

import pytest

from headrace.config import (
    Eagle3DecodingConfig,
    EagleDecodingConfig,
    LlmArgs,
    MTPDecodingConfig,
    NGramDecodingConfig,
    SADecodingConfig,
)
from headrace.config.errors import ConfigError


def refused(**values: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        LlmArgs(speculative_config=values)
    return {problem.path.removeprefix("speculative_config."): problem.message for problem in caught.value.problems}


KINDS = (
    "MTP", "mtp", "NGram", "NGRAM", "SA", "Draft_Target", "DraftTarget", "EAGLE3", "eagle", "PARD", "DFlash", "DSpark",
    "SaveState", "User_Provided", "AUTO", "auto",
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_every_spelling(kind: str) -> None:
    values: dict[str, Any] = {"decoding_type": kind, "max_draft_len": 3, "speculative_model_dir": "d"}
    if kind == "SaveState":
        values["output_directory"] = "o"
    spec = LlmArgs(speculative_config=values).speculative_config
    assert spec is not None
    assert spec.decoding_type.replace("_", "").lower() == kind.replace("_", "").lower()
    assert spec.speculative_model == "d"


def test_objects_are_taken_as_they_are() -> None:
    spec = NGramDecodingConfig(max_draft_len=4)
    assert LlmArgs(speculative_config=spec).speculative_config == spec
    assert (spec.max_matching_ngram_size, spec.is_keep_all, spec.is_public_pool) == (2, True, True)


def test_a_kind_is_needed_and_has_to_exist() -> None:
    assert refused(max_draft_len=3) == {"speculative_config": "needs the key decoding_type"}
    assert "decoding_type must be one of" in refused(decoding_type="Medusa")["speculative_config"]
    assert "Medusa" in refused(decoding_type="Medusa")["speculative_config"]


@pytest.mark.parametrize(
    ("values", "paths"),
    [
        ({"decoding_type": "Draft_Target"}, {"speculative_model", "max_draft_len"}),
        ({"decoding_type": "Eagle3", "max_draft_len": 0}, {"speculative_model", "max_draft_len"}),
        ({"decoding_type": "NGram"}, {"max_draft_len"}),
        ({"decoding_type": "NGram", "max_draft_len": -1}, {"max_draft_len"}),
        ({"decoding_type": "SA", "max_draft_len": 2, "max_matching_ngram_size": 0}, {"max_matching_ngram_size"}),
        ({"decoding_type": "SA", "max_draft_len": 2, "max_matching_ngram_size": 65, "enable_global_pool": True},
         {"max_matching_ngram_size"}),
        ({"decoding_type": "DSpark", "speculative_model": "d", "max_draft_len": 3, "block_size": 4}, {"block_size"}),
        ({"decoding_type": "SaveState"}, {"output_directory"}),
        ({"decoding_type": "MTP", "use_dynamic_tree": True}, {"dynamic_tree_max_topK"}),
        ({"decoding_type": "Eagle3", "speculative_model": "d", "max_draft_len": 3, "use_dynamic_tree": True,
          "dynamic_tree_max_topK": 2, "max_total_draft_tokens": 7}, {"max_total_draft_tokens"}),
        ({"decoding_type": "NGram", "max_draft_len": 2, "use_rejection_sampling": True}, {"use_rejection_sampling"}),
        ({"decoding_type": "MTP", "use_rejection_sampling": True, "sa_config": {}}, {"use_rejection_sampling"}),
        ({"decoding_type": "MTP", "use_rejection_sampling": True, "use_relaxed_acceptance_for_thinking": True},
         {"use_rejection_sampling"}),
        ({"decoding_type": "MTP", "use_rejection_sampling": True, "use_dynamic_tree": True,
          "dynamic_tree_max_topK": 33}, {"dynamic_tree_max_topK"}),
        ({"decoding_type": "MTP", "acceptance_rate_threshold": 1.5}, {"acceptance_rate_threshold"}),
        ({"decoding_type": "MTP", "advanced_sampling_mode": "fused"}, {"advanced_sampling_mode"}),
    ],
)  # fmt: skip
def test_contradictions_are_refused(values: dict[str, Any], paths: set[str]) -> None:
    assert refused(**values).keys() == paths


def test_a_schedule_has_to_start_at_the_draft_length() -> None:
    kind = {"decoding_type": "MTP"}
    path = "draft_len_schedule"
    assert refused(**kind, max_draft_len=4, draft_len_schedule={1: 3}).keys() == {path}
    assert refused(**kind, max_draft_len=4, draft_len_schedule={1: 4, 8: 5}).keys() == {path}
    assert refused(**kind, max_concurrency=4, draft_len_schedule={1: 4}).keys() == {path}
    assert refused(**kind, draft_len_schedule={}).keys() == {path}
    assert refused(**kind, draft_len_schedule={0: 4})


def test_draft_length_by_batch_size() -> None:
    scheduled = MTPDecodingConfig(max_draft_len=4, draft_len_schedule={4: 4, 16: 2, 32: 0})
    assert [scheduled.draft_len_at(size) for size in (1, 4, 5, 16, 17, 32, 33)] == [4, 4, 2, 2, 0, 0, 0]
    limited = MTPDecodingConfig(max_draft_len=3, max_concurrency=8)
    assert [limited.draft_len_at(size) for size in (1, 8, 9)] == [3, 3, 0]
    assert MTPDecodingConfig(max_draft_len=3).draft_len_at(1000) == 3
    assert MTPDecodingConfig().draft_len_at(1) == 0


def test_number_of_layers_stands_for_a_missing_draft_length() -> None:
    assert MTPDecodingConfig(num_nextn_predict_layers=2).max_draft_len == 2
    assert MTPDecodingConfig(num_nextn_predict_layers=1, max_draft_len=3).max_draft_len == 3


def test_eagle_becomes_eagle3_with_its_settings() -> None:
    old = EagleDecodingConfig(max_draft_len=3, speculative_model="d", use_dynamic_tree=True, dynamic_tree_max_topK=4)
    new = old.as_eagle3()
    assert isinstance(new, Eagle3DecodingConfig)
    assert (new.max_draft_len, new.speculative_model, new.dynamic_tree_max_topK) == (3, "d", 4)


def test_removed_eagle_keys_say_so() -> None:
    found = refused(decoding_type="Eagle3", max_draft_len=3, speculative_model="d", eagle_choices=[])
    assert found["eagle_choices"].startswith("no longer an option")


def test_automaton_defaults() -> None:
    config = SADecodingConfig(max_draft_len=4)
    assert (config.max_matching_ngram_size, config.enable_global_pool) == (-1, False)
