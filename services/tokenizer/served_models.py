"""The names that requests may give as their model: those of the model, and those of its adapters."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from pagewire.services.tokenizer.errors import invalid
from pagewire.services.tokenizer.scheduler_link import SchedulerLink
from pagewire.v1 import admin_pb2, admin_pb2_grpc
from pagewire.v1.common_pb2 import Adapter
from pagewire.wire.model_names import not_served, unservable
from pagewire.wire.rpc import RpcError
from pagewire.wire.streams import Peer

_LoadRequest = admin_pb2.AdminServiceLoadAdapterRequest
_Loaded = admin_pb2.AdminServiceLoadAdapterResponse
_Unloaded = admin_pb2.AdminServiceUnloadAdapterResponse
_Answer = TypeVar("_Answer")


class ServedModels:
    """Finds what a name stands for. The schedulers know the adapters; `load` and `unload` are calls of AdminService."""

    def __init__(self, link: SchedulerLink, names: tuple[str, ...]) -> None:
        """names: of the model, the default one first."""
        self._link = link
        self.names = names

    @property
    def adapters(self) -> Sequence[Adapter]:
        """The adapters that requests may name: not those with a name of the model."""
        known = self._link.adapters
        return [adapter for name, adapter in known.items() if name not in self.names and not adapter.problem]

    def label(self, name: str) -> str:
        """Returns the name for metrics: that of the model unless it is a known adapter's."""
        return name if name in self.names or name in self._link.adapters else self.names[0]

    async def find(self, name: str, digest: str = "") -> Adapter | None:
        """Returns the adapter that a name stands for, or None if it is that of the model; empty = the model.

        `model:adapter` names an adapter, too, as in SGLang. digest: of the contents that were found before, which stay.

        Raises RpcError: NOT_FOUND, or UNAVAILABLE if no scheduler can be asked.
        """
        if not name or name in self.names:
            return None
        model, _, rest = name.partition(":")
        bare = rest if rest and model in self.names else name
        if digest:
            return Adapter(name=bare, digest=digest)
        await self._link.wait_for_model()
        known, why = self._link.adapters.get(bare), ""
        if known is not None and known.problem:
            raise RpcError(grpc.StatusCode.NOT_FOUND, unservable(bare, known.problem))
        if known is not None and not known.digest:  # it was found, and not loaded yet
            known, why = await self._look_up(bare)
        if known is None:
            read = [adapter.name for adapter in self.adapters if adapter.digest]
            raise RpcError(grpc.StatusCode.NOT_FOUND, why or not_served(name, [*self.names, *read]))
        return known

    async def _look_up(self, name: str) -> tuple[Adapter | None, str]:
        """Asks the schedulers for an adapter; if one has it, all have it afterwards. None: with the reason."""
        request = _LoadRequest(name=name)
        outcomes = await self._outcomes(lambda stub: stub.LoadAdapter(request))
        found = [outcome.adapter for outcome in outcomes if not isinstance(outcome, RpcError)]
        errors = [outcome for outcome in outcomes if isinstance(outcome, RpcError)]
        if found and errors:
            return (await self._load(_LoadRequest(name=name, path=found[0].path))).adapter, ""
        for error in errors:
            if error.code not in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
                raise error
        return (found[0], "") if found else (None, errors[0].message)

    async def check_is_model(self, name: str) -> None:
        """Raises RpcError for an adapter, or a name that does not exist."""
        if await self.find(name) is not None:
            raise invalid(
                f"{name} is an adapter, and adapters compute text; name the model, {self.names[0]}, for vectors",
                "model",
            )

    async def load(self, request: _LoadRequest) -> _Loaded:
        """Loads an adapter at all schedulers, or returns what its name stands for. Raises RpcError."""
        if request.name in self.names:
            raise invalid(f"{request.name} is the name of the model; give the adapter another one", "name")
        return await self._load(request)

    async def unload(self, request: admin_pb2.AdminServiceUnloadAdapterRequest) -> _Unloaded:
        """Takes a name from later requests, at all schedulers. Raises RpcError."""
        answer = _first(await self._outcomes(lambda stub: stub.UnloadAdapter(request)))
        self._link.adapters.pop(request.name, None)  # the greeting that says so may still be on its way
        return answer

    async def _load(self, request: _LoadRequest) -> _Loaded:
        answer = _first(await self._outcomes(lambda stub: stub.LoadAdapter(request)))
        self._link.adapters[request.name] = answer.adapter
        return answer

    async def _outcomes(
        self, call: Callable[[admin_pb2_grpc.AdminServiceStub], Awaitable[_Answer]]
    ) -> Sequence[_Answer | RpcError]:
        """Calls all schedulers at the same time. Raises RpcError if there is none."""
        peers = list(self._link.peers)
        if not peers:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, "no scheduler is available; try again later")

        async def outcome(peer: Peer[Any, Any]) -> _Answer | RpcError:
            try:
                return await call(admin_pb2_grpc.AdminServiceStub(peer.channel))
            except grpc.aio.AioRpcError as error:
                found = RpcError.from_call(error)
                where = f"the scheduler at {peer.address}: " if len(peers) > 1 else ""
                return RpcError(found.code, where + found.message, found.violations)

        return await asyncio.gather(*map(outcome, peers))


def _first(outcomes: Sequence[_Answer | RpcError]) -> _Answer:
    """Returns the first answer. Raises the first error, if there is one."""
    for outcome in outcomes:
        if isinstance(outcome, RpcError):
            raise outcome
    answer = outcomes[0]
    assert not isinstance(answer, RpcError)
    return answer
