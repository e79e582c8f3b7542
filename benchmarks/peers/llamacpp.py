"""Measures llama.cpp's batches of sequences: `python -m benchmarks.peers.llamacpp MODEL.gguf`.

What a continuous-batching server on llama.cpp could reach at most: every sequence in step, argmax in numpy. Needs the
package llama-cpp-python.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np

from benchmarks.peers.in_process import PeerFlags, Times, main
from pagewire.config.fields import flag
from pagewire.errors import StartupError

BATCH_TOKENS = 2048
Row = tuple[int, int, int, bool]  # token, position, sequence, whether its logits are wanted


@dataclass(frozen=True, kw_only=True)
class Flags(PeerFlags):
    use_extra_bufts: bool = flag(
        True, "weights repacked for this processor; off where that build crashes", group="model"
    )


class LlamaCpp:
    def __init__(self, flags: Flags) -> None:
        llama_cpp.llama_backend_init()
        parameters = llama_cpp.llama_model_default_params()
        parameters.use_extra_bufts = flags.use_extra_bufts
        self._model = llama_cpp.llama_model_load_from_file(flags.model.encode(), parameters)
        if not self._model:
            raise StartupError(f"llama.cpp cannot load {flags.model}; its reason is above")
        self._vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(self._vocab)
        self._threads = flags.threads
        self._max_model_len = flags.max_model_len
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)

    def count_tokens(self, text: str) -> int:
        return len(self._tokens(text))

    def generate(self, prompts: Sequence[str], output_len: int) -> list[Times]:
        sequences = [self._tokens(prompt) for prompt in prompts]
        rows = [
            (token, position, index, position == len(tokens) - 1)
            for index, tokens in enumerate(sequences)
            for position, token in enumerate(tokens)
        ]
        with self._context([len(tokens) + output_len for tokens in sequences]) as context:
            started = time.perf_counter()
            first: dict[int, float] = {}
            tokens: dict[int, int] = {}
            for begin in range(0, len(rows), BATCH_TOKENS):
                sampled = self._decode(context, rows[begin : begin + BATCH_TOKENS])
                tokens |= sampled
                first |= dict.fromkeys(sampled, time.perf_counter() - started)
            for step in range(output_len - 1):
                tokens = self._decode(context, [(tokens[i], len(sequences[i]) + step, i, True) for i in sorted(tokens)])
            last = time.perf_counter() - started
        return [Times(first[index], last if output_len > 1 else first[index]) for index in range(len(prompts))]

    @contextmanager
    def _context(self, lengths: Sequence[int]) -> Iterator[Any]:
        parameters = llama_cpp.llama_context_default_params()
        # Each sequence has an equal part, in units of 256 tokens.
        parameters.n_ctx = len(lengths) * (max(lengths) + 256)
        parameters.n_batch, parameters.n_ubatch, parameters.n_seq_max = BATCH_TOKENS, 512, len(lengths)
        parameters.n_threads = parameters.n_threads_batch = self._threads
        context = llama_cpp.llama_init_from_model(self._model, parameters)
        if not context:
            raise StartupError(f"llama.cpp cannot run {len(lengths)} sequences at once; its reason is above")
        try:
            yield context
        finally:
            llama_cpp.llama_free(context)

    def _decode(self, context: Any, rows: Sequence[Row]) -> dict[int, int]:
        """The most probable next token by sequence."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0], batch.logits[i] = 1, sequence, wanted
        if status := llama_cpp.llama_decode(context, batch):
            raise StartupError(f"llama.cpp's llama_decode failed with {status} on {len(rows)} tokens")
        return {row[2]: self._argmax(context, i) for i, row in enumerate(rows) if row[3]}

    def _argmax(self, context: Any, row: int) -> int:
        logits = llama_cpp.llama_get_logits_ith(context, row)
        return int(np.ctypeslib.as_array(logits, shape=(self._vocab_size,)).argmax())

    def _tokens(self, text: str) -> list[int]:
        data = text.encode()
        buffer = (llama_cpp.llama_token * self._max_model_len)()
        count = llama_cpp.llama_tokenize(self._vocab, data, len(data), buffer, len(buffer), False, False)
        if count < 0:
            raise StartupError(f"a prompt has {-count} tokens: give more with --max-model-len")
        return list(buffer[:count])


if __name__ == "__main__":
    sys.exit(main("benchmarks.peers.llamacpp", Flags, "llama.cpp in process: curves as of a server.", LlamaCpp))
