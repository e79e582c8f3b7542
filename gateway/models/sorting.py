"""The lines of a gateway without a stack: tokenizer services that list the same model first are one line."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import grpc

from pagewire.gateway.models.line import Addresses, ModelLine
from pagewire.gateway.models.stack import Lines
from pagewire.v1.inference_pb2 import ListModelsRequest, Model
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub
from pagewire.wire.admin import Neighbour
from pagewire.wire.discovery import Discovery, Listed

logger = logging.getLogger(__name__)

AGAIN_S = 1.0  # before a service that did not answer is asked again
CALL_TIMEOUT_S = 10.0


class OneLine:
    """A `Source` of a single line: all services have the same model."""

    def __init__(self, found: Discovery) -> None:
        self._found = found

    def begin(self, models: Lines) -> None:
        models.set_lines([ModelLine("", self._found, models.make_client)])

    @property
    def unsorted(self) -> list[Neighbour]:
        return []

    async def run(self, models: Lines) -> None:
        """Does nothing: the line stays."""
        await asyncio.Future()


class Sorting:
    """A `Source` of the lines behind several services. Each is asked for its model when it is found, and again when its
    connection broke, as its successor may have another one."""

    def __init__(self, found: Discovery, connect: Callable[[Listed], grpc.aio.Channel]) -> None:
        self._found = found
        self._connect = connect
        self._following: dict[Listed, asyncio.Task[None]] = {}
        self._channels: dict[Listed, grpc.aio.Channel] = {}
        self._place_of: dict[Listed, int] = {}  # in the list: the model of the first is the default one
        self._lines: dict[str, _SortedLine] = {}

    def begin(self, models: Lines) -> None:
        """Does nothing: no service has told its model."""

    @property
    def unsorted(self) -> list[Neighbour]:
        known = {listed for line in self._lines.values() for listed in line.found.listed}
        channels = self._channels.items()
        return [Neighbour("tokenizer", one.address, channel) for one, channel in channels if one not in known]

    async def run(self, models: Lines) -> None:
        """Follows the services, until cancelled."""
        try:
            async for listed in self._found.lists():
                self._place_of = {one: place for place, one in enumerate(listed)}
                for gone in self._following.keys() - set(listed):
                    self._following.pop(gone).cancel()
                    self._place(models, gone, None)
                for one in dict.fromkeys(listed):
                    if one not in self._following:
                        following = self._follow(models, one)
                        self._following[one] = asyncio.create_task(following, name=f"sort {one.address}")
            await asyncio.Future()
        finally:
            for task in self._following.values():
                task.cancel()
            await asyncio.gather(*self._following.values(), return_exceptions=True)

    async def _follow(self, models: Lines, listed: Listed) -> None:
        channel = self._channels[listed] = self._connect(listed)
        stub = InferenceServiceStub(channel)
        try:
            while True:
                try:
                    answer = await stub.ListModels(ListModelsRequest(), timeout=CALL_TIMEOUT_S, wait_for_ready=True)
                except grpc.aio.AioRpcError as error:
                    logger.debug("%s does not list its models: %s", listed.address, error.details())
                    await asyncio.sleep(AGAIN_S)
                    continue
                self._place(models, listed, answer.models)
                await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        finally:
            del self._channels[listed]
            await channel.close()

    def _place(self, models: Lines, listed: Listed, listing: Sequence[Model] | None) -> None:
        """Puts a service into the line of its model. listing: None: it is gone."""
        name = listing[0].id if listing else None
        for line in self._lines.values():
            if line.name != name and listed in line.found.listed:
                line.found.set(one for one in line.found.listed if one != listed)
        if listing is not None and name is not None:
            if name not in self._lines:
                self._lines[name] = _SortedLine(name, models)
            self._lines[name].add(listed, listing)
        # A line without services ends with its requests, unless it is the only one, which waits for its services.
        kept = [line for line in self._lines.values() if line.found.listed or line.client.link.num_live]
        kept.sort(key=lambda line: min((self._place_of.get(one, 0) for one in line.found.listed), default=2**31))
        if kept:
            self._lines = {line.name: line for line in kept}
        models.set_lines(list(self._lines.values()))


class _SortedLine(ModelLine):
    found: Addresses

    def __init__(self, name: str, models: Lines) -> None:
        self.found = Addresses()
        super().__init__(name, self.found, models.make_client)
        self.client.link.model = name
        # A service has answered, so requests may wait for its stream.
        self.client.link.set_patient(True)
        self.client.link.set_patient(False)

    def add(self, listed: Listed, listing: Sequence[Model]) -> None:
        self.listing = listing
        self.served_names = [model.id for model in listing if not model.parent]
        if listed not in self.found.listed:
            self.found.set([*self.found.listed, listed])
