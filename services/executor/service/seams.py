"""The seams of the servicer: grammars of requests, weights, adapters, tiers of memory, sleep."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import NamedTuple, Protocol

from pagewire.services.executor.service.session import Outcome
from pagewire.services.executor.step.step import Step
from pagewire.v1.common_pb2 import Adapter, Grammar
from pagewire.v1.executor_pb2 import (
    BlockContents,
    BlockHashes,
    DescribeResponse,
    ReadBlocksRequest,
    SleepState,
    StepRequest,
    TierChanges,
    Weights,
)


class Grammars(Protocol):
    """Compiles grammars. Used on the event loop."""

    async def check(self, grammar: Grammar) -> None:
        """Compiles a grammar that requests will have. Raises RpcError INVALID_ARGUMENT if it is wrong."""

    async def attach(self, step: Step) -> Step:
        """Returns the step with a matcher, or a failure, for each new request with restricted tokens."""

    def close(self) -> None:
        """Ends threads and processes."""


class WeightVersions(Protocol):
    """The weights in force, and their possible replacement. Used on the event loop. All calls may raise RpcError."""

    async def in_force(self) -> Weights:
        """Returns the weights in force, after any running replacement."""

    async def load(self, wanted: Weights) -> Weights:
        """Makes weights ready to be installed, and returns their full description."""

    async def install(self, wanted: Weights) -> float:
        """Puts the loaded weights in force; returns the seconds in which no step could run."""

    def drop(self) -> None:
        """Forgets the loaded weights."""

    def close(self) -> None:
        """Ends threads."""


class AdapterVersions(Protocol):
    """The adapters that were given, and the slots for them. Used on the event loop."""

    async def describe(self) -> DescribeResponse:
        """Returns a description with the fields about adapters: slots, those that were given, those to be found."""

    async def load(self, wanted: Adapter) -> Adapter:
        """Makes an adapter ready for a slot, and returns its full description. Raises RpcError."""

    def unload(self, digest: str, name: str) -> None:
        """Forgets an adapter, or only that it was given under a name, or, without a digest, only the name."""

    async def attach(self, step: Step) -> Step:
        """Returns the step with the adapters that it puts into slots, and with a failure for each new request if
        its adapter cannot be read any more."""

    def close(self) -> None:
        """Ends threads."""


class TierCalls(Protocol):
    """The tiers of KV memory. Used on the event loop."""

    async def describe(self, response: DescribeResponse) -> None:
        """Adds the tiers to a description that has the weights in force."""

    def attach(self, step: Step, message: StepRequest, deliver: Callable[[Outcome], None]) -> Step:
        """Returns the step with the blocks that its message saves and loads. deliver: receives the outcomes of loads,
        on any thread. Raises InvalidStep."""

    def watch(self) -> AsyncIterator[TierChanges]:
        """Yields what the tiers hold, then how it changes."""

    async def forget(self, blocks: Sequence[BlockHashes], reset_at: int) -> None:
        """Forgets blocks in every tier; none: all, by a reset of this time. Raises RpcError."""

    def read(self, request: ReadBlocksRequest) -> AsyncIterator[BlockContents]:
        """Yields those of the blocks that the tiers hold. Raises RpcError."""

    async def close(self) -> None:
        """Ends threads; what is to be saved is saved if that is quick."""


class Sleep(Protocol):
    """Gives the model's memory back, and takes it again. Used on the event loop."""

    def check(self) -> None:
        """Raises RpcError FAILED_PRECONDITION unless the model is awake."""

    def describe(self, response: DescribeResponse) -> None:
        """Adds to a description whether the model sleeps, and what was decided about it."""

    async def fall_asleep(self, wanted: SleepState, decided_at: int) -> float:
        """Gives the model's memory back; returns the seconds that it took. Raises RpcError."""

    async def wake(self, decided_at: int) -> float:
        """Makes the model ready for steps; returns the seconds that it took. Raises RpcError if it sleeps on."""

    def close(self) -> None: ...


class Features(NamedTuple):
    """Everything that is served beside steps."""

    grammars: Grammars
    weights: WeightVersions
    adapters: AdapterVersions
    tiers: TierCalls
    sleep: Sleep
