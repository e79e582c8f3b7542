"""All models behind this gateway, by the names that requests give."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple, Protocol

import grpc
from starlette.types import Send

from pagewire.gateway.core.app_state import AppState
from pagewire.gateway.core.balanced_stub import AWAY
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.outputs import ChoiceOutputs
from pagewire.gateway.core.reply import Line, Reply
from pagewire.gateway.core.request_context import RequestContext as HttpContext
from pagewire.gateway.core.tokenizer_client import AWAY_TIMEOUT_S, TokenizerClient
from pagewire.gateway.models.comments import first_outputs
from pagewire.gateway.models.line import MakeClient, ModelLine
from pagewire.gateway.models.stack import Lines, Stack
from pagewire.v1.common_pb2 import RequestContext
from pagewire.v1.inference_pb2 import GenerateRequest, GenerateResponse, Model, TokenizeRequest
from pagewire.wire import rpc
from pagewire.wire.admin import Neighbour
from pagewire.wire.model_names import names_of, not_served
from pagewire.wire.rpc import RpcError

# A name that no line has may be that of a new adapter: seconds after which the lines are asked again.
FRESH_S = 1.0
# Seconds in which the source tells about a change that it has answered.
LEARNED_S = 2.0
# The most seconds that a line may take to say why it does not serve a name.
WHY_TIMEOUT_S = 5.0

# A test, and what makes the line of the requests that pass it.
Other = tuple[Callable[[GenerateRequest], bool], Callable[[TokenizerClient], Line]]


class Source(Protocol):
    """Knows the lines. It is a `Stack`, a `OneLine` or a `Sorting`."""

    def begin(self, models: Lines) -> None:
        """Sets the lines that are known at once."""

    async def run(self, models: Lines) -> None:
        """Keeps the lines up to date, until cancelled."""

    @property
    def unsorted(self) -> list[Neighbour]:
        """The tokenizer services that have not told their model yet."""


class Named(NamedTuple):
    """A name that requests may give."""

    model: Model
    line: ModelLine
    root: str = ""  # of an alias: the name that it stands for


class Names(list[str]):
    """The names that requests may give. takes_all: all others are served, too."""

    takes_all = False

    def __contains__(self, name: object) -> bool:
        return self.takes_all or super().__contains__(name)


class Models:
    """All lines as one: each request goes to that of its model. It is `Lines` for generations."""

    def __init__(self, source: Source, make_client: MakeClient, *others: Other) -> None:
        """others: lines for kinds of requests that do not use the links."""
        self.make_client = make_client
        self.lines: Sequence[ModelLine] = ()  # the first serves requests that name no model
        self._source = source
        self._others = others
        self.takes_all: ModelLine | None = None  # serves names that no line has
        self._by_name: dict[str, ModelLine] = {}
        self._running: dict[ModelLine, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] | None = None  # while it runs: set if a line ends by itself
        self._begun = asyncio.Event()  # the lines are known
        self._changed = asyncio.Event()  # set once they have changed, and replaced by another event
        self._listed_at = 0.0
        source.begin(self)

    @property
    def stack(self) -> Stack | None:
        """The stack, if it decides on the lines."""
        return self._source if isinstance(self._source, Stack) else None

    # -- the lines ---------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Keeps the lines and their streams up, until cancelled."""
        following = asyncio.create_task(self._source.run(self))
        self._failed = failed = asyncio.get_running_loop().create_future()
        try:
            self._run_lines()
            await asyncio.wait({following, failed}, return_when=asyncio.FIRST_COMPLETED)
            await (following if following.done() else failed)
        finally:
            await rpc.cancel([following, *self._running.values()])

    def set_lines(self, lines: Sequence[ModelLine], takes_all: str = "") -> None:
        gone = [line for line in self.lines if line not in lines]
        self.lines = lines
        self.takes_all = next((line for line in lines if takes_all in line.names), None) if takes_all else None
        for line in lines:
            line.takes_all = line is self.takes_all
        self._index()
        for line in gone:
            line.close()
        if lines:
            self._begun.set()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        if self._failed is not None:
            self._run_lines()

    def _run_lines(self) -> None:
        for line in self._running.keys() - set(self.lines):
            self._running.pop(line).cancel()
        for line in self.lines:
            if line not in self._running:
                task = self._running[line] = asyncio.create_task(line.client.link.run(), name=f"line {line.name}")
                task.add_done_callback(self._on_end)

    def _on_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None and self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _index(self) -> None:
        self._by_name = {}
        for line in self.lines:
            for name in line.names:
                self._by_name.setdefault(name, line)

    # -- requests ----------------------------------------------------------------------------------------------------

    def default(self) -> ModelLine:
        """Returns the line of requests that name no model. Raises ApiError 503 while none is known."""
        if not self.lines:
            raise ApiError(503, AWAY)
        return self.lines[0]

    async def find(self, model: str | None) -> ModelLine:
        """Returns the line that serves a name. Raises ApiError 404, or 503 while no line is known."""
        if not self.lines:
            await self._wait_until_begun()
        if (line := self._known(model or "")) is not None:
            return line
        assert model is not None
        if time.monotonic() - self._listed_at > FRESH_S:
            await self.list_all()
            if (line := self._known(model)) is not None:
                return line
        if self.takes_all is not None:
            return self.takes_all
        why = await self._why_not(model)
        raise ApiError(404, why or not_served(model, await self.names()), param="model", code="model_not_found")

    async def named_line(self, model: str | None) -> ModelLine:
        """Returns the line that has a name, for operators: others would mean a model that they do not know of. Raises
        like find()."""
        line = await self.find(model)
        if model and line is self.takes_all and self._known(model) is None:
            raise ApiError(404, not_served(model, await self.names()), param="model", code="model_not_found")
        return line

    async def client(self, model: str | None) -> TokenizerClient:
        return (await self.find(model)).client

    def _known(self, model: str) -> ModelLine | None:
        """Returns the line that has a name; a single line without a stack says itself which names it serves."""
        if not model or (len(self.lines) == 1 and self.lines[0].told is None):
            return self.default()
        if (line := self._by_name.get(model)) is None:
            base, _, adapter = model.partition(":")
            line = self._by_name.get(base) if adapter else None
        return line

    def generate(
        self,
        requests: Sequence[GenerateRequest],
        *,
        streaming: bool,
        context: RequestContext | None = None,
        earlier: Sequence[Sequence[GenerateResponse]] = (),
    ) -> Reply:
        try:
            line = self._known(requests[0].model) or self.takes_all
        except ApiError as error:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, error.message) from error
        if line is None:
            raise RpcError(grpc.StatusCode.NOT_FOUND, not_served(requests[0].model, self._by_name))
        line.want()
        for request in requests:
            line.address(request)
        link: Line = next((make(line.client) for takes, make in self._others if takes(requests[0])), line.client.link)
        return link.generate(requests, streaming=streaming, context=context, earlier=earlier)

    def waits(self, model: str) -> str:
        line = self._known(model) or self.takes_all if self.lines else None
        return line.waits if line is not None else ""

    async def learned(self, name: str, *, exists: bool) -> None:
        """Waits until the source has told that a line exists, or does not; a moment, at most."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LEARNED_S):
                while exists is not any(line.name == name for line in self.lines):
                    await self._changed.wait()

    async def first_outputs(
        self, outputs: Awaitable[ChoiceOutputs], model: str, context: HttpContext, send: Send
    ) -> ChoiceOutputs:
        return await first_outputs(outputs, partial(self.waits, model), context, send)

    async def _wait_until_begun(self) -> None:
        """Waits a while for the first lines, as after a restart of this process."""
        with suppress(TimeoutError):
            async with asyncio.timeout(AWAY_TIMEOUT_S):
                await self._begun.wait()

    async def _why_not(self, model: str) -> str:
        """Returns what the services say about a name that they do not serve; "" if that is nothing special."""
        request = TokenizeRequest(model=model, text=model)

        async def asked(line: ModelLine) -> str:
            try:
                await line.client.inference.Tokenize(request, timeout=WHY_TIMEOUT_S)
            except (ApiError, grpc.aio.AioRpcError) as error:
                is_reason = isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.NOT_FOUND
                return str(error.details()) if is_reason else ""  # type: ignore[union-attr]
            return ""

        found = await asyncio.gather(*(asked(line) for line in self.lines if line.client.link.is_up))
        return next((why for why in found if "cannot be served" in why), "")

    # -- names -------------------------------------------------------------------------------------------------------

    async def name_of(self, model: str | None) -> str:
        if model:
            return model
        line = await self.find("")
        return line.name or (await line.models())[0].id

    async def list_models(self, model: str) -> Sequence[Model]:
        line = await self.find(model)
        return [one.model for one in _named(line, await line.models())]

    def served_name(self, model: str, *, answered: bool) -> str:
        if not model:
            return self.lines[0].first_name if self.lines else ""
        return model if answered or model in self._by_name else ""

    async def learn_names(self) -> None:
        """Asks lines for first names that are not known yet, if they can answer now."""
        unnamed = [line for line in self.lines if not line.first_name and line.client.link.is_up]
        await asyncio.gather(*(line.models() for line in unnamed), return_exceptions=True)

    async def names(self) -> Names:
        """Returns all names that requests may give. Raises like list_all()."""
        await self.find("")
        names: list[str] = []
        for line in self.lines:
            listing = await line.models()
            adapters = [model.id for model in listing if model.parent]
            names += [*names_of([model.id for model in listing if not model.parent], adapters), *line.aliases]
        found = Names(dict.fromkeys(names))
        found.takes_all = self.takes_all is not None
        return found

    async def list_all(self) -> list[Named]:
        """Returns all models, those of the default line first, with their adapters and aliases. Raises ApiError 503 or
        grpc.aio.AioRpcError if the only line is away."""
        await self.find("")
        lines = self.lines
        listings = await asyncio.gather(*(line.models() for line in lines))
        self._listed_at = time.monotonic()
        self._index()
        return [one for line, listing in zip(lines, listings, strict=True) for one in _named(line, listing)]

    async def list_named(self, names: Sequence[str]) -> list[Named]:
        """Returns the models of the line that has one of these names, or all of them. Raises like list_all()."""
        line = next((self._by_name[name] for name in names if name in self._by_name), None)
        if line is None and self.takes_all is not None:
            await self.list_all()
            line = next((self._by_name[name] for name in names if name in self._by_name), self.takes_all)
        return _named(line, await line.models()) if line is not None else await self.list_all()

    async def named(self, model: str) -> Named:
        """Returns a name that requests may give, also `model:adapter`. Raises ApiError 404."""
        served = {one.model.id: one for one in await self.list_all()}
        base, _, adapter = model.partition(":")
        is_both = {base, adapter} <= served.keys() and served[adapter].model.parent and not served[base].model.parent
        if (found := served.get(model) or (served[adapter] if is_both else None)) is None:
            raise ApiError(
                404, await self._why_not(model) or not_served(model, served), param="model", code="model_not_found"
            )
        return found

    # -- all services ------------------------------------------------------------------------------------------------

    def services(self) -> list[tuple[str, list[Neighbour]]]:
        """Returns the tokenizer services of each model; at last those of unknown models, with the name ""."""
        found = [(line.first_name, line.client.neighbours()) for line in self.lines]
        return [*found, ("", self._source.unsorted)]

    def neighbours(self) -> list[Neighbour]:
        return [one for _, neighbours in self.services() for one in neighbours]

    async def sum_of(self, count: Callable[[TokenizerClient], Awaitable[int]]) -> int:
        """Returns the sum of a count over all lines with running services. Raises what `count` does."""
        lines = [line for line in self.lines if line.told is None or line.client.link.is_up]
        return sum(await asyncio.gather(*(count(line.client) for line in lines)))

    @property
    def num_live(self) -> int:
        """The number of generations that run or wait."""
        return sum(line.client.link.num_live for line in self.lines)

    def fail_all(self, error: RpcError) -> None:
        for line in self.lines:
            line.fail(error)


def _named(line: ModelLine, listing: Sequence[Model]) -> list[Named]:
    found = [Named(model, line) for model in listing]
    for alias in line.aliases:
        model = Model()
        model.CopyFrom(listing[0])
        model.id = alias
        found.append(Named(model, line, root=line.name))
    return found


MODELS = AppState[Models]("models")
