"""The line of one model, a tokenizer service with a scheduler and executors behind it, as this gateway knows it."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, cast

import grpc

from pagewire.gateway.core.errors import ApiError, from_rpc
from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.gateway.models.waiting import unless_gone
from pagewire.v1 import lines_pb2
from pagewire.v1.inference_pb2 import Model
from pagewire.v1.lines_pb2 import LineState
from pagewire.wire.discovery import Discovery, Listed
from pagewire.wire.rpc import RpcError
from pagewire.wire.status import error_details

logger = logging.getLogger(__name__)

State = Literal["ready", "asleep", "loading", "absent"]
STATES: dict[LineState, State] = {
    LineState.LINE_STATE_UNSPECIFIED: "absent",
    LineState.LINE_STATE_LOADING: "loading",
    LineState.LINE_STATE_READY: "ready",
    LineState.LINE_STATE_ASLEEP: "asleep",
}
# Seconds before a stack that does not answer is asked again, and how calls of it end then.
ASK_AGAIN_S = 0.5
# Seconds after which a wish is repeated while something waits: an operator may have taken it back.
WISH_S = 5.0
_ASKED_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)

MakeClient = Callable[[Discovery, "ModelLine"], TokenizerClient]
Request = Callable[[str], Awaitable[object]]
"""Asks the stack to load a line, by its name. Raises grpc.aio.AioRpcError."""


class Addresses:
    """A `Discovery` of what it is told."""

    def __init__(self, listed: Sequence[Listed] = ()) -> None:
        self.listed = list(listed)
        self._changed = asyncio.Event()

    def set(self, listed: Iterable[Listed]) -> None:
        self.listed = list(listed)
        self._changed.set()

    async def lists(self) -> Any:
        while True:
            self._changed.clear()
            yield list(self.listed)
            await self._changed.wait()


class ModelLine:
    """A line that is always there, or, if `told` is set, one of a stack, which loads it on demand.

    It is `Served` for its client.
    """

    def __init__(self, name: str, found: Discovery, make_client: MakeClient, request: Request | None = None) -> None:
        """name: "" if only its services know. request: of a stack."""
        self.name = name
        self.served_names: Sequence[str] = (name,) if name else ()
        self.aliases: Sequence[str] = ()
        self.told: lines_pb2.Line | None = None  # by the stack
        self.listing: Sequence[Model] = ()  # its models and adapters, as they were listed last
        self.client = make_client(found, self)
        self.changed = asyncio.Event()  # set once anything of these has changed, and replaced by another event
        self.takes_all = False  # names that no line has
        self._found, self._request = found, request
        self._asking: asyncio.Task[None] | None = None
        self._is_asked = False  # since the last change of the state
        self._num_waiting = 0  # of unary calls
        self._failure: RpcError | None = None  # the last one; those that waited end with it
        self._num_failures = 0
        if request is not None:
            self.client.link.set_patient(True)

    # -- names -------------------------------------------------------------------------------------------------------

    @property
    def names(self) -> list[str]:
        """Returns all names that requests may give; those of adapters as far as they are known."""
        return [*self.served_names, *self.aliases, *(model.id for model in self.listing if model.parent)]

    @property
    def first_name(self) -> str:
        """The name in answers to requests that name none; "" if it is not known yet."""
        return self.name or (self.listing[0].id if self.listing else "")

    def upstream(self, model: str) -> str:
        """Returns the name by which its services know what a request names."""
        if self.told is None or not model or model in self.served_names:
            return model
        base, _, adapter = model.partition(":")
        if adapter and base in self.aliases:
            return f"{self.name}:{adapter}"
        is_adapter = any(model == one.id for one in self.listing) or (adapter and base in self.served_names)
        return self.name if model in self.aliases or (self.takes_all and not is_adapter) else model

    def address(self, request: Any) -> None:
        if given := getattr(request, "model", ""):
            request.model = self.upstream(given)

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        if self.told is not None:
            return STATES[self.told.state]
        if not self.client.link.is_up:
            return "loading"
        return "asleep" if any(model.sleep_level for model in self.listing) else "ready"

    @property
    def waits(self) -> str:
        """Is what a request waits for; "" = it waits for nothing."""
        if self.told is None or self.told.state == LineState.LINE_STATE_READY:
            return ""
        return f"loading {self.name}"

    def update(self, told: lines_pb2.Line) -> None:
        """Takes over what the stack says."""
        before, self.told = self.told, told
        self.name, self.served_names, self.aliases = told.name, list(told.served_names) or [told.name], told.aliases
        address = told.tokenizer_address
        self.client.link.model = self.name
        cast(Addresses, self._found).set([Listed(address)] if address else [])
        self.client.link.set_patient(told.state in (LineState.LINE_STATE_UNSPECIFIED, LineState.LINE_STATE_LOADING))
        if before is None or (told.state, told.num_withdrawals) != (before.state, before.num_withdrawals):
            self._is_asked = False
        is_resting = told.state not in (LineState.LINE_STATE_READY, LineState.LINE_STATE_LOADING)
        if told.problem and is_resting and (before is None or _ended(before, told)):
            self.fail(_unavailable(told.problem, self._retry_delay))
        elif self._num_waiting or self.client.link.num_live:
            with suppress(RpcError):  # it is a request's to report
                self.want()
        self._notify()

    def want(self) -> None:
        """Asks the stack for the line, unless it serves or is about to. Raises RpcError UNAVAILABLE if its last start
        failed and another one is not due yet."""
        told = self.told
        if told is None or told.state in (LineState.LINE_STATE_READY, LineState.LINE_STATE_LOADING):
            return
        if told.problem and self._retry_delay > 0:
            raise _unavailable(told.problem, self._retry_delay)
        if not told.sleeps_until_woken:
            self._begin_asking()

    async def load(self) -> None:
        """Returns when the model is in memory, also if an operator put it to sleep. Raises ApiError."""
        if self.told is not None and self.told.state != LineState.LINE_STATE_READY:
            if self.told.sleeps_until_woken:
                self._begin_asking()
            await self.reach(computes=True)

    async def reach(self, *, computes: bool) -> None:
        failures = self._num_failures
        while not self._is_reached(computes):
            if self._num_failures != failures and self._failure is not None:
                raise from_rpc(self._failure)
            changed = self.changed
            try:
                self.want()
            except RpcError as error:
                raise from_rpc(error) from error
            self._num_waiting += 1
            try:
                await unless_gone(changed.wait(), self.waits)
            finally:
                self._num_waiting -= 1

    def _is_reached(self, computes: bool) -> bool:
        if self.told is None or self.told.state == LineState.LINE_STATE_READY:
            return True
        return self.told.state == LineState.LINE_STATE_ASLEEP and not computes

    @property
    def _retry_delay(self) -> float:
        """Seconds until the stack may be asked again after a problem."""
        assert self.told is not None
        return self.told.retry_time.ToNanoseconds() / 1e9 - time.time() if self.told.HasField("retry_time") else 0.0

    def _begin_asking(self) -> None:
        if not self._is_asked:
            self._is_asked = True
            if self._asking is not None:
                self._asking.cancel()
            self._asking = asyncio.create_task(self._ask(), name=f"request for {self.name}")

    async def _ask(self) -> None:
        assert self._request is not None
        while self._is_asked:
            pause = WISH_S
            try:
                await self._request(self.name)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _ASKED_AGAIN:
                    delay = error_details.retry_delay_of(error)
                    self.fail(_unavailable(error.details() or error.code().name, delay or self._retry_delay))
                    return
                logger.debug("the stack does not answer: %s", error.details())
                pause = ASK_AGAIN_S
            await asyncio.sleep(pause)
            self._is_asked = self._is_asked and bool(self._num_waiting or self.client.link.num_live)

    def fail(self, error: RpcError) -> None:
        """Ends everything that waits for the line."""
        self._failure, self._is_asked = error, False
        self._num_failures += 1
        self.client.link.fail_all(error)
        self._notify()

    def close(self) -> None:
        """Ends everything that waits for the line, which does not exist any more."""
        if self._asking is not None:
            self._asking.cancel()
        self.fail(RpcError(grpc.StatusCode.NOT_FOUND, f"the model {self.name!r} was deleted"))

    def _notify(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    # -- models ------------------------------------------------------------------------------------------------------

    async def models(self) -> Sequence[Model]:
        """Returns the models and adapters that its services list or, while these do not answer, have listed last.

        Raises grpc.aio.AioRpcError or ApiError if only its services know its name.
        """
        try:
            # The services of a line without a name are waited for, as only they know it.
            if not self.name or (self.client.link.is_up and self._is_reached(computes=False)):
                self.listing = await self.client.list_models()
        except (ApiError, grpc.aio.AioRpcError):
            if not self.name:
                raise
        return self.listing or self._described()

    def _described(self) -> list[Model]:
        """Returns its models as the stack describes them."""
        found = []
        for name in self.served_names:
            model = Model()
            if self.told is not None:
                model.CopyFrom(self.told.model)
            model.id = name
            found.append(model)
        return found


def _ended(before: lines_pb2.Line, told: lines_pb2.Line) -> bool:
    """Returns whether an attempt to load a line has ended between these."""
    return (before.state, before.problem, before.retry_time) != (told.state, told.problem, told.retry_time)


def _unavailable(problem: str, delay: float) -> RpcError:
    return RpcError(grpc.StatusCode.UNAVAILABLE, problem, retry_delay=max(delay, 0.0) or None)
