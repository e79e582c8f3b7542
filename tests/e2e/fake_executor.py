"""A fake executor as a process, which drains as the real one does.

python -m tests.e2e.fake_executor ADDRESS SHUTDOWN-TIMEOUT STEP-SECONDS

It has slots for adapters, and loads those of ADAPTERS.
"""

import asyncio
import sys
import time
from collections.abc import Sequence

from pagewire.process import process
from pagewire.wire import rpc
from tests.fakes import FakeExecutor, FakeExecutorServicer, serve_fake_executor

# The vocabulary is that of the built-in model, so its tokenizer makes text of the tokens.
VOCAB_SIZE, EOS_TOKEN_ID = 49152, 2
ADAPTERS = {"/a": "a" * 64, "/b": "b" * 64, "/ad/found": "f" * 64}  # path -> digest


def make_executor() -> FakeExecutor:
    return FakeExecutor(
        num_blocks=1024, max_num_seqs=64, vocab_size=VOCAB_SIZE, eos_token_ids=[EOS_TOKEN_ID], max_adapters=2
    )


async def serve(address: str, shutdown_timeout: float, step_seconds: float) -> None:
    servicer = FakeExecutorServicer(make_executor, step_seconds=step_seconds, adapter_files=dict(ADAPTERS))
    server = await serve_fake_executor(address, servicer)
    server.shutdown_timeout = shutdown_timeout

    async def drained() -> None:
        """Waits as the executor itself does: a request's first step may be on its way."""
        num_steps, idle_since = servicer.num_steps, time.monotonic()
        while time.monotonic() < idle_since + 0.3:
            await asyncio.sleep(0.01)
            if servicer.num_steps > num_steps:
                num_steps, idle_since = servicer.num_steps, time.monotonic()

    await server.stop(drained if await rpc.wait_for_signal() else None)


def main(arguments: Sequence[str]) -> None:
    process.die_with_parent()
    address, *seconds = arguments
    rpc.run(serve(address, *map(float, seconds)))


if __name__ == "__main__":
    main(sys.argv[1:])
