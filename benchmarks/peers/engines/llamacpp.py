"""Runs llama.cpp's batches of sequences for `python -m benchmarks.peers`; needs the package llama-cpp-python.

What a continuous-batching server on llama.cpp could reach at most: every sequence in step, argmax in numpy. Nothing is
kept between batches, prefixes neither.

`python -m benchmarks.peers.engines.llamacpp IN.gguf OUT.gguf Q4_0` converts a file.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.engines.worker import InBatches, Times, Unfinished, Work, main

BATCH_TOKENS = 2048
LONGEST_PROMPT = 8192
Row = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


class LlamaCppError(Exception):
    """Raised when llama.cpp fails; it logs the reason itself."""


class LlamaCpp:
    def __init__(self, settings: Mapping[str, Any]) -> None:
        """settings: model (a GGUF file), threads, use_extra_bufts."""
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_extra_bufts = settings["use_extra_bufts"]
        self._model = llama_cpp.llama_model_load_from_file(settings["model"].encode(), parameters)
        if not self._model:
            raise LlamaCppError(f"llama.cpp cannot load {settings['model']}")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._threads = settings["threads"]
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def generate(self, work: Work, deadline: float) -> list[Times]:
        sequences = [self._tokens(prompt) for prompt in work.prompts]
        rows = [
            (token, position, index, position == len(tokens) - 1)
            for index, tokens in enumerate(sequences)
            for position, token in enumerate(tokens)
        ]
        with self._context([len(tokens) + work.output_len for tokens in sequences]) as context:
            started = time.perf_counter()
            first: dict[int, float] = {}
            last: dict[int, float] = {}
            counts = dict.fromkeys(range(len(sequences)), 1)
            running: dict[int, int] = {}
            for begin in range(0, len(rows), BATCH_TOKENS):
                sampled = self._decode(context, rows[begin : begin + BATCH_TOKENS])
                running |= sampled
                first |= dict.fromkeys(sampled, time.perf_counter())
            last |= first
            while running := self._going_on(running, counts, work):
                if time.perf_counter() > deadline:
                    raise Unfinished
                # The last token has no keys yet.
                places = [(token, len(sequences[i]) + counts[i] - 1, i, True) for i, token in sorted(running.items())]
                running = self._decode(context, places)
                last |= dict.fromkeys(running, time.perf_counter())
                for index in running:
                    counts[index] += 1
        return [Times(started, first[i], last[i], counts[i]) for i in range(len(sequences))]

    def _going_on(self, sampled: Mapping[int, int], counts: Mapping[int, int], work: Work) -> dict[int, int]:
        return {
            index: token
            for index, token in sampled.items()
            if counts[index] < work.output_len and (work.exact or not llama_cpp.llama_vocab_is_eog(self._vocab, token))
        }

    @contextmanager
    def _context(self, lengths: Sequence[int]) -> Iterator[Any]:
        parameters = llama_cpp.llama_context_default_params()
        # Each sequence has an equal part, in units of 256 tokens.
        parameters.n_ctx = len(lengths) * (max(lengths) + 256)
        parameters.n_batch, parameters.n_ubatch, parameters.n_seq_max = BATCH_TOKENS, 512, len(lengths)
        parameters.n_threads = parameters.n_threads_batch = self._threads
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise LlamaCppError(f"llama.cpp cannot run {len(lengths)} sequences at once")
        try:
            yield context
        finally:
            llama_cpp.llama_free(context)

    def _decode(self, context: Any, rows: Sequence[Row]) -> dict[int, int]:
        """Returns the most probable next token by sequence."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wanted
        if status := llama_cpp.llama_decode(context, batch):
            raise LlamaCppError(f"llama_decode failed with {status} on {len(rows)} tokens")
        return {row[2]: self._argmax(context, i) for i, row in enumerate(rows) if row[3]}

    def _argmax(self, context: Any, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def _tokens(self, text: str) -> list[int]:
        data = text.encode()
        buffer = (llama_cpp.llama_token * LONGEST_PROMPT)()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, len(buffer), False, True)
        if count < 0:
            raise LlamaCppError(f"a prompt has {-count} tokens, and {LONGEST_PROMPT} are the most")
        return list(buffer[:count])


def convert(source: str, target: str, kind: str) -> int:
    """Returns llama.cpp's status: 0 if it has written `target` with weights of this kind."""
    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
    parameters.allow_requantize = True
    return int(llama_cpp.llama_model_quantize(source.encode(), target.encode(), parameters))


if __name__ == "__main__":
    sys.exit(convert(*sys.argv[1:]) if sys.argv[1:] else main(lambda settings: InBatches(LlamaCpp(settings))))
