"""The outputs of a schema, for a vocabulary of single bytes."""

import json
import random
from functools import lru_cache
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pagewire.services.executor.grammar.schema.exact_json import parse
from pagewire.services.executor.grammar.schema.options import Options
from pagewire.services.executor.grammar.schema.writing import to_lark

_BYTES = LLTokenizer("byte")
_LIMITS = LLParserLimits(max_lexer_states=50_000, verbose_errors=False)


def compiled(schema: Any, options: Options | None = None) -> LLMatcher:
    """Raises SchemaError. schema: JSON as text, or its value."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return _compiled(text, options or Options())


@lru_cache(256)
def _compiled(schema: str, options: Options) -> LLMatcher:
    lark = to_lark(parse(schema, "json_schema"), options)
    matcher = LLMatcher(_BYTES, LLMatcher.grammar_from_lark(lark), log_level=0, limits=_LIMITS)
    assert not matcher.is_error(), f"{matcher.get_error()}\n{lark}"
    return matcher


def admits(schema: Any, text: str, options: Options | None = None) -> bool:
    """Returns whether the text is a whole output."""
    matcher = compiled(schema, options).deep_copy()
    token_ids = list(text.encode())
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()


def any_output(schema: Any, choose: random.Random, options: Options | None = None, length: int = 300) -> str | None:
    """Returns a random output; None if it does not end soon."""
    matcher = compiled(schema, options).deep_copy()
    mask = np.empty(-(-_BYTES.vocab_size // 32), dtype=np.int32)
    output = bytearray()
    while len(output) < length:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        assert not matcher.is_error(), matcher.get_error()
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
        assert allowed, bytes(output)
        if matcher.is_accepting() and (max(allowed) > 255 and (len(allowed) == 1 or choose.random() < 0.4)):
            return output.decode()
        letters = [token for token in allowed if token < 256]
        endings = [token for token in letters if chr(token) in '}]"' and choose.random() < 0.5]
        token = choose.choice(endings or [token for token in letters if chr(token) not in "\n\t\r "] or letters)
        output.append(token)
        assert matcher.consume_token(token)
    return None
