from __future__ import annotations

from pathlib import Path

import pytest

from headrace.config.errors import ConfigError
from headrace.config.source import parse_document, parse_value, read_document


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_document(text, name="c.yml")
    return str(caught.value)


def test_every_key_knows_its_line() -> None:
    document = parse_document("\na: 1\nb:\n  c: 2\n  d: [3,\n     4]\ne: {f: {g: 5}}\n", name="c.yml")
    assert document.values == {"a": 1, "b": {"c": 2, "d": [3, 4]}, "e": {"f": {"g": 5}}}
    assert document.where("a") == "c.yml:2"
    assert document.where("b.c") == "c.yml:4"
    assert document.where("b.d[1]") == "c.yml:6"
    assert document.where("e.f.g") == "c.yml:7"
    assert document.where("b.missing.deeper") == "c.yml:3"
    assert document.where("missing") == "c.yml"


def test_anchors_and_merges_keep_their_values() -> None:
    document = parse_document("base: &b {x: 1, y: 2}\nchild: {<<: *b, y: 3}\n", name="c.yml")
    assert document.values["child"] == {"x": 1, "y": 3}
    assert document.where("child.y") == "c.yml:2"


@pytest.mark.parametrize("text", ["", "# only a comment\n", "---\n", "null\n"])
def test_an_empty_file_is_an_empty_mapping(text: str) -> None:
    assert parse_document(text, name="c.yml").values == {}


def test_what_is_no_mapping_is_refused() -> None:
    assert refused("- 1\n- 2\n") == "c.yml: the file has to hold a mapping (lines of `key: value`)"
    assert refused("just text\n").endswith("has to hold a mapping (lines of `key: value`)")
    assert refused("1: 2\n") == "c.yml:1: 1: keys have to be text"


def test_a_key_written_twice_is_refused() -> None:
    assert refused("a: 1\nb: 2\na: 3\n") == "c.yml:3: a: written twice (first in line 1): keep one"
    assert refused("k:\n  a: 1\n  a: 1\n") == "c.yml:3: k.a: written twice (first in line 2): keep one"


def test_broken_yaml_names_the_line() -> None:
    assert refused("a: [1, 2\nb: 3\n").startswith("c.yml:2: not valid YAML: ")
    assert refused("a: 1\n b: 2\n").startswith("c.yml:2: not valid YAML: ")
    assert refused("a: !!python/object:os.system x\n").startswith("c.yml:1: not valid YAML: ")
    assert refused("a: 1\n---\nb: 2\n").startswith("c.yml:2: not valid YAML: ")
    assert refused("a: &x [*x]\n") == "c.yml: nested too deeply, or an anchor that contains itself"


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "none.yml", "no such file"), (tmp_path, "can't be read: Is a directory")):
        with pytest.raises(ConfigError) as caught:
            read_document(path)
        assert str(caught.value) == f"{path}: {message}"
    binary = tmp_path / "binary.yml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="can't be read"):
        read_document(binary)


def test_values_of_set() -> None:
    assert parse_value("[1, 2]") == [1, 2]
    assert parse_value("") is None
    with pytest.raises(ValueError, match="not a YAML value"):
        parse_value("[1")
