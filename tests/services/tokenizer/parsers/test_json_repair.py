"""Turns what is nearly JSON into JSON, and leaves JSON as it was, however it arrives."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.tokenizer.parsers.shared.json_repair import JsonRepair, repaired
from tests.sweep import examples

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3), max_leaves=6
)


def in_pieces(text: str, data: st.DataObject) -> str:
    repair, cuts = JsonRepair(), sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[begin:end] for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    return "".join(map(repair.push, pieces)) + repair.flush()


@given(value=VALUES, indent=st.sampled_from([None, 2]), ascii_only=st.booleans(), data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_json_stays_as_it_is(value: Any, indent: int | None, ascii_only: bool, data: st.DataObject) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
    assert repaired(text) == in_pieces(text, data) == text


@given(value=VALUES, data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_python_becomes_json(value: Any, data: st.DataObject) -> None:
    text = repr(value).replace("\\x", "\\u00")
    assert in_pieces(text, data) == repaired(text)
    if "\\U" not in text:
        assert json.loads(repaired(text)) == value


def test_a_piece_that_ends_with_a_number_does_not_hide_the_next_word() -> None:
    repair = JsonRepair()
    assert repair.push("[-1000") + repair.push(", None]") + repair.flush() == "[-1000, null]"


@given(text=st.text(alphabet="{}[],:'\"\\ux1aN \n", max_size=30), data=st.data())
@settings(max_examples=examples(300), deadline=None)
def test_pieces_do_not_matter(text: str, data: st.DataObject) -> None:
    assert in_pieces(text, data) == repaired(text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{'a': 'it\"s', \"b\": [1, 2,],}", '{"a": "it\\"s", "b": [1, 2]}'),
        ('{"a": NaN, "b": -Infinity, "c": nan, "d": undefined}', '{"a": null, "b": null, "c": null, "d": null}'),
        ('{"a": "x\ny\\d\\\'\\u12"}', '{"a": "x\\ny\\\\d\'\\\\u12"}'),
        ('{"a": "NaN, True,}"}', '{"a": "NaN, True,}"}'),
        ('{"a": tru}', '{"a": tru}'),
        ('{"a": 1,', '{"a": 1,'),
        ("x" * 1000, "x" * 1000),
        ('{"a": 1,' + " " * 1000 + "}", '{"a": 1,' + " " * 1000 + "}"),
    ],
)
def test_repairs(text: str, expected: str) -> None:
    assert repaired(text) == expected
    repair = JsonRepair()
    assert "".join(map(repair.push, text)) + repair.flush() == expected


def test_endless_space_is_not_held_back() -> None:
    repair = JsonRepair()
    out = "".join(repair.push(" ") for _ in [repair.push("[1,"), *range(10_000)])
    assert len(out) > 9_000
