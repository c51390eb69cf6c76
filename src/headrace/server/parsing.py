"""Which parsers a model's output goes through, and what they mean for one request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

from headrace import plugins
from headrace.front.collector import NewText
from headrace.front.errors import RequestError
from headrace.front.texts import Text
from headrace.log import get
from headrace.params import GuidedDecodingParams, SamplingParams
from headrace.server.parsed_text import ParsedText
from headrace.server.parsers._machine import Machine
from headrace.server.parsers._tags import forced_calls, later_part, strict_calls
from headrace.server.parsers.port import Format, Signs, Tree
from headrace.server.thinking import BUDGET, Budget, Spellings, is_left_open, spellings_of
from headrace.server.tools import ToolUse
from headrace.text.template import ChatTemplate
from headrace.text.tokenizer import Tokenizer
from headrace.types import Marker, ThinkingCap

__all__ = ["AUTO", "ParsedChat", "Parsing", "choose_parsing", "parser_name", "parser_names"]

log = get("server")

Kind = Literal["reasoning", "tool"]

AUTO = "auto"
_ROOM = "server.parsers"
_ALIASES = {
    "glm4": "glm45",
    "glm46": "glm45",
    "kimi_k25": "kimi_k2",
    "nano_v3": "nemotron_v3",
    "gpt_oss": "openai",
    "harmony": "openai",
    "llama3": "llama3_json",
    "deepseek_v3_1": "deepseek_v31",
    "deepseek_v3_2": "deepseek_v32",
}
"""Other engines' names."""


def parser_names(kind: Kind) -> list[str]:
    """Names for `--reasoning_parser` ("reasoning") or `--tool_parser` ("tool")."""
    return [name for name in plugins.names(_ROOM) if _serves(plugins.load(_ROOM, name), kind)]


def parser_name(given: str, kind: Kind) -> str:
    """The parser's own name. Raises ValueError: there is none of that name, or it is of the other kind."""
    name = given.strip().lower().replace("-", "_")
    name = _ALIASES.get(name, name)
    if name != AUTO and name not in parser_names(kind):
        raise ValueError(f"{kind}_parser: {given!r} is not known; known: auto, {', '.join(parser_names(kind))}")
    return name


def _serves(format: Format, kind: Kind) -> bool:
    return (format.thinking if kind == "reasoning" else format.calls) is not None


@dataclass(frozen=True, kw_only=True)
class ParsedChat:
    """What parsing means for one request."""

    new_text: NewText | None = None
    """None: the text is all content."""
    guided: GuidedDecodingParams | None = None
    """What the output has to match, calls and reasoning included."""
    starts_after: Marker = ()
    """What ends the reasoning, from where `guided` holds."""
    guided_by_tools: bool = False
    """It is the tools that constrain the output, and not the client's own field."""


@dataclass(frozen=True, kw_only=True)
class Parsing:
    """Of one server; frozen once the model is there."""

    tokenizer: Tokenizer | None = None
    thinking: Format | None = None
    calls: Format | None = None

    def chat(
        self,
        prompt: str,
        use: ToolUse,
        params: SamplingParams,
        *,
        variables: Mapping[str, Any],
        stops_thinking: bool = False,
    ) -> ParsedChat:
        """`prompt` is the rendered one; `variables` are the template's. Stop strings are looked for in the answer, and
        in the reasoning if it `stops_thinking`.

        Raises:
            RequestError: a call has to be made and nobody knows how this model writes one.
        """
        opening = self._opening(prompt, variables)
        is_parsed = self.thinking is not None or (self.calls is not None and bool(use.tools))
        new_text = None
        if self.tokenizer is not None and params.detokenize and is_parsed:
            new_text = partial(self._new_text, use, opening is True, stops_thinking)
        tree, own = self._tool_tree(use, params), params.guided_decoding
        thinking = self.thinking.thinking if self.thinking else None
        if thinking is None or opening is False or (tree is None and own is None):
            return ParsedChat(new_text=new_text, guided=_tagged(tree) or own, guided_by_tools=tree is not None)
        wanted = _tree_of(own) if tree is None else tree
        if wanted is None or (opening is None and use.choice == "auto" and tree is not None):
            return ParsedChat(new_text=new_text, guided=_tagged(tree) or own, guided_by_tools=tree is not None)
        answer = self.thinking.answer if self.thinking and tree is None else ("", "")
        wanted = later_part(thinking, wanted, answer=answer, is_open=opening is True)
        starts_after = self._spellings.markers[thinking.end] if opening else ()
        return ParsedChat(
            new_text=new_text, guided=_tagged(wanted), starts_after=starts_after, guided_by_tools=tree is not None
        )

    def cap(self, budget: Budget, prompt: str, use: ToolUse | None, *, variables: Mapping[str, Any]) -> ThinkingCap:
        """The limit on the output's reasoning. `use` is a chat's; None: the prompt is any text, and not of a template.

        Raises:
            RequestError: nobody knows how this model marks its reasoning.
        """
        thinking = self.thinking.thinking if self.thinking else None
        if thinking is None:
            raise RequestError(
                f"{BUDGET} needs to know how this model marks its reasoning: start the server with --reasoning_parser"
                f" ({', '.join(parser_names('reasoning'))} or auto), or leave it out",
                param=BUDGET,
                code="no_reasoning_parser",
            )
        calls = self.calls.calls if self.calls and use is not None and use.tools else None
        others = (*thinking.also_ends, *(calls.begins if calls and calls.ends_reasoning else ()))
        is_open = is_left_open(prompt, thinking.begin, thinking.end)
        markers = self._spellings.markers
        return ThinkingCap(
            max_tokens=budget.num_tokens,
            ends=tuple(markers[text] for text in (thinking.end, *others)),
            begin=markers[thinking.begin],
            is_open=is_open if use is None else self._opening(prompt, variables) is True,
            is_anywhere=thinking.anywhere,
            blank_ids=() if thinking.anywhere else self._spellings.blank_ids,
        )

    def _new_text(
        self, use: ToolUse, is_open: bool, stops_thinking: bool, params: SamplingParams, eos_ids: frozenset[int]
    ) -> Text:
        assert self.tokenizer is not None
        calls = self.calls if use.tools else None
        machine = Machine(thinking=self.thinking, calls=calls, tools=use.tools or None, is_open=is_open)
        return ParsedText(
            self.tokenizer,
            machine,
            params,
            eos_ids=eos_ids,
            shown_ids=self._thinking_ids if calls is None else self._thinking_ids | self._call_ids,
            one_call=calls is not None and not use.parallel,
            stops_thinking=stops_thinking,
        )

    def _tool_tree(self, use: ToolUse, params: SamplingParams) -> Tree | None:
        """What the tools ask of the output: a call, or that calls match their schemas."""
        if not use.is_forced:
            is_strict = any(tool.strict for tool in use.tools.values()) and params.guided_decoding is None
            if self.calls is None or self.calls.calls is None or not is_strict or self.calls.whole:
                return None
            return strict_calls(self.calls.calls.tags, list(use.tools.values()), many=use.parallel)
        if self.calls is None or self.calls.calls is None:
            raise RequestError(
                "tool_choice needs to know how this model writes calls: start the server with --tool_parser"
                f" ({', '.join(parser_names('tool'))} or auto), or send tool_choice: auto",
                param="tool_choice",
                code="no_tool_parser",
            )
        if params.guided_decoding is not None:
            raise RequestError(
                "a call that has to be made leaves no room for another constraint on the text: leave out"
                " response_format (and guided_*), or send tool_choice: auto",
                param="tool_choice",
            )
        return forced_calls(self.calls.calls.tags, use.candidates, many=use.parallel and use.choice == "required")

    def _opening(self, prompt: str, variables: Mapping[str, Any]) -> bool | None:
        """Whether the output begins inside the reasoning; None: it may begin with it or not."""
        thinking = self.thinking.thinking if self.thinking else None
        if thinking is None:
            return False
        end = prompt.rstrip()
        if end.endswith(thinking.begin.rstrip()):
            return True
        if end.endswith(thinking.end.rstrip()):
            return False
        if any(variables.get(name) is False for name in ("enable_thinking", "thinking")):
            return False
        return thinking.is_open or None

    def _ids(self, text: str) -> list[int]:
        return [] if self.tokenizer is None else self.tokenizer.encode(text, add_special_tokens=False)

    @cached_property
    def _spellings(self) -> Spellings:
        thinking = self.thinking.thinking if self.thinking else None
        calls = self.calls.calls if self.calls else None
        assert self.tokenizer is not None and thinking is not None
        texts = (thinking.begin, thinking.end, *thinking.also_ends, *(calls.begins if calls else ()))
        return spellings_of(texts, self.tokenizer)

    @cached_property
    def _thinking_ids(self) -> frozenset[int]:
        thinking = self.thinking.thinking if self.thinking else None
        return self._special(thinking.tokens if thinking else ())

    @cached_property
    def _call_ids(self) -> frozenset[int]:
        calls = self.calls.calls if self.calls else None
        return self._special(calls.tokens if calls else ())

    def _special(self, tokens: Sequence[str]) -> frozenset[int]:
        """Ids of those that are special tokens of this tokenizer; others have text anyway."""
        encoded = [self._ids(token) for token in tokens]
        special = self.tokenizer.special_ids if self.tokenizer else frozenset[int]()
        return frozenset(ids[0] for ids in encoded if len(ids) == 1 and ids[0] in special)


def _tagged(tree: Tree | None) -> GuidedDecodingParams | None:
    if tree is None:
        return None
    return GuidedDecodingParams(structural_tag={"type": "structural_tag", "format": tree})


def _tree_of(guided: GuidedDecodingParams | None) -> Tree | None:
    """A client's constraint as a node of a structural tag; None: it is one already."""
    if guided is None or guided.structural_tag is not None:
        return None
    if guided.regex is not None:
        return {"type": "regex", "pattern": guided.regex}
    if guided.grammar is not None:
        return {"type": "grammar", "grammar": guided.grammar}
    if guided.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": value} for value in guided.choice]}
    schema = guided.json
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except ValueError:  # the grammar's own check says what is wrong
            return None
    return {"type": "json_schema", "json_schema": {"type": "object"} if guided.json_object else schema}


def choose_parsing(
    reasoning: str | None,
    tool: str | None,
    *,
    template: ChatTemplate | None,
    tokenizer: Tokenizer | None,
    model_type: str,
) -> Parsing:
    """Of the names that the configuration gives; what `auto` has found is logged.

    Raises:
        ValueError: a name that isn't one, or two formats that can't be read together.
    """
    if tokenizer is None or (reasoning is None and tool is None):
        return Parsing(tokenizer=tokenizer)
    source = template.source if template is not None else ""
    names: dict[Kind, str] = {}
    asked: tuple[tuple[Kind, str | None], ...] = (("reasoning", reasoning), ("tool", tool))
    for kind, given in asked:
        name = parser_name(given, kind) if given is not None else ""
        name = _found(kind, source, model_type) if name == AUTO else name
        if name:
            names[kind] = name
    formats: dict[Kind, Format] = {kind: plugins.load(_ROOM, name) for kind, name in names.items()}
    whole = next((names[kind] for kind in names if formats[kind].whole is not None), "")
    if whole:  # such a format is read as one
        if any(name != whole for name in names.values()):
            raise ValueError(f"{whole} reads reasoning and calls together: give it as both parsers, or alone")
        formats = {"reasoning": plugins.load(_ROOM, whole), "tool": plugins.load(_ROOM, whole)}
    if "tool" in formats and "tools" not in source:
        log.warning("the chat template doesn't write tools: the model will not know of any")
    return Parsing(tokenizer=tokenizer, thinking=formats.get("reasoning"), calls=formats.get("tool"))


def _found(kind: Kind, source: str, model_type: str) -> str:
    """The one format whose signs the model shows; '' if none does, or several do. Never a guess."""
    matching: dict[str, Signs] = {}
    for name in parser_names(kind):
        format: Format = plugins.load(_ROOM, name)
        signs = format.reasoning_signs if kind == "reasoning" else format.tool_signs
        if signs is not None and _shows(signs, source, model_type):
            matching[name] = signs
    found = list(matching)
    if len(found) > 1:  # alike in the template: the model's own name decides, then the more telling signs
        told = {name: _told_by(matching[name], model_type) for name in found}
        found = [name for name in found if told[name] == max(told.values())]
    if len(found) == 1:
        log.info("%s_parser auto: %s", kind, found[0])
        return found[0]
    if found:
        log.warning("%s_parser auto: the chat template fits %s: none is used; name one", kind, ", ".join(found))
    else:
        log.warning("%s_parser auto: nothing in the chat template shows a known format: none is used", kind)
    return ""


def _told_by(signs: Signs, model_type: str) -> tuple[int, int]:
    """How much of the model's type, and how many texts of its template, speak for a format."""
    named = [len(prefix) for prefix in signs.model_types if model_type.startswith(prefix)]
    return max(named, default=0), len(signs.template)


def _shows(signs: Signs, source: str, model_type: str) -> bool:
    if not signs.template:
        return model_type.startswith(signs.model_types)
    return all(text in source for text in signs.template) and not any(text in source for text in signs.absent)
