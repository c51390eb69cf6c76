"""One output of each format: reasoning where it has some, content, two calls."""

from __future__ import annotations

from dataclasses import dataclass

from tests.kits.parser import Call, Parsed

__all__ = ["SAMPLES", "Sample"]

CITY = 'Köln 🌉 "x" {y: }} ```json\n[1]\n``` \\ ende'
WHOLE = [
    Call("get_weather", {"city": CITY, "days": 3, "options": {"units": "°C", "deep": {"a": [{"b": "}"}]}}}),
    Call("now", {}),
]
ARGUMENTS = (
    '{"city": "Köln 🌉 \\"x\\" {y: }} ```json\\n[1]\\n``` \\\\ ende", "days": 3, '
    '"options": {"units": "°C", "deep": {"a": [{"b": "}"}]}}}'
)
OPTIONS = '{"units": "°C", "deep": {"a": [{"b": "}"}]}}'
SAID = Parsed("I need the weather.", "Let me look.", WHOLE)
CALLED = Parsed("", "Let me look.", WHOLE)


@dataclass(frozen=True)
class Sample:
    format: str
    text: str
    parsed: Parsed
    is_open: bool = False


def _elements(begin: str, end: str) -> str:
    return (
        f"{begin}<function=get_weather>\n<parameter=city>\n{CITY}\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        f"<parameter=options>\n{OPTIONS}\n</parameter>\n</function>{end}\n{begin}<function=now>\n</function>{end}"
    )


def _dsml(section: str) -> str:
    mark = "｜DSML｜"
    return (
        f'<{mark}{section}>\n<{mark}invoke name="get_weather">\n'
        f'<{mark}parameter name="city" string="true">{CITY}</{mark}parameter>\n'
        f'<{mark}parameter name="days" string="false">3</{mark}parameter>\n'
        f'<{mark}parameter name="options" string="false">{OPTIONS}</{mark}parameter>\n'
        f'</{mark}invoke>\n<{mark}invoke name="now">\n</{mark}invoke>\n</{mark}{section}>'
    )


def _glm(line: str) -> str:
    members = (("city", CITY), ("days", "3"), ("options", OPTIONS))
    parts = [f"<arg_key>{key}</arg_key>{line}<arg_value>{value}</arg_value>{line}" for key, value in members]
    return f"<tool_call>get_weather{line}{''.join(parts)}</tool_call>\n<tool_call>now{line}</tool_call>"


_HERMES = (
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
)
_THOUGHT = "<think>\nI need the weather.\n</think>\n\nLet me look.\n"
_OPEN = "I need the weather.\n</think>\n\nLet me look.\n"
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_NS = "]<]minimax[>["
_Q = '<|"|>'
_O, _C, _S = "<|open|>", "<|close|>", "<|sep|>"

SAMPLES = [
    Sample("hermes", f"Let me look.\n{_HERMES}", CALLED),
    Sample("qwen3", f"{_THOUGHT}{_HERMES}", SAID),
    Sample("qwen3_5", _OPEN, Parsed("I need the weather.", "Let me look.\n"), is_open=True),
    Sample("deepseek_r1", _OPEN, Parsed("I need the weather.", "Let me look.\n"), is_open=True),
    Sample("nemotron_v3", _OPEN, Parsed("I need the weather.", "Let me look.\n"), is_open=True),
    Sample("qwen3_coder", "Let me look.\n\n" + _elements("<tool_call>\n", "\n</tool_call>"), CALLED),
    Sample(
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}; {{"name": "now", "parameters": {{}}}}',
        Parsed("", "", WHOLE),
    ),
    Sample(
        "mistral",
        "[THINK]I need the weather.[/THINK]Let me look."
        f"[TOOL_CALLS]get_weather[ARGS]{ARGUMENTS}[TOOL_CALLS]now[CALL_ID]abc123XYZ[ARGS]{{}}",
        SAID,
    ),
    Sample(
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {ARGUMENTS}}}, {{"name": "now", "arguments": {{}}}}]',
        Parsed("", "", WHOLE),
    ),
    Sample(
        "deepseek_v3",
        "Let me look.\n{0}{1}function{2}get_weather\n```json\n{args}\n```{3}\n"
        "{1}function{2}now\n```json\n{{}}\n```{3}{4}".format(*_DEEPSEEK, args=ARGUMENTS),
        CALLED,
    ),
    Sample(
        "deepseek_v31",
        "Let me look.{0}{1}get_weather{2}{args}{3}{1}now{2}{{}}{3}{4}".format(*_DEEPSEEK, args=ARGUMENTS),
        CALLED,
    ),
    Sample("deepseek_v32", "Let me look.\n\n" + _dsml("function_calls"), CALLED),
    Sample("deepseek_v4", "I need the weather.</think>Let me look.\n\n" + _dsml("tool_calls"), SAID, is_open=True),
    Sample("glm45", f"{_THOUGHT}{_glm(chr(10))}", SAID),
    Sample("glm47", f"{_OPEN}{_glm('')}", SAID, is_open=True),
    Sample(
        "kimi_k2",
        "I need the weather.</think>Let me look.<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
        f"<|tool_call_argument_begin|>{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.now:1"
        "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
        SAID,
        is_open=True,
    ),
    Sample(
        "kimi_k3",
        f"I need the weather.{_C}think{_S}{_O}response{_S}Let me look.{_C}response{_S}{_O}tools{_S}"
        f'{_O}call tool="get_weather" index="1"{_S}{_O}argument key="city" type="string"{_S}{CITY}{_C}argument{_S}'
        f'{_O}argument key="days" type="number"{_S}3{_C}argument{_S}'
        f'{_O}argument key="options" type="object"{_S}{OPTIONS}{_C}argument{_S}{_C}call{_S}'
        f'{_O}call tool="now" index="2"{_S}{_C}call{_S}{_C}tools{_S}',
        SAID,
        is_open=True,
    ),
    Sample(
        "minimax_m2",
        f'{_OPEN}<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">{CITY}</parameter>\n'
        f'<parameter name="days">3</parameter>\n<parameter name="options">{OPTIONS}</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        SAID,
        is_open=True,
    ),
    Sample(
        "minimax_m3",
        f'<mm:think>I need the weather.</mm:think>Let me look.\n{_NS}<tool_call>\n{_NS}<invoke name="get_weather">'
        f"{_NS}<city>{CITY}{_NS}</city>{_NS}<days>3{_NS}</days>{_NS}<options>{_NS}<units>°C{_NS}</units>{_NS}<deep>"
        f"{_NS}<a>{_NS}<item>{_NS}<b>}}{_NS}</b>{_NS}</item>{_NS}</a>{_NS}</deep>{_NS}</options>{_NS}</invoke>\n"
        f'{_NS}<invoke name="now">{_NS}</invoke>\n{_NS}</tool_call>',
        SAID,
    ),
    Sample(
        "gemma4",
        "<|channel>thought\nI need the weather.\n<channel|>Let me look."
        f"<|tool_call>call:get_weather{{city:{_Q}{CITY}{_Q},days:3,options:{{units:{_Q}°C{_Q},deep:{{a:[{{b:{_Q}}}{_Q}}}]}}}}}}<tool_call|>"
        f"<|tool_call>call:now{{}}<tool_call|>",
        SAID,
    ),
    Sample(
        "pythonic",
        "[get_weather(city='Köln 🌉 \"x\" {y: }} ```json\\n[1]\\n``` \\\\ ende', days=3, "
        "options={'units': '°C', 'deep': {'a': [{'b': '}'}]}}), now()]",
        Parsed("", "", WHOLE),
    ),
    Sample(
        "openai",
        "<|channel|>analysis<|message|>I need the weather.<|end|><|start|>assistant<|channel|>commentary<|message|>"
        "Let me look.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
        f"{ARGUMENTS}<|call|><|start|>assistant to=functions.now<|channel|>commentary<|message|>{{}}",
        SAID,
    ),
]
