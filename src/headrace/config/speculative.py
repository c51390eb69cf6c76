"""Settings of speculative decoding, one class a way of drafting."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, cast

from pydantic import Field, NonNegativeInt, PositiveInt, field_validator, model_validator
from typing_extensions import Self

from headrace.config.base import ConfigModel, beta, deprecated, prototype, stable
from headrace.config.errors import ConfigError, Problem
from headrace.config.kernels import MoeBackend
from headrace.config.model import LoadFormat, load_format_of_number

MAX_TREE_TOPK_FOR_REJECTION = 32


class SAEnhancerConfig(ConfigModel):
    """A suffix automaton that proposes tokens beside a draft model."""

    threshold: int = beta(4, "Shortest match whose continuation is preferred to the draft model's.", gt=0)
    enable_global_pool: bool = beta(False, "Match against all requests instead of one.")


class SpeculativeConfig(ConfigModel):
    """What all ways of drafting share."""

    ALIASES: ClassVar[dict[str, str]] = {"speculative_model_dir": "speculative_model"}
    CAN_REJECTION_SAMPLE: ClassVar[bool] = False
    NEEDS_MODEL: ClassVar[bool] = False
    NEEDS_DRAFT_LEN: ClassVar[bool] = False

    max_draft_len: int | None = stable(None, "Most tokens drafted in a step (depth of a tree).", ge=0)
    max_total_draft_tokens: int | None = stable(None, "Most tokens in a draft tree; null is that of a chain.", ge=0)
    speculative_model: str | None = stable(None, "Checkpoint of the draft model.")
    max_concurrency: int | None = stable(None, "Speculate only while at most this many requests run.", gt=0)
    draft_len_schedule: dict[PositiveInt, NonNegativeInt] | None = stable(
        None, "Draft length by batch size: each entry holds up to its batch size; above the largest there is none."
    )
    load_format: LoadFormat | None = stable(
        None, "How the draft model's weights are obtained; null is the target's way."
    )
    acceptance_rate_window_size: int | None = stable(
        None, "Steps in the rolling acceptance rate; 0 or null is off.", ge=0
    )
    acceptance_rate_threshold: float | None = stable(
        None, "Speculation ends for good when the rolling rate falls below this.", ge=0, le=1
    )
    use_rejection_sampling: bool = prototype(False, "Accept by probability instead of by equality with the sample.")
    allow_advanced_sampling: bool = deprecated(False, "Ignored: all sampling parameters work with drafts.")
    advanced_sampling_mode: Literal["full", "no_topk", "no_topp", "no_topk_no_topp"] = stable(
        "full", "Filters that sampling with drafts supports; fewer are faster, only full has min_p."
    )
    enable_penalty: bool = prototype(False, "Allow penalties together with drafts.")
    moe_backend: MoeBackend | None = stable(None, "Experts kernels of the draft model; null is the target's.")

    @field_validator("load_format", mode="before")
    @classmethod
    def _load_format_number(cls, value: Any) -> Any:
        return load_format_of_number(value)

    @model_validator(mode="after")
    def _fields_agree(self) -> Self:
        found = [*self._base_problems(), *self.kind_problems()]
        if found:
            raise ConfigError(found)
        return self

    def kind_problems(self) -> list[Problem]:
        """Contradictions that only this way of drafting knows."""
        return []

    def _base_problems(self) -> list[Problem]:
        found: list[Problem] = []
        kind = self.__dict__.get("decoding_type", "")
        if self.NEEDS_MODEL and not self.speculative_model:
            found.append(Problem("speculative_model", f"required with decoding_type {kind}: name the draft checkpoint"))
        if self.NEEDS_DRAFT_LEN and not (self.max_draft_len or self.draft_len_schedule):
            found.append(Problem("max_draft_len", f"must be greater than 0 with decoding_type {kind}"))
        if self.draft_len_schedule is not None:
            found += self._schedule_problems(self.draft_len_schedule)
        if self.use_rejection_sampling and not self.CAN_REJECTION_SAMPLE:
            found.append(Problem("use_rejection_sampling", f"is not available with decoding_type {kind}"))
        if self.use_rejection_sampling and self.__dict__.get("sa_config") is not None:
            found.append(Problem("use_rejection_sampling", "can't be combined with sa_config"))
        topk = self.__dict__.get("dynamic_tree_max_topK")
        if self.use_rejection_sampling and topk is not None and topk > MAX_TREE_TOPK_FOR_REJECTION:
            message = f"must be at most {MAX_TREE_TOPK_FOR_REJECTION} with use_rejection_sampling"
            found.append(Problem("dynamic_tree_max_topK", message))
        return found

    def _schedule_problems(self, schedule: dict[int, int]) -> list[Problem]:
        path = "draft_len_schedule"
        if self.max_concurrency is not None:
            return [Problem(path, "can't be combined with max_concurrency: keep one of them")]
        if not schedule:
            return [Problem(path, "needs at least one entry")]
        longest = schedule[min(schedule)]
        if self.max_draft_len is not None and longest != self.max_draft_len:
            message = f"its smallest batch size drafts {longest} tokens but max_draft_len is {self.max_draft_len}"
            return [Problem(path, message)]
        if max(schedule.values()) > longest:
            return [Problem(path, f"no entry may exceed the {longest} tokens of the smallest batch size")]
        return []

    def draft_len_at(self, batch_size: int) -> int:
        """Tokens to draft when `batch_size` requests run; 0 is none."""
        longest = self.max_draft_len or 0
        if self.max_concurrency is not None:
            return longest if batch_size <= self.max_concurrency else 0
        if self.draft_len_schedule is None:
            return longest
        sizes = sorted(self.draft_len_schedule)
        return next((self.draft_len_schedule[size] for size in sizes if batch_size <= size), 0)


def _tree_problems(config: SpeculativeConfig, topk: int | None) -> list[Problem]:
    """A dynamic tree needs a width, and its total has to fit between a chain and the full tree."""
    if not topk:
        return [Problem("dynamic_tree_max_topK", "must be greater than 0 with use_dynamic_tree")]
    depth, total = config.max_draft_len or 0, config.max_total_draft_tokens
    if total is not None and not depth <= total <= topk * depth:
        message = f"must lie between max_draft_len ({depth}) and dynamic_tree_max_topK x max_draft_len ({topk * depth})"
        return [Problem("max_total_draft_tokens", message)]
    return []


class DraftTargetDecodingConfig(SpeculativeConfig):
    """A smaller model of the same vocabulary drafts."""

    CAN_REJECTION_SAMPLE = True
    NEEDS_MODEL = True
    NEEDS_DRAFT_LEN = True

    decoding_type: Literal["Draft_Target"] = stable("Draft_Target", "Way of drafting.")


class _EagleBase(SpeculativeConfig):
    """Fields of both Eagle spellings."""

    CAN_REJECTION_SAMPLE = True
    NEEDS_MODEL = True
    NEEDS_DRAFT_LEN = True

    eagle3_layers_to_capture: set[int] | None = stable(
        None, "Layers whose hidden states the head reads; null is 1, the middle one and the fourth from the end."
    )
    eagle3_model_arch: Literal["llama3", "mistral_large3"] = stable("llama3", "Structure of the head.")
    use_dynamic_tree: bool = stable(False, "Draft a tree that follows the head's confidence.")
    dynamic_tree_max_topK: int | None = stable(None, "Children of a node in that tree.", gt=0)
    max_non_leaves_per_layer: int | None = stable(None, "Nodes of a level that may have children.", gt=0)
    num_eagle_layers: int | None = deprecated(None, "Ignored: it is max_draft_len.", gt=0)
    sa_config: SAEnhancerConfig | None = beta(None, "A suffix automaton beside the head.")

    def kind_problems(self) -> list[Problem]:
        return _tree_problems(self, self.dynamic_tree_max_topK) if self.use_dynamic_tree else []


class Eagle3DecodingConfig(_EagleBase):
    """An EAGLE-3 head drafts from the target's hidden states."""

    decoding_type: Literal["Eagle3"] = stable("Eagle3", "Way of drafting.")


class EagleDecodingConfig(_EagleBase):
    """Old spelling of Eagle3; checkpoints of EAGLE 1 and 2 are not supported."""

    decoding_type: Literal["Eagle"] = stable("Eagle", "Way of drafting; the present name is Eagle3.")

    def as_eagle3(self) -> Eagle3DecodingConfig:
        """The same settings under the present name."""
        set_values = {name: self.__dict__[name] for name in self.model_fields_set - {"decoding_type"}}
        return Eagle3DecodingConfig(**set_values)


class MTPDecodingConfig(SpeculativeConfig):
    """The checkpoint's own multi-token prediction layers draft."""

    CAN_REJECTION_SAMPLE = True

    decoding_type: Literal["MTP"] = stable("MTP", "Way of drafting.")
    use_relaxed_acceptance_for_thinking: bool = stable(False, "Accept near misses while the model thinks.")
    relaxed_topk: int = stable(1, "Candidates of the target that count as a near miss.", gt=0)
    relaxed_delta: float = stable(0.0, "Largest distance in probability of a near miss.", ge=0)
    use_mtp_vanilla: bool = stable(False, "Run the layers one after another instead of as one recurrent drafter.")
    use_dynamic_tree: bool = stable(False, "Draft a tree; greedy sampling only.")
    dynamic_tree_max_topK: int | None = stable(None, "Children of a node in that tree.", gt=0)
    sa_config: SAEnhancerConfig | None = stable(None, "A suffix automaton beside the layers.")
    begin_thinking_phase_token: int = stable(128798, "Token that starts the model's thinking.", ge=0)
    end_thinking_phase_token: int = stable(128799, "Token that ends it.", ge=0)
    num_nextn_predict_layers: int | None = deprecated(
        None, "Read from the checkpoint; given here it stands for max_draft_len where that is unset.", gt=0
    )

    @model_validator(mode="after")
    def _layers_are_a_draft_length(self) -> Self:
        if self.max_draft_len is None and self.num_nextn_predict_layers is not None:
            vars(self)["max_draft_len"] = self.num_nextn_predict_layers
        return self

    def kind_problems(self) -> list[Problem]:
        found = _tree_problems(self, self.dynamic_tree_max_topK) if self.use_dynamic_tree else []
        if self.use_rejection_sampling and self.use_relaxed_acceptance_for_thinking:
            message = "can't be combined with use_relaxed_acceptance_for_thinking"
            found.append(Problem("use_rejection_sampling", message))
        return found


class NGramDecodingConfig(SpeculativeConfig):
    """Earlier continuations of the latest tokens are drafts."""

    NEEDS_DRAFT_LEN = True

    decoding_type: Literal["NGram"] = stable("NGram", "Way of drafting.")
    max_matching_ngram_size: int = stable(2, "Longest run of tokens that is looked up.", gt=0)
    is_keep_all: bool = stable(True, "Keep all continuations of a run, not only one.")
    is_use_oldest: bool = stable(True, "Use the oldest continuation, not the newest.")
    is_public_pool: bool = stable(True, "Share continuations between requests.")


class SADecodingConfig(SpeculativeConfig):
    """A suffix automaton over the request's own text drafts."""

    NEEDS_DRAFT_LEN = True

    decoding_type: Literal["SA"] = stable("SA", "Way of drafting.")
    max_matching_ngram_size: int = stable(-1, "Longest match that is used; -1 is any.", ge=-1)
    enable_global_pool: bool = stable(False, "Match against other requests as well.")
    global_pool_size: int | None = stable(None, "Requests in that pool; at least max_batch_size.", gt=0)

    def kind_problems(self) -> list[Problem]:
        size = self.max_matching_ngram_size
        if size == 0:
            return [Problem("max_matching_ngram_size", "must be -1 or greater than 0")]
        if self.enable_global_pool and size != -1 and not 1 <= size <= 64:
            return [Problem("max_matching_ngram_size", "must lie between 1 and 64 with enable_global_pool")]
        return []


class PARDDecodingConfig(SpeculativeConfig):
    """A draft model that fills in several masked tokens at once."""

    CAN_REJECTION_SAMPLE = True
    NEEDS_MODEL = True
    NEEDS_DRAFT_LEN = True

    decoding_type: Literal["PARD"] = stable("PARD", "Way of drafting.")
    mask_token_id: int | None = stable(None, "Token that stands for one to fill in; null is the checkpoint's.", ge=0)
    sa_config: SAEnhancerConfig | None = stable(None, "A suffix automaton beside the draft model.")


class DFlashDecodingConfig(SpeculativeConfig):
    """A block-wise draft model over the target's hidden states."""

    CAN_REJECTION_SAMPLE = True
    NEEDS_MODEL = True

    decoding_type: Literal["DFlash"] = stable("DFlash", "Way of drafting.")
    mask_token_id: int | None = stable(None, "Token that stands for one to fill in; null is the checkpoint's.", ge=0)
    target_layer_ids: list[NonNegativeInt] | None = stable(None, "Layers whose hidden states the draft model reads.")
    attention_backend: Literal["VANILLA", "TRTLLM", "FA4"] = stable("VANILLA", "Attention of the draft model.")
    skip_ctx_buffer_budget_check: bool = stable(False, "Do not check that the hidden states' buffer fits.")


class DSparkDecodingConfig(SpeculativeConfig):
    """A block-wise draft model with a Markov head."""

    CAN_REJECTION_SAMPLE = True
    NEEDS_MODEL = True

    decoding_type: Literal["DSpark"] = stable("DSpark", "Way of drafting.")
    mask_token_id: int | None = stable(None, "Token that stands for one to fill in; null is the checkpoint's.", ge=0)
    target_layer_ids: list[NonNegativeInt] | None = stable(None, "Layers to read; has to equal the checkpoint's.")
    block_size: int | None = stable(None, "Tokens of a block; has to equal max_draft_len.", gt=0)
    markov_rank: int | None = stable(None, "Rank of the Markov head; null is the checkpoint's.", gt=0)
    markov_head_type: Literal["vanilla", "gated", "rnn"] | None = stable(None, "Form of that head.")
    attention_backend: Literal["AUTO", "VANILLA", "TRTLLM", "CUTEDSL"] = stable("AUTO", "Attention of the draft model.")

    def kind_problems(self) -> list[Problem]:
        if None in (self.block_size, self.max_draft_len) or self.block_size == self.max_draft_len:
            return []
        return [Problem("block_size", f"must equal max_draft_len ({self.max_draft_len})")]


class SaveHiddenStatesDecodingConfig(SpeculativeConfig):
    """Write hidden states to files, to train a drafter; nothing is drafted."""

    decoding_type: Literal["SaveState"] = stable("SaveState", "Way of drafting.")
    output_directory: str = stable(..., "Folder for the files.", min_length=1)
    write_interval: int = stable(20, "Requests in a file.", gt=0)
    file_prefix: str = stable("data", "Start of the file names.")
    eagle3_layers_to_capture: set[int] | None = stable(None, "Layers to write; null is those of an EAGLE-3 head.")


class UserProvidedDecodingConfig(SpeculativeConfig):
    """A drafter written in Python."""

    decoding_type: Literal["User_Provided"] = stable("User_Provided", "Way of drafting.")
    drafter: Any = stable(None, "The drafter object.", python_only=True)
    resource_manager: Any = stable(None, "The object that owns its resources.", python_only=True)


class AutoDecodingConfig(SpeculativeConfig):
    """A way of drafting that needs no draft model, picked by the runtime."""

    decoding_type: Literal["AUTO"] = stable("AUTO", "Way of drafting.")


AnySpeculativeConfig = Annotated[
    DraftTargetDecodingConfig
    | Eagle3DecodingConfig
    | EagleDecodingConfig
    | MTPDecodingConfig
    | NGramDecodingConfig
    | SADecodingConfig
    | PARDDecodingConfig
    | DFlashDecodingConfig
    | DSparkDecodingConfig
    | SaveHiddenStatesDecodingConfig
    | UserProvidedDecodingConfig
    | AutoDecodingConfig,
    Field(discriminator="decoding_type"),
]

_KINDS = (
    "Draft_Target", "Eagle3", "Eagle", "MTP", "NGram", "SA", "PARD", "DFlash", "DSpark", "SaveState",
    "User_Provided", "AUTO",
)  # fmt: skip
_KIND_OF_SPELLING = {name.replace("_", "").lower(): name for name in _KINDS}


def one_spelling_of_kind(value: Any) -> Any:
    """`decoding_type` of a mapping in the spelling above (files write EAGLE, ngram, DraftTarget, ...)."""
    if not isinstance(value, dict):
        return value
    values = cast("dict[str, Any]", value)
    kind = values.get("decoding_type")
    if not isinstance(kind, str):
        return values
    return {**values, "decoding_type": _KIND_OF_SPELLING.get(kind.replace("_", "").lower(), kind)}
