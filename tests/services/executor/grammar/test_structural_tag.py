"""Structural tags, with a vocabulary in which some of the marks are tokens."""

from typing import Any

import pytest

from pagewire.services.executor.grammar.errors import GrammarError
from pagewire.services.executor.grammar.language import to_llguidance
from pagewire.services.executor.grammar.marks import Marks
from pagewire.v1.common_pb2 import Grammar
from tests.services.executor.grammar.vocabulary import Vocabulary, vocabulary_with

MARKS = ["<tool_call>", "</tool_call>", "</think>", "<|end|>", "<|start|>", "<|channel|>", "<|message|>", "<|call|>"]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return vocabulary_with(tmp_path_factory.mktemp("tokenizer"), MARKS, ends=["<|call|>"])


def const(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}


def json_of(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": schema}


def tag(begin: str, content: Any, end: str | list[str]) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def sequence(*elements: Any) -> dict[str, Any]:
    return {"type": "sequence", "elements": elements}


ANY = {"type": "any_text"}
INTEGER = json_of({"type": "integer"})
POINT = json_of({"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]})
TAGS = [
    tag('<tool_call>\n{"name": "f", "arguments": ', POINT, "}\n</tool_call>"),
    tag('<tool_call>\n{"name": "g", "arguments": ', json_of(True), "}\n</tool_call>"),
]
F = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": [null]}\n</tool_call>'
CALLS = {"type": "triggered_tags", "triggers": ["<tool_call>"], "tags": TAGS}
LISTED = {"type": "tags_with_separator", "tags": TAGS, "separator": "\n"}
THINK = tag("<think>\n", ANY, "\n</think>\n")
MESSAGE = tag("<|channel|>analysis<|message|>", ANY, "<|end|>")
HARMONY = sequence(
    {"type": "star", "content": sequence(MESSAGE, const("<|start|>assistant"))},
    {
        "type": "or",
        "elements": [
            tag("<|channel|>final<|message|>", ANY, ""),
            tag("<|channel|>commentary to=functions.f<|message|>", POINT, "<|call|>"),
        ],
    },
)
THOUGHT = "<|channel|>analysis<|message|>Hm? <x|end|><|end|><|start|>assistant"

# Format, what it admits, what it does not.
FORMATS: dict[str, tuple[Any, list[str], list[str]]] = {
    "constant": (const('да "🙂"\n<tool_call>'), ['да "🙂"\n<tool_call>'], ["", 'да "🙂"\n', 'да "🙂"\n<tool_call> ']),
    "schema": (POINT, ['{"x": 1}', '{ "x":1}'], ["", "{}", '{"x": 1}x', '{"x":1,"y":[]}']),
    "regex": ({"type": "regex", "pattern": r"^[a/]/\/b{2}\n$"}, ["a//bb\n"], ["a//bb", "//b\n"]),
    "GBNF": ({"type": "grammar", "grammar": 'root ::= x ("," x)*\nx ::= "a" | "(" x ")"'}, ["a,((a))"], ["a,", ""]),
    "Lark": ({"type": "grammar", "grammar": 'start: "a" %json {"type": "null"}'}, ["anull"], ["a"]),
    "text": (ANY, ["", "a <tool_call> b", "<think>\n"], []),
    "text without": ({**ANY, "excludes": ["bad", "<think>"]}, ["ba d <"], ["bad", "a bad b", "<think>", "x<think>"]),
    "sequence": (sequence(const("a"), INTEGER, const("b"), ANY), ["a1b", "a-12bc"], ["ab", "1b", "axb"]),
    "or": ({"type": "or", "elements": [const("a"), const("ab"), INTEGER, POINT]}, ["a", "ab", "12", '{"x":1}'], ["b"]),
    "repeated": (
        sequence(*({"type": kind, "content": const(text)} for kind, text in
                   [("optional", "a"), ("star", "b"), ("plus", "c")])),
        ["c", "ac", "bbccc", "abc"],
        ["", "ab", "aac"],
    ),
    "tag": (tag("<a>", INTEGER, "</a>"), ["<a>1</a>"], ["<a></a>", "<a>1"]),
    "tag with several ends": (tag("<a>", ANY, ["</a>", ";"]), ["<a>x<y</a>", "<a>;"], ["<a>x", "<a>;;", "<a></a>x"]),
    "text up to a mark": (sequence(THINK, const("x")), ["<think>\nhm\n ok\n</think>\nx", "<think>\n\n</think>\nx"],
                          ["x", "<think>\nhm", "<think>\nhm\n</think>\n"]),
    "tag without an end": (tag("{", tag("[", ANY, ""), "}"), ["{[abc]}"], ["{[abc", "{[abc}]"]),
    "triggered": (CALLS, ["", "1 < 2 <tool", f"x {F}", f"{F}{G}", f"<think>{F}\n{G} bye"],
                  ["<tool_call>", "a<tool_call>b", F[:-1], F.replace("1", '"1"'), F.replace('"f"', '"h"')]),
    "triggered at least once": (CALLS | {"at_least_one": True}, [F, f"{F}x{G}"], ["", f"x{F}"]),
    "triggered at most once": (CALLS | {"stop_after_first": True}, ["", "x", f"x{F}"], [f"{F}x", f"{F}{G}"]),
    "triggered within": (tag("(", CALLS, ")"), ["()", f"(x{F}y{G})", "(((\n)"], ["(", f"({F}", f"x({F})", "(()x"]),
    "trigger without a tag": (CALLS | {"triggers": ["<tool_call>", "<b>"]}, [f"a{F}"], ["<b>", f"{F}<b>"]),
    "listed": (LISTED, ["", F, f"{F}\n{G}\n{F}"], [f"{F}{G}", f"{F}\n", f"x{F}"]),
    "listed at least once": (LISTED | {"at_least_one": True}, [F, f"{F}\n{G}"], [""]),
    "listed once": (LISTED | {"stop_after_first": True}, ["", F], [f"{F}\n{G}"]),
    "harmony": (HARMONY, [f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>Yes.",
                          '<|channel|>commentary to=functions.f<|message|>{"x": 1}'],
                ["", THOUGHT, "Yes.", "<|channel|>commentary to=functions.g"]),
}  # fmt: skip


@pytest.mark.parametrize("by_letter", [False, True], ids=["tokens", "letters"])
@pytest.mark.parametrize("name", FORMATS)
def test_formats(vocabulary: Vocabulary, name: str, by_letter: bool) -> None:
    format, admitted, refused = FORMATS[name]
    assert [text for text in admitted if not vocabulary.admits(format, text, by_letter=by_letter)] == []
    assert [text for text in refused if vocabulary.admits(format, text, by_letter=by_letter)] == []


def test_the_older_language_says_the_same(vocabulary: Vocabulary) -> None:
    structures = [{"begin": t["begin"], "schema": t["content"]["json_schema"], "end": t["end"]} for t in TAGS]
    older = {"triggers": CALLS["triggers"], "structures": structures}
    for text, admitted in ((f"x{F}", True), (F.replace("1", '"1"'), False), ("<tool_call>", False)):
        assert vocabulary.admits_tag(older, text) == admitted
        assert vocabulary.admits(CALLS, text) == admitted


NESTED: Any = const("a")
for _ in range(400):
    NESTED = sequence(NESTED)

REFUSED: list[tuple[Any, str]] = [
    (None, "#/format: a format's type must be one of const_string, .*not None"),
    ({"type": "token", "token": 1}, "#/format: a format's type must be .*not 'token'"),
    ({"type": "x" * 5000}, "not 'xxx"),
    (sequence(const("a"), {"type": "const_string"}), "#/format/elements/1: value is needed, a text"),
    (sequence(), "#/format/elements: at least one"),
    (sequence(ANY, const("a")), "#/format/elements/0: any_text has no end"),
    ({"type": "star", "content": CALLS}, "#/format/content: triggered_tags has no end"),
    (tag("a", const("b"), []), "#/format/end: must be a text"),
    (CALLS | {"tags": [tag("<x>", INTEGER, "")]}, "#/format/tags/0/begin: it begins with none of the triggers"),
    (CALLS | {"tags": [tag("<tool_call>", ANY, "")]}, "#/format/tags/0/content: any_text has no end"),
    (CALLS | {"triggers": []}, "#/format/triggers"),
    (LISTED | {"tags": []}, "#/format/tags: at least one"),
    (POINT | {"style": "qwen_xml"}, "#/format/style: only 'json'"),
    (sequence(json_of({"items": {"type": "strin"}})), "#/format/elements/0/json_schema/items/type: Invalid"),
    (json_of({"type": "array", "uniqueItems": True}), "#/format/json_schema/uniqueItems: uniqueItems can"),
    (json_of(False), "#/format/json_schema: nothing matches it"),
    ({"type": "regex", "pattern": "(a"}, "structural_tag: the regular expression is wrong: unclosed group"),
    ({"type": "grammar", "grammar": "root ::= x"}, "#/format: .*x"),
    (NESTED, "nested too deeply"),
]  # fmt: skip


@pytest.mark.parametrize(("format", "message"), REFUSED)
def test_errors_name_their_place(vocabulary: Vocabulary, format: Any, message: str) -> None:
    with pytest.raises(GrammarError, match=message) as raised:
        vocabulary.admits(format, "")
    assert len(str(raised.value)) < 700


def test_what_is_no_structural_tag() -> None:
    with pytest.raises(GrammarError, match="is not JSON"):
        from_text("{")
    for text in ("[]", "{}", '{"triggers": []}', '{"triggers": ["a"], "structures": [{}]}'):
        with pytest.raises(GrammarError, match=r'it must be {"type": "structural_tag"'):
            from_text(text)


def from_text(text: str) -> str:
    return to_llguidance(Grammar(structural_tag=text), Marks({}, []), closes=True)
