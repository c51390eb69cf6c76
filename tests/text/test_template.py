from __future__ import annotations

import contextlib
import enum
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from headrace.hub.errors import ModelError
from headrace.hub.source import ModelSource, resolve_model
from headrace.text.load import load_tokenizer
from headrace.text.template import ChatTemplate, TemplateError, load_chat_template
from headrace.text.tokenizer import ByteTokenizer
from tests.hub.tiny_gguf import write_tiny_model
from tests.text import tiny_tokenizers

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "wetter", "description": "Wetter für <Ort> & mehr", "parameters": {"type": "object"}},
    }
]
USER = {"role": "user", "content": "Grüezi, 'you' & <me>"}
SYSTEM = {"role": "system", "content": "Be brief."}
CALL = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}}]}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "user": [USER],
    "system": [SYSTEM, USER],
    "turns": [SYSTEM, USER, {"role": "assistant", "content": "Hi."}, {"role": "user", "content": "Bye\n"}],
    "tools": [USER, CALL, {"role": "tool", "content": '{"t": 3}', "tool_call_id": "x"}],
    "none": [{"role": "assistant", "content": None, "tool_calls": None, "reasoning": "hm"}, USER],
}

# Written for these tests; each uses what real templates use.
CHATML = (
    "{%- for message in messages -%}\n"
    "  {{- '<|im_start|>' + message['role'] + '\n' }}\n"
    "  {%- if message.reasoning_content is defined %}<think>{{ message.reasoning_content }}</think>{% endif %}\n"
    "  {%- if message.content is string %}\n    {{- message.content | trim }}\n  {%- endif %}\n"
    "  {%- for call in message.tool_calls or [] %}\n"
    "<tool_call>{{ call.function | tojson }}</tool_call>\n"
    "  {%- endfor %}\n"
    "{{ '<|im_end|>' }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}\n"
)
TOOLBOX = (
    "{{ bos_token }}{% if tools %}\n[TOOLS]{{ tools | tojson(indent=2) }}"
    "{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "\n{% endif %}{% for d in documents or [] %}[{{ d.title }}]{% endfor %}"
    "{% set ns = namespace(found=false) %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.found = true %}{% continue %}{% endif %}"
    "{% if loop.index > 3 %}{% break %}{% endif %}"
    "{% generation %}{% set x = m.content %}{{ x }}{% endgeneration %}|{% endfor %}{{ ns.found }} {{ x is defined }}"
    "{% if thinking %}on{% endif %}{{ dict(a=1) | tojson }}{{ range(3) | list }}{{ eos_token }}"
)
STRICT = (
    "{% if messages[0].role == 'system' %}{% set messages = messages[1:] %}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate: user, assistant') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}"
)


def template(text: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, special_tokens=SPECIALS, name="test")


@pytest.mark.parametrize("name", CONVERSATIONS)
@pytest.mark.parametrize("text", [CHATML, TOOLBOX], ids=["chatml", "toolbox"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("with_extras", [True, False])
def test_equals_transformers(name: str, text: str, add_generation_prompt: bool, with_extras: bool) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tiny_tokenizers.byte_level_backend(), bos_token="<s>", eos_token="</s>", chat_template=text
    )
    tools, documents = (TOOLS, [{"title": "T", "text": "x"}]) if with_extras else (None, None)
    extra = {"thinking": True, "bos_token": "<other>"} if with_extras else {}
    expected = theirs.apply_chat_template(
        CONVERSATIONS[name],
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        tokenize=False,
        **extra,
    )
    ours = template(text).render(
        CONVERSATIONS[name],
        tools=tools,
        documents=documents,
        add_generation_prompt=add_generation_prompt,
        extra=extra,
    )
    assert ours == expected


@pytest.mark.slow
def test_smollm2_equals_transformers_in_text_and_ids() -> None:
    from transformers import TokenizersBackend

    source = resolve_model("smollm2")
    theirs = TokenizersBackend.from_pretrained(str(source.path.parent), gguf_file=source.path.name)
    tokenizer = load_tokenizer(source)
    ours = load_chat_template(source, special_tokens=tokenizer.special_tokens)
    assert ours.is_present and not ours.unknown_tokens(tokenizer) and not ours.takes_parts
    for name in ("user", "system", "turns"):
        for add in (True, False):
            rendered = ours.render(CONVERSATIONS[name], add_generation_prompt=add)
            expected = theirs.apply_chat_template(CONVERSATIONS[name], add_generation_prompt=add, tokenize=False)
            assert rendered == expected
            ids = theirs.apply_chat_template(CONVERSATIONS[name], add_generation_prompt=add, return_dict=False)
            assert tokenizer.encode(rendered, add_special_tokens=False) == ids


def test_the_templates_own_message_is_the_error() -> None:
    """behaviours.md row 92"""
    assert template(STRICT).render([SYSTEM, USER]) == f"[user]{USER['content']}"
    for messages in ([USER, USER], [SYSTEM, {"role": "tool", "content": "x"}]):
        with pytest.raises(TemplateError) as error:
            template(STRICT).render(messages)
        assert str(error.value) == "Roles must alternate: user, assistant"
        assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{% for m in messages %}{{ m.content + 1 }}{% endfor %}", "can't take these messages"),
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages[7] + 'x' }}", "no element 7"),
        ("{% if %}", "broken in line 1"),
        ("\n\n{% endfor %}", "broken in line 3"),
        ("{{ 1 / 0 }}", "can't take these messages"),
    ],
)
def test_broken_templates_are_template_errors(text: str, message: str) -> None:
    with pytest.raises(TemplateError, match=message):
        template(text).render([USER])


def test_what_writes_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "{% for a in messages[0].content %}{% for b in messages[0].content %}x{% endfor %}{% endfor %}"
    template = ChatTemplate({"default": text}, special_tokens={})
    monkeypatch.setattr("headrace.text.template.MAX_RENDER_S", 0.1)
    assert template.render([{"role": "user", "content": "ab"}]) == "xxxx"
    with pytest.raises(TemplateError, match=r"took longer than 0\.1 s: send shorter messages"):
        template.render([{"role": "user", "content": "a" * 10_000}])


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__ }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{% for i in range(10000000) %}{% endfor %}",
        "{{ messages.__class__ }}{{ self.__init__ }}{{ namespace.__init__.__globals__ }}",
    ],
)
def test_the_sandbox_holds(text: str) -> None:
    with contextlib.suppress(TemplateError):
        assert template(text).render([USER]) == "", "an unsafe attribute is undefined, and undefined is no text"


def test_no_template_says_what_to_do() -> None:
    none = ChatTemplate({}, special_tokens={}, name="gemma3-270m")
    assert not none.is_present and none.source == "" and not none.takes_parts
    with pytest.raises(TemplateError, match="gemma3-270m has no chat template: give one with --chat_template"):
        none.render([USER])


def test_objects_reach_the_template_as_plain_json() -> None:
    class Color(str, enum.Enum):
        RED = "red"

    class Model:
        def model_dump(self) -> dict[str, object]:
            return {"role": "user", "content": [("a", 1), Color.RED, object(), b"x", True, 1.5]}

    rendered = template("{{ messages | tojson }}").render([Model()])  # type: ignore[list-item]
    assert json.loads(rendered) == [{"role": "user", "content": [["a", 1], "red", "<object>", "<bytes>", True, 1.5]}]
    with pytest.raises(TemplateError, match="each message must be an object, not str"):
        template("x").render(["hello"])  # type: ignore[list-item]


def test_callers_messages_are_not_changed() -> None:
    message = {"role": "assistant", "content": None, "reasoning": "r"}
    template(CHATML).render([message])
    assert message == {"role": "assistant", "content": None, "reasoning": "r"}


def test_dates() -> None:
    year = template("{{ strftime_now('%Y') }}").render([USER])
    assert abs(int(year) - datetime.now().year) <= 1


def test_parts_or_text() -> None:
    parts = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}{% endfor %}"
    )
    assert template(parts).takes_parts
    assert not template("{% for m in messages %}{{ m.content }}{% endfor %}").takes_parts
    assert not template("{% for m in messages %}{{ m.content | tojson }}{% endfor %}").takes_parts
    assert not template("{% for m in messages %}{{ 'x' + m.content }}{% endfor %}").takes_parts


def test_tokens_that_the_tokenizer_lacks_are_listed() -> None:
    strange = template("{{ '<|im_start|>' }}<|other|>{% if x %}<start_of_turn>{% endif %}")
    assert strange.unknown_tokens(tiny_tokenizers.byte_level()) == ["<start_of_turn>", "<|other|>"]
    assert template("plain").unknown_tokens(ByteTokenizer()) == []


def folder(tmp_path: Path, files: dict[str, Any]) -> ModelSource:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return ModelSource(kind="hf", path=tmp_path, name="folder")


def rendered(source: ModelSource, *, tools: list[dict[str, Any]] | None = None, override: str | None = None) -> str:
    return load_chat_template(source, special_tokens=SPECIALS, override=override).render([USER], tools=tools)


def test_where_a_folder_keeps_its_template(tmp_path: Path) -> None:
    assert not load_chat_template(folder(tmp_path, {}), special_tokens={}).is_present
    assert (
        rendered(folder(tmp_path, {"tokenizer_config.json": {"chat_template": "config {{ bos_token }}"}}))
        == "config <s>"
    )
    assert rendered(folder(tmp_path, {"chat_template.json": {"chat_template": "json"}})) == "json"
    assert rendered(folder(tmp_path, {"chat_template.jinja": "jinja"})) == "jinja"
    source = folder(tmp_path, {"additional_chat_templates/tool_use.jinja": "with tools"})
    assert rendered(source) == "jinja" and rendered(source, tools=TOOLS) == "with tools"


def test_named_templates_of_a_config(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]
    source = folder(tmp_path, {"tokenizer_config.json": {"chat_template": named}})
    assert rendered(source) == "d" and rendered(source, tools=TOOLS) == "t"


def test_override_is_a_file_or_the_template_itself(tmp_path: Path) -> None:
    source = folder(tmp_path, {"chat_template.jinja": "own", "other.jinja": "other"})
    assert rendered(source, override=str(tmp_path / "other.jinja")) == "other"
    assert rendered(source, override="{{ messages[0].role }}") == "user"
    with pytest.raises(ModelError, match="give a Jinja file or the template"):
        rendered(source, override=str(tmp_path / "none.jinja"))


def test_templates_of_a_gguf_file(tmp_path: Path) -> None:
    extra = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    write_tiny_model(tmp_path / "m.gguf", "llama", extra=extra)
    source = ModelSource(kind="gguf", path=tmp_path / "m.gguf", name="m")
    assert rendered(source) == "plain" and rendered(source, tools=TOOLS) == "tools"


class TestArgumentsOfPastCalls:
    CALL = "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    END = "{% endfor %}{% endfor %}"

    def asks_for_text(self, written: str) -> bool:
        template = ChatTemplate({"default": f"{self.CALL}{written}{self.END}"}, special_tokens={})
        return template.arguments_as_text

    def test_objects_wherever_they_can_be_written(self) -> None:
        assert not self.asks_for_text("{{ c.function.arguments | tojson }}")
        assert not self.asks_for_text("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}")
        assert not self.asks_for_text("{{ c.function.name }}")

    def test_text_where_only_that_works(self) -> None:
        assert self.asks_for_text("{{ '```json\n' + c.function.arguments + '```' }}")
        assert self.asks_for_text("{{ c.function.arguments }}")
