"""Runs vLLM's REST front end without an engine, for `benchmarks.front_end`; runs in vLLM's own environment.

`python benchmarks/peers/vllm_front_end.py STEP_MS FLAGS OF vllm serve`: its HTTP server, with `AsyncLLM.generate`
replaced by one that says what benchmarks/front_end/tokenizer.py says, at the same pace. So neither tokenization nor
detokenization nor the way to the engine is in it, as they are not in Pagewire's gateway; prompts it does tokenize.
"""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import uvloop
from vllm.entrypoints.launchers.api_server.entry import run_server
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import EngineCoreClient

TEXT = " token"
TOKEN_ID = 1234
# A request with this seed wants to see a call, in Hermes' marks.
CALLS_SEED = 7
CALL = '<tool_call>{"name": "f", "arguments": {"x": "'


class NoCore:
    """A stand-in for the engine's process."""

    engine_ranks_managed = (0,)
    resources = SimpleNamespace(engine_dead=False)

    def __getattr__(self, name: str) -> Any:
        if name == "get_supported_tasks_async":
            return self._tasks
        if name.endswith("_async"):
            return self._nothing
        return lambda *args, **kwargs: None

    async def _tasks(self) -> tuple[str, ...]:
        return ("generate",)

    async def _nothing(self, *args: object, **kwargs: object) -> None:
        return None


class Steps:
    """Wakes all requests at once, every step_s seconds."""

    def __init__(self, step_s: float) -> None:
        self.step_s = step_s
        self._waiting: list[asyncio.Future[None]] = []
        self._ticker: asyncio.Task[None] | None = None

    async def next(self) -> None:
        loop = asyncio.get_running_loop()
        if self._ticker is None:
            self._ticker = loop.create_task(self._tick())
        future = loop.create_future()
        self._waiting.append(future)
        await future

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self.step_s)
            waiting, self._waiting = self._waiting, []
            for future in waiting:
                if not future.done():
                    future.set_result(None)


def install(step_s: float) -> None:
    steps = Steps(step_s)

    async def generate(
        self: AsyncLLM, prompt: Any, params: Any, request_id: str, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        num_tokens, streamed = params.max_tokens, step_s > 0
        each = 1 if streamed else num_tokens
        logprobs = None
        if params.logprobs is not None:
            entries = {TOKEN_ID + i: Logprob(-1.5, i + 1, TEXT) for i in range(params.logprobs + 1)}
            logprobs = [entries] * each
        calls = params.seed == CALLS_SEED
        for done in range(each, num_tokens + 1, each):
            await steps.next()
            last = done >= num_tokens
            text = CALL if calls and done == 1 else TEXT * each
            output = CompletionOutput(
                index=0,
                text=text,
                token_ids=[TOKEN_ID] * each,
                cumulative_logprob=None,
                logprobs=logprobs,
                finish_reason="length" if last else None,
            )
            yield RequestOutput(
                request_id=request_id,
                prompt=None,
                prompt_token_ids=list(range(16)),
                prompt_logprobs=None,
                outputs=[output],
                finished=last,
            )

    AsyncLLM.generate = generate  # type: ignore[method-assign]
    AsyncLLM._run_output_handler = lambda self: None  # type: ignore[method-assign]
    EngineCoreClient.make_async_mp_client = staticmethod(lambda **kwargs: NoCore())  # type: ignore[method-assign]


def main() -> None:
    install(float(sys.argv[1]) / 1000)
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(sys.argv[2:])
    if args.model_tag:
        args.model = args.model_tag
    validate_parsed_serve_args(args)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    uvloop.run(run_server(args))


if __name__ == "__main__":
    main()
