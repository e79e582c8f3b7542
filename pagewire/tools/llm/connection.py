"""A stack that blocking calls reach: its client runs in the event loop of a thread, and its processes end with it."""

import asyncio
import os
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

from pagewire.client import Client
from pagewire.config import ServeConfig
from pagewire.errors import StartupError
from pagewire.stack.address import grpc_address, unanswered
from pagewire.stack.own_stack import OwnStack
from pagewire.tools.served.served import served_at
from pagewire.wire.rpc import RpcError

Result = TypeVar("Result")


class Connection:
    """A running stack: the one at `address`, or a new one, which ends with close() or with the program.

    It refers to nothing that it belongs to, so that the garbage collector may close it. Raises StartupError; nothing
    runs on then.
    """

    def __init__(self, address: str | None, config: ServeConfig | None, model: str = "") -> None:
        """model: of those at `address`; "": the first."""
        self._owner = os.getpid()
        self._closing = threading.Lock()
        self._is_closed = False
        self._client: Client | None = None
        self._stack = None if config is None else OwnStack(config, echo, with_rest=False)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="pagewire-llm", daemon=True)
        try:
            self._thread.start()
            if self._stack is not None:
                self._stack.await_ready()
                address, model = self._stack.grpc, ""  # files may be named here, which it serves by another name
            self._client = self.run(_connected(address or "", model))
        except BaseException:
            self.close()
            raise

    @property
    def client(self) -> Client:
        """The client, for work that run() does. Raises RuntimeError if this is closed."""
        if self._client is None:
            raise RuntimeError("this LLM is closed")
        return self._client

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Runs `work` on the loop's thread, from any thread, and returns its result. Ctrl-C ends it."""
        if os.getpid() != self._owner or self._is_closed:
            work.close()
            is_copy = os.getpid() != self._owner
            raise RuntimeError(f"this LLM {f'belongs to process {self._owner}' if is_copy else 'is closed'}")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def close(self) -> None:
        """Ends the client and, if it was started here, the stack. Safe to call twice, from any thread, and without
        effect in a process that the program has forked."""
        if os.getpid() != self._owner:
            return
        if threading.current_thread() is self._thread:  # the garbage collector may run in any
            threading.Thread(target=self.close, name="pagewire-llm-close").start()
            return
        with self._closing:
            if self._is_closed:
                return
            try:
                self._end_loop()
            finally:
                self._is_closed = True
                if self._stack is not None:
                    self._stack.close()

    def _end_loop(self) -> None:
        if self._client is not None:
            self.run(self._client.close())
            self._client = None
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()


async def _connected(given: str, model: str) -> Client:
    served = await served_at(given, model)
    address = grpc_address(given) if served is None else await served.ready()
    client = Client(address)
    try:
        names = [one.id for one in await client.models() if not one.parent]
    except RpcError as error:
        await client.close()
        raise StartupError(unanswered(address, error.message)) from error
    if model and served is None and model not in names:
        await client.close()
        raise StartupError(f"{given} does not serve {model}, but {', '.join(names)}")
    return client


def echo(line: str) -> None:
    """Prints a line of the stack's log."""
    print(line, file=sys.stderr, flush=True)
