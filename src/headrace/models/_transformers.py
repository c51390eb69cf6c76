"""Any decoder of the `transformers` library that takes an attention function, over the paged cache.

The library's model runs whole, inside the last layer's `mix`: by then the runner has handed out every layer's mixer,
and the attention function that the model calls finds its own by the layer's index. What an architecture's attention is
(heads, scale, window, cap) is learned before anything is allocated, from a forward pass of two tokens without data.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from headrace.layers.factory import LayerFactory
from headrace.layers.heads import no_rope
from headrace.layers.hf_config import HfConfig
from headrace.layers.port import PLAIN, Act, AttentionSpec, ForwardStep, Mixer, Projected, Rope
from headrace.layers.weights import Parameter, Slot, WeightMap

NAME = "headrace"
"""What the library calls our attention function."""

HARMLESS = frozenset({
    "dropout", "scaling", "sliding_window", "softcap", "position_ids", "is_causal", "use_cache", "output_attentions",
    "output_hidden_states", "return_dict", "cache_position", "cache", "past_key_values", "layer_idx",
})  # fmt: skip
"""Arguments of an attention function that are understood here, or say nothing about a causal decoder."""

ALSO_RUNS: frozenset[str] = frozenset({
    "cohere2", "exaone4", "gemma2", "gemma3_text", "gemma4_text", "granite", "hunyuan_v1_dense", "llama",
    "ministral", "ministral3", "mistral", "nemotron", "olmo2", "olmo3", "qwen2", "qwen3", "seed_oss",
})  # fmt: skip
"""Architectures with a file of their own here that run this way too."""

FULL_KINDS = frozenset({"full_attention", "attention", "global", "full"})
SLIDING = "sliding_attention"


@dataclass(slots=True)
class _Call:
    """One call of the attention function."""

    layer: int
    query: Tensor  # [1, heads, tokens, dim], rope applied
    key: Tensor  # [1, kv_heads, tokens, dim]
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    options: dict[str, Any]

    def spec(self) -> AttentionSpec:
        scale = self.options.get("scaling")
        return AttentionSpec(
            num_heads=self.query.shape[1],
            num_kv_heads=self.key.shape[1],
            head_dim=self.query.shape[-1],
            scale=self.query.shape[-1] ** -0.5 if scale is None else float(scale),
            window=self.options.get("sliding_window"),
            soft_cap=self.options.get("softcap"),
        )


_attend: ContextVar[Callable[[_Call], Tensor]] = ContextVar("headrace_attend")


def _attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, **options: Any
) -> tuple[Tensor, None]:
    """The attention function: -> [1, tokens, heads, dim]"""
    causal = options.get("is_causal")
    is_causal = bool(vars(module).get("is_causal", True) if causal is None else causal)
    layer = int(vars(module)["layer_idx"])
    return _attend.get()(_Call(layer, query, key, value, attention_mask, is_causal, options)), None


@contextmanager
def _attending(how: Callable[[_Call], Tensor]) -> Iterator[None]:
    token = _attend.set(how)
    try:
        yield
    finally:
        _attend.reset(token)


class HostedModel:
    """One rank, unquantised. Embedding and head are the library's too."""

    has_experts = False
    is_capturable = False  # what the library's code does on the host is not known

    def __init__(self, config: HfConfig, factory: LayerFactory) -> None:
        """
        Raises:
            ValueError: what can't be run this way; the message names it.
        """
        kind = config.model_type
        if factory.parallel.size > 1:
            raise ValueError(f"{kind} is run by the transformers library, on one rank: set tensor_parallel_size to 1")
        if not factory.is_plain:
            raise ValueError(f"{kind} is run by the transformers library, unquantised: choose such a checkpoint")
        settings = _settings(config)
        specs = _examine(kind, settings)
        with _WithoutWeights(), torch.device(factory.device):
            whole = _construct(settings, factory.dtype)
        self.weights = _weight_map(whole, factory)
        self.body: Any = whole.base_model
        self.given = _Given()
        self.whole: Any = whole
        setattr(whole, whole.base_model_prefix, self.given)
        self.mixers: list[Mixer] = []
        self.layers = [HostedLayer(self, index, spec) for index, spec in enumerate(specs)]
        self.vocab_size = int(settings.vocab_size)
        self.max_position = int(settings.max_position_embeddings)

    def weight_map(self) -> WeightMap:
        return self.weights

    def ropes(self, positions: Tensor) -> dict[str, Rope]:
        return {}

    def embed(self, ids: Tensor) -> Tensor:
        return self.body.get_input_embeddings()(ids)

    def run(self, hidden: Tensor, step: ForwardStep) -> Tensor:
        """Every layer and the last norm. [tokens, hidden] -> the same"""

        def attend(call: _Call) -> Tensor:
            heads = torch.cat((call.query, call.key, call.value), 1)[0].transpose(0, 1)  # [tokens, all heads, dim]
            nothing = no_rope(step)
            packed = Projected(
                heads.flatten(1).contiguous(), call.query.shape[1], call.key.shape[1], nothing.cos, nothing.sin
            )
            mixed = self.mixers[call.layer](packed, PLAIN).data
            return mixed.view(1, call.query.shape[2], *call.query.shape[1:4:2])

        with _attending(attend):
            out = self.body(inputs_embeds=hidden[None], position_ids=step.positions[None], use_cache=False)
        return out.last_hidden_state[0]

    def final(self, partial: Tensor | None, residual: Tensor) -> Act:
        return Act(residual)

    def head(self, hidden: Act) -> Tensor:
        self.given.hidden = hidden.data[None]
        ids = torch.zeros(1, hidden.data.shape[0], dtype=torch.int64, device=hidden.data.device)
        logits = self.whole(input_ids=ids, use_cache=False).logits[0]
        return logits if logits.is_cuda else logits.float()


class HostedLayer:
    """Keeps the mixer of its layer; the last one runs them all."""

    def __init__(self, host: HostedModel, index: int, spec: AttentionSpec) -> None:
        self.host = host
        self.index = index
        self.spec = spec

    def before(self, partial: Tensor | None, residual: Tensor, step: ForwardStep) -> tuple[Any, Tensor]:
        return (residual, step), residual

    def mix(self, mixer_input: Any, mixer: Mixer) -> Tensor:
        hidden, step = mixer_input
        del self.host.mixers[self.index :]
        self.host.mixers.append(mixer)
        if self.index + 1 < len(self.host.layers):
            return hidden
        return self.host.run(hidden, step)

    def after(self, mixed: Tensor, residual: Tensor) -> tuple[None, Tensor]:
        return None, mixed


class _Given(nn.Module):
    """Stands for the body: the head of a causal model is run on hidden states that are there already."""

    hidden: Tensor

    @property
    def decoder(self) -> _Given:
        """Some heads (OPT's) ask this part of the body."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        class Output(BaseModelOutputWithPast):
            def __getattr__(self, name: str) -> None:
                """What the body of some architecture answers beside, and its head passes on."""
                if name.startswith("_"):
                    raise AttributeError(name)

        return Output(last_hidden_state=self.hidden)  # pyright: ignore[reportArgumentType]


class _WithoutWeights(TorchFunctionMode):
    """Weights, which modules make with `torch.empty`, take no memory; what they compute (rope tables) is real."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


# ---- reading an architecture -----------------------------------------------------------------


def is_known(model_type: str) -> bool:
    """Whether the library is installed and has a causal model of this type."""
    try:
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError:
        return False
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def _settings(config: HfConfig) -> Any:
    try:
        from transformers import CONFIG_MAPPING, AttentionInterface
    except ImportError:
        raise ValueError(
            "model_impl transformers needs the transformers library: install headrace[transformers]"
        ) from None
    kind = config.model_type
    if not is_known(kind):
        raise ValueError(f"the transformers library has no causal model of type {kind!r}: choose a model that it has")
    AttentionInterface.register(NAME, _attention)
    try:
        return CONFIG_MAPPING[kind].from_dict(dict(config))
    except Exception as error:  # the library validates configs in ways of its own
        raise ValueError(f"{config.place}: transformers refuses it ({type(error).__name__}: {error})") from error


def _construct(settings: Any, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(settings, attn_implementation=NAME, dtype=dtype).eval()


def _examine(kind: str, settings: Any) -> list[AttentionSpec]:
    """The attention of each layer. In bfloat16 whatever the model's dtype is: grouped products know no other where
    tensors have no values."""
    dtype = torch.bfloat16
    calls: list[_Call] = []

    def record(call: _Call) -> Tensor:
        calls.append(call)
        heads, tokens = call.query.shape[1:3]
        return call.query.new_empty(1, tokens, heads, call.value.shape[-1])

    def refuse(why: str) -> ValueError:
        return ValueError(f"{kind} can't be run by the transformers library over the paged cache: {why}")

    try:
        with torch.device("meta"), torch.inference_mode(), _attending(record):
            whole = _construct(settings, dtype)
            if not whole._supports_attention_backend:
                raise refuse("its attention takes no attention function")
            accepted = inspect.signature(whole.base_model.forward).parameters
            for name in ("position_ids", "inputs_embeds"):
                if name not in accepted:
                    raise refuse(f"its forward pass takes no {name}")
            hidden = torch.empty(1, 2, whole.get_input_embeddings().weight.shape[1], dtype=dtype)
            found = whole.base_model(inputs_embeds=hidden, position_ids=torch.arange(2)[None], use_cache=False)
            given = _Given()
            given.hidden = found.last_hidden_state
            setattr(whole, whole.base_model_prefix, given)
            whole(input_ids=torch.zeros(1, 2, dtype=torch.int64), use_cache=False)  # the head alone
    except ValueError as error:
        if str(error).startswith(kind):
            raise
        raise refuse(f"{type(error).__name__}: {error}") from error
    except KeyError as error:  # a table of attention classes by name
        if error.args == (NAME,):
            raise refuse("its attention takes no attention function") from error
        raise refuse(f"KeyError: {error}") from error
    except Exception as error:  # foreign code may fail in any way; whatever it is, this architecture can't be run
        raise refuse(f"{type(error).__name__}: {error}") from error
    for call in calls:
        _check(call, refuse)
    if [call.layer for call in calls] != list(range(int(settings.num_hidden_layers))):
        raise refuse(f"{settings.num_hidden_layers} layers attend {len(calls)} times")
    specs = [call.spec() for call in calls]
    _check_windows(settings, specs, refuse)
    return specs


def _check(call: _Call, refuse: Callable[[str], ValueError]) -> None:
    unknown = sorted(name for name, value in call.options.items() if value is not None and name not in HARMLESS)
    if unknown:
        raise refuse(f"its attention has {', '.join(unknown)}")
    if call.mask is not None:
        raise refuse("its attention adds a mask of its own")
    if not call.is_causal:
        raise refuse("its attention isn't causal")
    if call.value.shape != call.key.shape or call.key.shape[-1] != call.query.shape[-1]:
        raise refuse("its keys and values are of different sizes")


def _check_windows(settings: Any, specs: list[AttentionSpec], refuse: Callable[[str], ValueError]) -> None:
    """A window that a model states in its masks alone is not seen by an attention function."""
    stated = settings.to_dict()
    kinds = stated.get("layer_types")
    if kinds is None:
        slides = stated.get("sliding_window") is not None and stated.get("use_sliding_window") is not False
        if slides and all(spec.window is None for spec in specs):
            raise refuse("its sliding_window is known to its masks alone")
        return
    for kind, spec in zip(kinds, specs):
        if kind not in FULL_KINDS | {SLIDING}:
            raise refuse(f"it has layers of {kind}")
        if kind == SLIDING and spec.window is None:
            raise refuse("its sliding_window is known to its masks alone")


# ---- weights ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostedMap(WeightMap):
    """Names are the library's own; it says by regular expression what checkpoints may hold beside."""

    unread: tuple[str, ...] = ()
    renamings: tuple[Any, ...] = ()
    """The library's own, of names that older checkpoints have."""

    def canonical(self, name: str) -> str:
        for renaming in self.renamings:
            name, _ = renaming.rename_source_key(name)
        return name

    def is_ignored(self, name: str) -> bool:
        is_unread = any(re.search(pattern, name) for pattern in self.unread)
        return super().is_ignored(name) or (is_unread and self.find(name) is None)


class _Hosted:
    """One tensor of the library's model, maybe under several names."""

    def __init__(self, parameter: Parameter, owners: list[tuple[nn.Module, str]], *, shape: tuple[int, ...]) -> None:
        self.parameters = (parameter,)
        self.owners = owners
        self.shape = shape

    def finish(self) -> None:
        data = self.parameters[0].take().view(self.shape)
        for module, name in self.owners:
            if name in module._parameters:
                module._parameters[name] = nn.Parameter(data, requires_grad=False)
            else:
                module._buffers[name] = data


def _weight_map(whole: Any, factory: LayerFactory) -> WeightMap:
    names: dict[int, list[str]] = {}
    tensors = whole.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    modules: list[_Hosted] = []
    rules: dict[str, str] = {}
    tied: dict[str, str] = {}
    prefix = f"{whole.base_model_prefix}."
    for first, *others in names.values():
        tensor = tensors[first]
        slot = Slot("", tuple(tensor.shape) or (1,))
        init = "one" if tensor.dim() == 1 and first.endswith("weight") else "normal"
        parameter = Parameter(first, [slot], dtype=tensor.dtype, device=factory.device, init=init)
        owners = [_owner(whole, name) for name in (first, *others)]
        modules.append(_Hosted(parameter, owners, shape=tuple(tensor.shape)))
        tied |= dict.fromkeys(others, first)
        pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", first)
        rules[pattern] = pattern
        if first.startswith(prefix):  # checkpoints of the body alone
            rules.setdefault(pattern.removeprefix(prefix), pattern)
    unread = tuple(whole._keys_to_ignore_on_load_unexpected or ())
    return HostedMap(modules, rules, ("**.inv_freq",), tied, unread=unread, renamings=_renamings(whole))


def _renamings(whole: Any) -> tuple[Any, ...]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming

    found = get_model_conversion_mapping(whole)
    if any(isinstance(each, WeightConverter) for each in found):
        raise ValueError(
            f"{whole.config.model_type} can't be run by the transformers library over the paged cache: it computes its"
            " weights from those of a checkpoint"
        )
    return tuple(each for each in found if isinstance(each, WeightRenaming))


def _owner(whole: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return whole.get_submodule(path), own
