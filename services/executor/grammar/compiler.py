"""Compiles grammars for a vocabulary, in the executor and in the process that tries them first.

llguidance bounds what compiling costs, but a grammar may still be slow, or end the process: rules nested ten thousand
deep overflow the stack. So each is first compiled in a separate process with less memory, time and stack.
"""

from __future__ import annotations

import json
import logging
import random
import resource
import time
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.executor.grammar.errors import GrammarError
from pagewire.services.executor.grammar.language import describe_error, to_llguidance
from pagewire.services.executor.grammar.marks import Marks
from pagewire.services.executor.grammar.schema.engine_errors import FEWER
from pagewire.services.executor.grammar.threads import TRIAL_STACK
from pagewire.v1.common_pb2 import Grammar

logger = logging.getLogger(__name__)

_TRIAL_MEMORY = 2 * 2**30  # bytes, for the process that tries grammars
# A step waits for the masks of all its requests.
_MAX_TOKEN_SECONDS = 0.05
# Of a grammar that is tried: outputs, and for each the fewest tokens and the processor time, not counting tokens where
# only one may follow. An output goes on, up to the time for all, while its tokens take longer than most grammars'.
_NUM_WALKS = 4
_TRIED_TOKENS, _MOST_TRIED_TOKENS = 12, 200
_WALK_SECONDS, _TRIED_SECONDS = 0.015, 0.5
_COMMON_SECONDS = 0.004
# Characters that often end a part of an output: half of the outputs prefer them, and so reach more of the grammar.
_ENDS = "\"'}])>,;:.|\n"
_NORMAL_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})


class Compiler:
    """Thread-safe."""

    def __init__(self, model_path: Path, vocab_size: int, eos_token_ids: Sequence[int], *, closes: bool = True) -> None:
        """closes: objects have no properties besides those that a schema declares, unless it says so.

        Raises GrammarError if grammars cannot be compiled for the model's vocabulary.
        """
        if not eos_token_ids:
            raise GrammarError("a grammar needs a model with an end-of-sequence token; this model names none")
        try:
            backend = load_tokenizer(model_path).backend
            self._tokenizer = LLTokenizer(_exact(backend.to_str()), n_vocab=vocab_size, eos_token=list(eos_token_ids))
        except ValueError as error:
            logger.warning("this model's tokenizer takes no grammars: %s", error)
            raise GrammarError("this model's tokenizer takes no grammars; the executor's log has the cause") from error
        added = ((token.content, token_id) for token_id, token in backend.get_added_tokens_decoder().items())
        no_text = {name: token_id for name, token_id in added if self._tokenizer.is_special_token(token_id)}
        self._marks = Marks(no_text, eos_token_ids)
        self._closes = closes
        self._eos_token_ids = frozenset(eos_token_ids)
        self._num_words = -(-vocab_size // 32)
        # Less than the engine's own limits for a token, which then takes 0.2 s at most. The first is what a
        # schema with 600 optional properties needs.
        self._limits = LLParserLimits(
            step_max_items=35_000, step_lexer_fuel=50_000, max_lexer_states=50_000, verbose_errors=False
        )

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Returns the grammar at its start, with the first mask computed, which does some of the work. Raises
        GrammarError."""
        try:
            written = to_llguidance(grammar, self._marks, closes=self._closes)
            matcher = LLMatcher(self._tokenizer, written, log_level=0, limits=self._limits)
        except GrammarError:
            raise
        except (ValueError, RecursionError) as error:  # JSON that is nested too deeply for a parser
            raise GrammarError(describe_error(grammar, str(error))) from error
        if not matcher.is_error():
            mask = np.empty(self._num_words, dtype=np.int32)
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if matcher.is_error():
            raise GrammarError(describe_error(grammar, matcher.get_error()))
        return matcher

    def started(self) -> bool:
        return True

    def check(self, grammar: bytes) -> None:
        """Compiles a serialized Grammar and follows it for some tokens, since steps wait for masks. Raises
        GrammarError."""
        parsed = Grammar.FromString(grammar)
        compiled = self.compile(parsed)
        until = time.thread_time() + _TRIED_SECONDS
        ends = {token_ids[0] for mark in _ENDS if len(token_ids := self._tokenizer.tokenize_str(mark)) == 1}
        for walk in range(_NUM_WALKS):
            self._try_output(parsed, compiled.deep_copy(), random.Random(walk), ends if walk % 2 else set(), until)

    def _try_output(
        self, grammar: Grammar, matcher: LLMatcher, choose: random.Random, preferred: Collection[int], until: float
    ) -> None:
        """Follows one output, in which the preferred tokens are half of those that are chosen if they may follow.

        until: the processor time of the thread at which it ends.
        """
        mask, seconds, common = np.zeros(self._num_words, dtype=np.int32), 0.0, time.thread_time() + _WALK_SECONDS
        for num_tried in range(_MOST_TRIED_TOKENS):
            now = time.thread_time()
            if now > until or (num_tried >= _TRIED_TOKENS and now > common and seconds < _COMMON_SECONDS):
                return
            if forced := matcher.compute_ff_tokens():
                matcher.consume_tokens(forced[: matcher.validate_tokens(forced)])
            start = time.thread_time()
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            seconds = time.thread_time() - start
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            others = [token_id for token_id in allowed if token_id not in self._eos_token_ids]
            if others and not matcher.is_error():
                near = [token_id for token_id in others if token_id in preferred] if choose.random() < 0.5 else []
                start = time.thread_time()
                matcher.consume_token(choose.choice(near or others))
                seconds += time.thread_time() - start
            self._check_place(grammar, matcher, seconds)
            if not others or matcher.is_stopped():
                return

    def _check_place(self, grammar: Grammar, matcher: LLMatcher, seconds: float) -> None:
        """Raises GrammarError if the matcher cannot go on, or the last token took too many seconds."""
        if matcher.is_error():
            raise GrammarError(describe_error(grammar, matcher.get_error()))
        if seconds > _MAX_TOKEN_SECONDS:
            raise GrammarError(
                f"{grammar.WhichOneof('form')}: it is too complex: one token takes {1000 * seconds:.0f} ms of a "
                f"processor, and at most {1000 * _MAX_TOKEN_SECONDS:.0f} ms are possible, since other requests wait "
                f"for it; {FEWER}"
            )


def _exact(tokenizer: str) -> str:
    """Returns a tokenizer's JSON without Unicode normalization: where only one text can follow, llguidance asks the
    tokenizer for its tokens, which must spell exactly that text, however its characters are composed."""
    fields = json.loads(tokenizer)
    normalizer = fields.get("normalizer") or {}
    parts = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    parts = [part for part in parts if part and part["type"] not in _NORMAL_FORMS]
    fields["normalizer"] = {"type": "Sequence", "normalizers": parts} if parts else None
    return json.dumps(fields)


def trial_compiler(model_path: Path, vocab_size: int, eos_token_ids: Sequence[int], *, closes: bool) -> Compiler:
    """Makes a compiler with limits on memory and stack, in a process that may be abandoned."""
    compiler = Compiler(model_path, vocab_size, eos_token_ids, closes=closes)
    for limit, value in ((resource.RLIMIT_STACK, TRIAL_STACK), (resource.RLIMIT_AS, _TRIAL_MEMORY)):
        _, most = resource.getrlimit(limit)
        resource.setrlimit(limit, (value if most == resource.RLIM_INFINITY else min(value, most), most))
    return compiler
