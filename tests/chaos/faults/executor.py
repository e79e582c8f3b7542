"""A fake executor as a process: tokens are a function of the request's seed and all tokens before, and fit its grammar.

python -m tests.chaos.faults.executor --listen unix:/tmp/e.sock --model model.gguf
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from functools import cache
from pathlib import Path

import numpy as np

from pagewire.services.executor.grammar.compiler import Compiler
from pagewire.services.executor.grammar.matcher import GrammarMatcher
from pagewire.v1 import common_pb2
from pagewire.wire import rpc
from tests.fakes import FakeExecutor, FakeExecutorServicer, FakeRow, extend_history, next_token, serve_fake_executor

# Of the built-in model.
VOCAB_SIZE = 49152
EOS_TOKEN_ID = 2
BLOCK_SIZE = 16


@cache
def compiler(model: Path) -> Compiler:
    """Takes a second: a process that starts executors makes it once."""
    return Compiler(model, VOCAB_SIZE, [EOS_TOKEN_ID])


class SeededExecutor(FakeExecutor):
    """Behaves as a real executor to its neighbors: a replacement needs tokens, seed and grammar of a request."""

    def __init__(self, model: Path) -> None:
        super().__init__(
            num_blocks=200,
            block_size=BLOCK_SIZE,
            max_num_seqs=24,
            max_num_batched_tokens=512,
            vocab_size=VOCAB_SIZE,
            eos_token_ids=[EOS_TOKEN_ID],
        )
        self._model = model
        self._matchers: dict[int, tuple[FakeRow, GrammarMatcher]] = {}  # by id() of the row

    def reset(self) -> None:
        super().reset()
        self._matchers = {}

    def _sample(self, row: FakeRow) -> int:
        params = row.sampling_params
        history = extend_history(row.histories[-1], params.seed if params.temperature else -1)
        output = row.token_ids[row.num_prompt_tokens :]
        if params.HasField("grammar"):
            return self._sample_by_grammar(row, history, output)
        banned: Collection[int] = ()
        if params.ignore_eos or len(output) < params.min_tokens:
            banned = {EOS_TOKEN_ID}
        return next_token(history, self.vocab_size, banned)

    def _sample_by_grammar(self, row: FakeRow, history: int, output: Sequence[int]) -> int:
        if id(row) not in self._matchers:
            compiled = compiler(self._model).compile(row.sampling_params.grammar)
            matcher = GrammarMatcher(compiled, row.sampling_params, [EOS_TOKEN_ID])
            matcher.advance(output)
            self._matchers[id(row)] = row, matcher
        _, matcher = self._matchers[id(row)]
        mask = np.empty(-(-self.vocab_size // 32), dtype=np.int32)
        matcher.fill_mask(mask)
        assert not matcher.error, matcher.error
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        token_id = int(allowed[(history >> 7) % len(allowed)])
        matcher.advance([token_id])
        return token_id


async def serve(address: str, model: Path, kind: common_pb2.ModelKind, step_seconds: float) -> None:
    servicer = FakeExecutorServicer(
        lambda: SeededExecutor(model), max_model_len=2048, step_seconds=step_seconds, kind=kind
    )
    server = await serve_fake_executor(address, servicer)
    try:
        await rpc.wait_for_signal()
    finally:
        await server.stop()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--embeds", action="store_true", help="yields vectors, not tokens")
    parser.add_argument("--step-seconds", type=float, default=0.005)
    parser.add_argument("--hang-timeout", type=float, default=0.0)
    args = parser.parse_args(arguments)
    kind = common_pb2.MODEL_KIND_EMBED if args.embeds else common_pb2.MODEL_KIND_UNSPECIFIED
    rpc.run(serve(args.listen, args.model, kind, args.step_seconds), args.hang_timeout)


if __name__ == "__main__":
    main()
