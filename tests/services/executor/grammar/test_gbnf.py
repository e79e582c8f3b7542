"""Grammars in GBNF, with what llama.cpp takes."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from pagewire.services.executor.grammar.errors import GrammarError
from pagewire.services.executor.grammar.gbnf import to_lark
from tests.sweep import examples

_BYTES = LLTokenizer("byte")


def admits(gbnf: str, text: str) -> bool:
    matcher = LLMatcher(_BYTES, LLMatcher.grammar_from_lark(to_lark(gbnf)), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = list(text.encode())
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


ESCAPES = {
    r"\n": "\n", r"\r": "\r", r"\t": "\t", r"\\": "\\", r"\"": '"', r"\[": "[", r"\]": "]", r"\x41": "A",
    r"\xe9": "é", r"\u00e9": "é", r"\u20AC": "€", r"\U0001F600": "\U0001f600", r"\U00000041": "A", r"\x00": "\0",
    "/": "/", "^": "^", "-": "-", "&": "&", "~": "~", "é": "é", "'": "'", "#": "#", ".": ".", "|": "|",
}  # fmt: skip


@pytest.mark.parametrize("escape", ESCAPES)
def test_escapes(escape: str) -> None:
    char = ESCAPES[escape]
    assert admits(f'root ::= "x{escape}y"', f"x{char}y")
    assert not admits(f'root ::= "x{escape}y"', f"x{escape}!y")
    if escape != "^":
        assert admits(f"root ::= [{escape}]", char) and not admits(f"root ::= [{escape}]", "x")
    assert admits(f"root ::= [x{escape}]", char) and not admits(f"root ::= [^{escape}]", char)


GRAMMARS: dict[str, tuple[str, list[str], list[str]]] = {
    "names that differ in a mark": (
        'root ::= a-b a_b aB AB\na-b ::= "1"\na_b ::= "2"\naB ::= "3"\nAB ::= "4"', ["1234"], ["1134", "2234"],
    ),
    "names of Lark": ('root ::= start "," T1\nstart ::= "s"\nT1 ::= "t" root?', ["s,t", "s,ts,t"], ["s", "t,s"]),
    "digits in names": ("root ::= 1a\n1a ::= [0-9]", ["7"], ["a"]),
    "ranges": (r"root ::= [\x41-\x43\u00e9-\u00EB_-]+", ["ABCéêë_-"], ["D", "f", ""]),
    "negated": (r'root ::= "\"" [^"\\\x7F\x00-\x1F]* "\""', ['"é/"'], ['"\n"', '"\\"', '"']),
    "any character": ("root ::= . .", ["a\n", "🙂é"], ["a", "abc"]),
    "repeated": ('root ::= "a"{2} [b]{1,} "c"{0,1} ("d" | "e"){1,2}*', ["aab", "aabbcd", "aabdede"], ["ab", "aa"]),
    "lines of a choice": ('root ::=\n  "a"\n  | "b" # that\n  # and\n  | ("c"\n "d")\n', ["a", "b", "cd"], ["c", ""]),
    "nothing": ('root ::= "" | "a" root', ["", "aaa"], ["b"]),
    "recursion": ('root ::= x ("," x)*\nx ::= "a" | "(" root ")"', ["a,(a,(a))"], ["(a", ","]),
}  # fmt: skip


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars(name: str) -> None:
    grammar, admitted, refused = GRAMMARS[name]
    assert [text for text in admitted if not admits(grammar, text)] == []
    assert [text for text in refused if admits(grammar, text)] == []


WRONG = {
    "": "no rule 'root'",
    "a ::= b": "no rule 'root'",
    "root ::= nowhere": "rule 'root' uses 'nowhere'",
    'root ::= "a"\nroot ::= "b"': "line 2, column 10: rule 'root' is defined twice",
    'root ::= "a': 'line 1, column 12: expected "',
    "root ::= [a": "expected ]",
    r'root ::= "\q"': r"the escape \\q is unknown",
    r'root ::= "\u12"': r"\\u needs 4 hexadecimal digits",
    r'root ::= "\ud800"': "no character of Unicode",
    "root ::= [z-a]": "class is empty",
    'root ::= ("a"': r"expected \)",
    'root ::= "a")': "expected the end of the rule",
    'root ::= "a"{3,2}': "fewer times at most",
    'root ::= "a"{99999999999}': "repetitions are possible",
    'root = "a"': "expected ::=",
    "root ::= " + "(" * 500: "nested more than 27 deep; name inner ones as rules",
}


@pytest.mark.parametrize("grammar", WRONG, ids=range(len(WRONG)))
def test_errors_name_their_place(grammar: str) -> None:
    with pytest.raises(GrammarError, match=WRONG[grammar]):
        to_lark(grammar)


@settings(max_examples=examples(150), deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=6))
def test_every_text_can_be_written(text: str) -> None:
    """Writes the text as it is, with the escapes that it needs, and by numbers."""
    plain = "".join({"\\": r"\\", '"': r"\""}.get(char, char) for char in text)
    numbers = "".join(f"\\U{ord(char):08x}" for char in text)
    for literal in (plain, numbers):
        assert admits(f'root ::= "{literal}"', text)
    assert not text or admits(f"root ::= [{numbers}]+", text)
