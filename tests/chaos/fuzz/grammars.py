"""Grammars of all languages, catastrophic ones among them: each is refused by name or followed, and ends in time."""

import json
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pagewire.services.executor.grammar.errors import GrammarError
from pagewire.services.executor.grammar.grammars import Grammars
from pagewire.v1.common_pb2 import Grammar
from tests.chaos.fuzz.line import Finding
from tests.chaos.fuzz.mutation import WORDS, Mutator
from tests.services.executor.grammar.schemas import SCHEMAS
from tests.services.executor.helpers.constrained import EOS, VOCAB_SIZE
from tests.services.tokenizer.tiny_tokenizers import save_byte_level

COMPILE_TIMEOUT_S = 5.0
_SPECIAL = (0, 1)  # of the vocabulary
_NUM_TOKENS = 12  # of an output that follows a grammar
_DEPTH = 10_000
_HUGE = 10**9
CATASTROPHES = (
    Grammar(regex="(" * _DEPTH + "a" + ")" * _DEPTH),
    Grammar(regex=f"a{{1,{_HUGE}}}"),
    Grammar(regex="(a{1,1000}){1,1000}"),
    Grammar(regex="((((a{1,100}){1,100}){1,100}){1,100}){1,100}"),
    Grammar(regex="(a+)+$"),
    Grammar(regex="(a|a)*" * 500 + "b"),
    Grammar(regex="(?:.*){40}x" * 40),
    Grammar(regex=r"\p{L}{1,1000000}"),
    Grammar(regex=r"[\u{10000}-\u{10ffff}]{1,4000}"),
    Grammar(regex=".{0,65536}" * 20),
    Grammar(regex="|".join(f"w{i}" for i in range(50_000))),
    Grammar(regex="(?i)" + "ß" * 2000),
    Grammar(json_schema='{"items": ' * _DEPTH + "true" + "}" * _DEPTH),
    Grammar(json_schema=json.dumps({"type": "string", "maxLength": _HUGE, "minLength": _HUGE - 1})),
    Grammar(json_schema=json.dumps({"type": "string", "pattern": "^(a+)+$" * 200})),
    Grammar(json_schema=json.dumps({"type": "array", "minItems": _HUGE, "items": {"type": "null"}})),
    Grammar(json_schema=json.dumps({"type": "integer", "multipleOf": 10**15, "minimum": 10**17})),
    Grammar(json_schema=json.dumps({"type": "number", "multipleOf": 1e-300, "maximum": 1e300})),
    Grammar(json_schema=json.dumps({"$ref": "#"})),
    Grammar(json_schema=json.dumps({"allOf": [{"$ref": "#"}, {"$ref": "#"}]})),
    Grammar(json_schema=json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 50}}})),
    Grammar(json_schema=json.dumps({"$ref": "https://example.com/schema.json"})),
    Grammar(json_schema=json.dumps({"enum": [{"a": [None] * 20}] * 5000})),
    Grammar(json_schema=json.dumps({"properties": {f"p{i}": {"type": "string"} for i in range(5000)}})),
    Grammar(json_schema=json.dumps({"patternProperties": {f"^a{{0,{i}}}b": {} for i in range(60)}})),
    Grammar(choice=Grammar.Choice(texts=[f"choice {i}" for i in range(50_000)])),
    Grammar(choice=Grammar.Choice(texts=["\U0010ffff" * 10_000, "\0", "", "a"])),
    Grammar(ebnf="root ::= root root | root"),
    Grammar(ebnf="root ::= " + "(" * _DEPTH + '"a"' + ")" * _DEPTH),
    Grammar(ebnf="start: a\n" + "\n".join(f"a{'a' * i}: a{'a' * (i + 1)}" for i in range(300))),
    Grammar(ebnf=f'start: "a"~1..{_HUGE}'),
    Grammar(ebnf="root ::= [" + "".join(map(chr, range(0x4E00, 0x9FFF))) + "]{1,1000}"),
    Grammar(structural_tag=json.dumps({"type": "structural_tag", "format": {"type": "any_text"}})),
    Grammar(structural_tag='{"type": "structural_tag", "format": ' * 500 + "1" + "}" * 500),
)
_REGEXES = (r"[a-z]{2,9}", r"(\d{3}-)?\d{4}", r"\w+@\w+\.(com|org)", r"[^\s]*\p{Lu}", "(a|b(c|d)*)+", r"\x{41}.?")
_EBNFS = ('root ::= item ("," item)*\nitem ::= [a-c] | "(" root ")"', 'start: "a" num\nnum: /[0-9]+/ | "x"~2..5')
_TAGS: tuple[Any, ...] = (
    {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]},
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags", "triggers": ["<f="], "at_least_one": True, "stop_after_first": True,
            "tags": [{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {}}, "end": "</f>"}],
        },
    },
    {"type": "structural_tag", "format": {"type": "sequence", "elements": [{"type": "const_string", "value": "a"}]}},
)  # fmt: skip
_REGEX_PARTS = (
    f"{{1,{_HUGE}}}",
    "{0,3}",
    "{,",
    "*",
    "+?",
    "|",
    "(",
    ")",
    "(?:",
    "(?=a)",
    "(?i)",
    "(?P<n>",
    "[",
    "]",
    "[^]",
    "^",
    "^",
    "$",
    "\\",
    "\\b",
    "\\p{L}",
    "\\p{Nonsense}",
    "\\u{110000}",
    "\\x",
    ".",
    "&",
    "~",
    "#",
    "/",
    "[[:alpha:]]",
    "é",
)


@asynccontextmanager
async def running_grammars() -> AsyncIterator[Grammars]:
    """Returns grammars as an executor compiles them, for a vocabulary of every byte."""
    with tempfile.TemporaryDirectory(prefix="pw-") as directory:
        path = save_byte_level(Path(directory))
        grammars = Grammars(lambda: path, VOCAB_SIZE, [EOS], timeout=COMPILE_TIMEOUT_S, cache_size=4)
        try:
            yield grammars
        finally:
            grammars.close()


def drawn(mutator: Mutator) -> Grammar:
    """A grammar that is one, almost."""
    kind = mutator.random.choice(("schema", "schema", "regex", "ebnf", "tag", "choice"))
    if kind == "schema":
        value = mutator.json(mutator.random.choice([*SCHEMAS.values()]))
        return Grammar(json_schema=_spoiled(mutator, json.dumps(value), ()))
    if kind == "regex":
        return Grammar(regex=_spoiled(mutator, mutator.random.choice(_REGEXES), _REGEX_PARTS))
    if kind == "ebnf":
        return Grammar(
            ebnf=_spoiled(mutator, mutator.random.choice(_EBNFS), (*_REGEX_PARTS, "\n", "::=", ":", '"', "%"))
        )
    if kind == "tag":
        return Grammar(structural_tag=_spoiled(mutator, json.dumps(mutator.json(mutator.random.choice(_TAGS))), ()))
    return Grammar(choice=Grammar.Choice(texts=[mutator.text() for _ in range(mutator.random.randrange(4))]))


def _spoiled(mutator: Mutator, text: str, parts: tuple[str, ...]) -> str:
    """With something in it that does not belong there; without parts, seldom."""
    if not parts and mutator.is_so(0.9):
        return text
    for _ in range(mutator.random.randrange(4)):
        place = mutator.random.randrange(len(text) + 1)
        text = text[:place] + mutator.random.choice((*parts, *WORDS)) + text[place + mutator.random.randrange(2) :]
    return text


async def fuzz(grammars: Grammars, seed: int) -> None:
    """One case. Raises Finding."""
    mutator = Mutator(seed)
    await follow(grammars, drawn(mutator), mutator)


async def follow(grammars: Grammars, grammar: Grammar, mutator: Mutator) -> None:
    """Compiles the grammar, unless it is refused, and writes what it allows. Raises Finding."""
    said = str(grammar)[:500]
    try:
        compiled = await grammars.compile(grammar)
    except GrammarError as error:
        if not str(error) or len(str(error)) > 700:
            raise Finding(f"{said}: it is refused with {len(str(error))} characters") from error
        return
    except Exception as error:
        raise Finding(f"{said}: {type(error).__name__}: {error}") from error
    matcher = compiled.deep_copy()
    mask = np.zeros(-(-VOCAB_SIZE // 32), dtype=np.int32)
    for _ in range(_NUM_TOKENS):
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            return  # too complex on the way: its request ends with that
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB_SIZE])
        if len(allowed) == 0:
            raise Finding(f"{said}: nothing may follow, not even an end")
        token_id = int(mutator.random.choice(allowed))
        if token_id == EOS:
            return
        if not matcher.consume_token(token_id):
            # Where it must spell a special token as text, llguidance allows the token itself, and refuses it then.
            if "doesn't satisfy" in matcher.get_error() and token_id not in _SPECIAL:
                raise Finding(f"{said}: token {token_id} is allowed and refused: {matcher.get_error()[:200]}")
            return  # likewise
