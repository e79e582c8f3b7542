"""The outputs that each language admits, token by token, with a vocabulary of every byte."""

import json
import re
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.executor.grammar.compiler import Compiler
from pagewire.services.executor.grammar.errors import GrammarError
from pagewire.services.executor.grammar.language import describe_error
from pagewire.services.executor.grammar.matcher import GrammarMatcher
from pagewire.services.executor.grammar.schema.engine_errors import is_too_complex, sentence
from pagewire.v1.common_pb2 import Grammar, SamplingParams
from tests.services.executor.grammar.schemas import SCHEMAS
from tests.services.executor.helpers.constrained import EOS, VOCAB_SIZE
from tests.services.tokenizer.tiny_tokenizers import save_byte_level, save_sentencepiece


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_byte_level(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def compiler(path: Path) -> Compiler:
    return Compiler(path, VOCAB_SIZE, [EOS])


def admits(compiler: Compiler, path: Path, grammar: Grammar, text: str) -> bool:
    """Returns whether the text is a whole output."""
    matcher = compiler.compile(grammar)
    token_ids = load_tokenizer(path).encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


POINT = '{"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x"]}'
TAGS = json.dumps(
    {
        "triggers": ["<f="],
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"const": "x"}, "end": "</f>"},
        ],
    }
)
LANGUAGES: dict[str, tuple[Grammar, list[str], list[str]]] = {
    "the whole output matches": (Grammar(regex="[ab]+c?"), ["a", "abbac"], ["", "c", "ac ", "xa"]),
    "anchors change nothing": (Grammar(regex="^ab$"), ["ab"], ["abc", "xab"]),
    "classes are Unicode's": (Grammar(regex=r"\p{L}{3}"), ["été", "при"], ["ab1"]),
    "texts": (
        Grammar(choice=Grammar.Choice(texts=["a", "a b", '"\n\\', "да 🙂"])),
        ["a", "a b", '"\n\\', "да 🙂"],
        ["", "a ", "b", "да"],
    ),
    "very many texts": (
        Grammar(choice=Grammar.Choice(texts=[f"text {number}" for number in range(5000)])),
        ["text 0", "text 4999"],
        ["", "text", "text 5000"],
    ),
    "a text of nothing": (Grammar(choice=Grammar.Choice(texts=["", "a"])), ["", "a"], ["aa"]),
    "GBNF": (
        Grammar(ebnf='root ::= item ("," item)*\nitem ::= [a-c] | "(" root ")"'),
        ["a", "a,b", "(a,(b)),c"],
        ["", "a,", "(a", "d"],
    ),
    "Lark": (Grammar(ebnf='start: "a" num\nnum: /[0-9]+/'), ["a1", "a42"], ["a", "1"]),
    "no property besides": (
        Grammar(json_schema=POINT),
        ['{"x":1}', '{"x":1,"y":2}'],
        ["{}", '{"x":"1"}', '{"x":1,"z":2}'],
    ),
    "any property besides": (
        Grammar(json_schema=POINT, disable_additional_properties=False),
        ['{"x":1}', '{"x":1,"y":2,"z":[]}'],
        ["{}", '{"x":"1"}'],
    ),
    "properties in order": (Grammar(json_schema=POINT), ['{"x": 1, "y": 2}'], ['{"y": 2, "x": 1}']),
    "whitespace": (Grammar(json_schema=POINT), ['{ "x" :\n\t1 }'], ['{"x":' + 33 * " " + "1}"]),
    "a pattern of whitespace": (
        Grammar(json_schema=POINT, whitespace_pattern=" ?"),
        ['{ "x": 1}', '{"x":1}'],
        ['{"x":\n1}', '{"x":  1}'],
    ),
    "no whitespace": (Grammar(json_schema=POINT, disable_any_whitespace=True), ['{"x":1}'], ['{"x": 1}']),
    "tags amid text": (
        Grammar(structural_tag=TAGS),
        ["", "no tag, but <b> & <f", "let us <f=a>42</f> see", '<f=b>"x"</f><f=a>1</f>'],
        ["<f=a>x</f>", "<f=c>1</f>", "<f=a>1", '<f=b>"y"</f>'],
    ),
}


@pytest.mark.parametrize("name", LANGUAGES)
def test_languages(compiler: Compiler, path: Path, name: str) -> None:
    grammar, admitted, refused = LANGUAGES[name]
    assert [text for text in admitted if not admits(compiler, path, grammar, text)] == []
    assert [text for text in refused if admits(compiler, path, grammar, text)] == []


@pytest.mark.parametrize("name", SCHEMAS)
def test_schemas_compile_and_are_schemas(compiler: Compiler, name: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[name])
    compiler.compile(Grammar(json_schema=json.dumps(SCHEMAS[name])))


def test_schemas_without_members(compiler: Compiler) -> None:
    """Anything, and nothing."""
    compiler.compile(Grammar(json_schema="true"))
    with pytest.raises(GrammarError, match="json_schema: "):
        compiler.compile(Grammar(json_schema="false"))


def test_very_many_objects(compiler: Compiler, path: Path) -> None:
    """More than the alternatives that a parser follows."""
    values = [{"id": number, "tags": [f"t{number}"]} for number in range(2100)]
    matcher = compiler.compile(Grammar(json_schema=json.dumps({"type": "array", "items": {"enum": values}})))
    dense = json.dumps(values[2087], separators=(",", ":"))
    for text, admitted in (
        (f"[{json.dumps(values[17], indent=2)}, {dense}]", True),
        ('[{"id":1,"tags":["t2"]}]', False),
    ):
        token_ids = load_tokenizer(path).encode(text, add_special_tokens=False)
        copy = matcher.deep_copy()
        assert (copy.try_consume_tokens(token_ids) == len(token_ids)) == admitted == copy.is_accepting()


TOO_COMPLEX = {
    "alternatives of a rule": Grammar(
        ebnf="root ::= x\nx ::= " + " | ".join(f'"a{i}" x' for i in range(3000)) + ' | "."'
    ),
    "alternatives of a schema": Grammar(
        json_schema=json.dumps({"anyOf": [{"type": "object", "properties": {f"p{i}": {}}} for i in range(2500)]})
    ),
}


@pytest.mark.parametrize("name", TOO_COMPLEX)
def test_what_would_fail_within_an_output_is_refused_before(compiler: Compiler, name: str) -> None:
    with pytest.raises(GrammarError, match="it is too complex; give it fewer alternatives"):
        compiler.check(TOO_COMPLEX[name].SerializeToString())


def test_what_other_requests_would_wait_for_is_refused(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = Grammar(regex="a+")
    compiler.check(grammar.SerializeToString())
    monkeypatch.setattr("pagewire.services.executor.grammar.compiler._MAX_TOKEN_SECONDS", 0.0)
    with pytest.raises(GrammarError, match=r"regex: it is too complex: .* since other requests wait for it"):
        compiler.check(grammar.SerializeToString())


PREFIX = "the quick brown fox jumps over the lazy dog "
MANY = "|".join(f"[a-z ]{{{i % 37 + 1},{i % 53 + 60}}}q{i}" for i in range(2500))
BEHIND_A_PREFIX = {
    "alternatives": Grammar(regex=f"{PREFIX}({MANY})"),
    "behind a string": Grammar(
        json_schema=json.dumps(
            {
                "type": "object",
                "properties": {
                    "a": {"type": "string"},
                    "b": {"type": "string", "pattern": f"^({MANY})$"},
                },
                "required": ["a", "b"],
            }
        )
    ),
}


@pytest.mark.parametrize("name", BEHIND_A_PREFIX)
def test_what_is_slow_behind_a_prefix_is_refused_before(compiler: Compiler, name: str) -> None:
    compiler.compile(BEHIND_A_PREFIX[name])
    with pytest.raises(GrammarError, match=r"it is too complex.*; give it fewer alternatives in one place"):
        compiler.check(BEHIND_A_PREFIX[name].SerializeToString())


def test_wide_schemas_are_not_too_complex(compiler: Compiler) -> None:
    properties = {f"key{number}": {"type": ["string", "null"]} for number in range(600)}
    compiler.check(Grammar(json_schema=json.dumps({"properties": properties})).SerializeToString())


def test_an_output_that_is_too_slow_to_follow_ends_with_the_parameter_the_place_and_a_remedy(
    compiler: Compiler,
) -> None:
    calls: list[int] = []
    params = SamplingParams(grammar=Grammar(regex="a+"))
    matcher = GrammarMatcher(compiler.compile(params.grammar), params, [EOS], lambda: calls.append(1))
    mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    matcher.fill_mask(mask)
    matcher.give_up("a token takes 7 ms there")
    assert matcher.error == (
        "regex: it cannot be followed behind token 0 of the output: a token takes 7 ms there; give it fewer "
        "alternatives in one place, or fewer repetitions"
    )
    matcher.fill_mask(mask)
    assert (mask == -1).all() and calls == [1]


WHITESPACE = {" ?": " ", r"\s*": " \n\t", "[ \n]{0,9}": "\n\n"}


@pytest.mark.parametrize("pattern", WHITESPACE)
def test_patterns_of_whitespace(compiler: Compiler, path: Path, pattern: str) -> None:
    grammar = Grammar(json_schema=POINT, whitespace_pattern=pattern)
    assert admits(compiler, path, grammar, f'{{{WHITESPACE[pattern]}"x":1}}')
    assert not admits(compiler, path, grammar, '{\f"x":1}')


@pytest.mark.parametrize("pattern", ["[ x]?", ".", r"\S", "\u00a0", "[^a]", "//"])
def test_patterns_of_more_than_whitespace_are_refused(compiler: Compiler, pattern: str) -> None:
    with pytest.raises(GrammarError, match="whitespace_pattern: it matches more than spaces"):
        compiler.compile(Grammar(json_schema=POINT, whitespace_pattern=pattern))


WRONG = {
    Grammar(ebnf="root ::= " + "(" * 150 + '"a"' + ")" * 150).SerializeToString(): "nested more than 27 deep; name",
    Grammar(ebnf='root ::= "a"' + "+" * 300).SerializeToString(): "ebnf: it is nested too deeply; give",
    Grammar(ebnf="start: " + "(" * 300 + '"a"' + ")" * 300).SerializeToString(): "ebnf: it is nested too deeply; give",
    Grammar(ebnf='start: "a" (').SerializeToString(): "ebnf: line 1, column 13: Expected token",
    Grammar(ebnf="start: foo").SerializeToString(): 'ebnf: line 1, column 8: unknown name: "foo"',
    Grammar(ebnf="start: /(a/").SerializeToString(): "ebnf: the regular expression is wrong: unclosed group",
    Grammar(regex=r"(a)\1").SerializeToString(): "regex: the regular expression is wrong: backreferences are not",
    Grammar(regex=r"[^\x00-\U0010FFFF]").SerializeToString(): "regex: nothing matches it",
    Grammar(regex="a?" * 2000 + "a" * 2000).SerializeToString(): "regex: it is too complex; give it fewer",
    Grammar(json_schema='{"pattern": "("}').SerializeToString(): "#/pattern: the regular expression is wrong: unclosed",
    Grammar(json_schema="{}", whitespace_pattern="(").SerializeToString(): "whitespace_pattern: the regular expression",
}


@pytest.mark.parametrize("grammar", WRONG, ids=range(len(WRONG)))
def test_errors_are_in_our_words(compiler: Compiler, grammar: bytes) -> None:
    with pytest.raises(GrammarError) as raised:
        compiler.check(grammar)
    message = str(raised.value)
    assert WRONG[grammar] in message and len(message) < 150
    assert not re.search("lark|lexer|parser|limit|fuel|regex parse|<|\n| \\| ", message)


@pytest.mark.parametrize("depth", [300, 990])
def test_a_schema_that_is_nested_too_deeply_is_refused(compiler: Compiler, depth: int) -> None:
    for schema in ('{"items": ' * depth + "true" + "}" * depth, '{"enum": ' + "[" * depth + "]" * depth + "}"):
        with pytest.raises(GrammarError, match="nested"):
            compiler.compile(Grammar(json_schema=schema))


OWN_WORDS = {
    "Unknown token ratelimit in rule": "Unknown token ratelimit in rule",
    "unknown grammar @ratelimit": "unknown grammar @ratelimit",
    'at 1(8): unknown special token: "<|limit|>"; following special tokens are available: <|a|>': (
        'line 1, column 8: unknown special token: "<|limit|>"'
    ),
    "at 1(8): failed to compile JSON schema: Pointer '/limit' does not exist\n  1 | start: schema too large": (
        "line 1, column 8: Pointer '/limit' does not exist"
    ),
    'at 2(4): circular reference in token "LIMIT" definition\n': (
        'line 2, column 4: circular reference in token "LIMIT" definition'
    ),
    '1(7): lark grammar too deeply nested (at "(")': (
        "it is nested too deeply; give its inner groups names of their own"
    ),
}


@pytest.mark.parametrize("error", OWN_WORDS)
def test_names_of_a_client_are_not_words_of_the_engine(error: str) -> None:
    assert sentence(error, "ebnf", is_own_text=True) == OWN_WORDS[error]


@pytest.mark.parametrize(
    ("error", "is_complex"),
    [
        ("Parser Error: Current row has 3002 items; max is 2000; consider making", True),
        ("lexer error: too many expressions constructed\n<non-verbose/>", True),
        ("fuel exhausted when checking relevance of lexemes (1000000)", True),
        ("initial lexer configuration (grammar) too big (limit for this grammar: 1)", True),
        ("panic: assertion failed: grammar.symbols.len() < u16::MAX as usize - 10\n<backtrace>", True),
        ("property 'limit' is wrong", False),
        ("too many commas\n  1 | fuel exhausted", False),
    ],
)
def test_what_is_too_complex(error: str, is_complex: bool) -> None:
    assert is_too_complex(error) == is_complex == ("it is too complex" in sentence(error))


def test_recursion_of_json_is_told_as_nesting() -> None:
    error = describe_error(Grammar(json_schema="{}"), "maximum recursion depth exceeded while decoding a JSON array")
    assert error == "json_schema: it is nested too deeply; nest it less deeply"


def test_a_server_may_leave_objects_open(path: Path, compiler: Compiler) -> None:
    leaves_open = Compiler(path, VOCAB_SIZE, [EOS], closes=False)
    text = '{"x":1,"z":2}'
    for given, admitted in ((None, True), (True, False), (False, True)):
        grammar = Grammar(json_schema=POINT, disable_additional_properties=given)
        assert admits(leaves_open, path, grammar, text) == admitted
        assert admits(compiler, path, grammar, text) == (given is False)


def test_special_tokens_are_not_text(compiler: Compiler, path: Path) -> None:
    """A token that is spelled like what the grammar wants, and means something else."""
    grammar = Grammar(regex=r"<\|im_end\|>.*")
    matcher = compiler.compile(grammar)
    assert matcher.try_consume_tokens([EOS]) == 0
    assert matcher.try_consume_tokens(load_tokenizer(path).encode("<", add_special_tokens=False)) == 1


@pytest.mark.parametrize("text", ["e\u0301a", "\u1112\u1161\u11ab", "\u00e9a"])
def test_characters_are_composed_as_the_grammar_has_them(compiler: Compiler, text: str) -> None:
    """Whatever the tokenizer makes of a prompt's: the only token that may follow is the first of this very text."""
    matcher = compiler.compile(Grammar(choice=Grammar.Choice(texts=[text])))
    mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    while not matcher.is_accepting():
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        token_id = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[0])
        assert matcher.consume_token(token_id), matcher.get_error()


def test_a_vocabulary_that_cannot_be_used_is_refused(path: Path) -> None:
    with pytest.raises(GrammarError, match="end-of-sequence"):
        Compiler(path, VOCAB_SIZE, [])
    with pytest.raises(GrammarError, match="this model's tokenizer takes no grammars"):
        Compiler(path, 17, [EOS])


@pytest.mark.parametrize("texts", [[" he is"], ["he is"], ["é ", " é"]])
def test_choices_begin_with_their_own_space(tmp_path: Path, texts: list[str]) -> None:
    """A vocabulary like SentencePiece's spells spaces out, and puts one in front of prompts: not of outputs."""
    backend = load_tokenizer(save_sentencepiece(tmp_path)).backend
    vocab = {token_id: token for token, token_id in backend.get_vocab().items()}
    end = len(vocab) - 1
    matcher = Compiler(tmp_path, len(vocab), [end]).compile(Grammar(choice=Grammar.Choice(texts=texts)))
    mask = np.zeros(-(-len(vocab) // 32), dtype=np.int32)
    written = b""
    while not matcher.is_accepting():
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        token_id = int(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))[-1])
        assert matcher.consume_token(token_id)
        piece = vocab[token_id]
        written += bytes([int(piece[3:5], 16)]) if piece.startswith("<0x") else piece.replace("▁", " ").encode()
    assert written.decode() in texts
