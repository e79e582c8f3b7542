"""The seams where features join the service. `compose.py` hands them in."""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol

from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.service.live_request import LiveRequest
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.values.executor_info import Adapter, Weights
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.admin_pb2 import (
    AdminServiceLoadAdapterRequest,
    AdminServiceLoadAdapterResponse,
    AdminServiceUnloadAdapterRequest,
    AdminServiceUnloadAdapterResponse,
    ModelSleepStatus,
    ReplaceWeightsRequest,
    ReplaceWeightsResponse,
)
from pagewire.v1.common_pb2 import Grammar
from pagewire.v1.executor_pb2 import DescribeResponse
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from pagewire.wire import admin

# Returns when a grammar is compiled on the attached executors; raises RpcError.
CompileGrammar = Callable[[Grammar, Mapping[int, ReplicaDriver]], Awaitable[None]]


class Admission(Protocol):
    """Refuses requests that would wait too long, and learns from served ones."""

    def check(self, request: Request, timeout: float | None) -> None:
        """Raises RpcError RESOURCE_EXHAUSTED for a request that would wait too long. timeout: seconds to its
        deadline."""

    def retry_delay(self, request: Request) -> float | None:
        """Returns the seconds after which to retry a request that was refused because the queue is full; None:
        unknown."""

    def on_taken(self, live: LiveRequest) -> None: ...

    def on_first_step(self, live: LiveRequest, now: float) -> None: ...

    def on_first_token(self, live: LiveRequest, now: float) -> None: ...

    def on_end(self, live: LiveRequest) -> None: ...

    def on_executor_lost(self) -> None: ...


class HeldOutputs(Protocol):
    """The outputs that are not delivered yet; decides when they are due."""

    def deliver_due(self) -> None:
        """Delivers the outputs if they do not wait for another result. Call it before a result is taken in."""

    def add(self, outputs: Outputs) -> None:
        """Adds the outputs of a result, which are delivered later."""

    def take(self) -> Outputs | None:
        """Returns the outputs, which are then no longer held; None if there are none."""


class AdaptersInForce(Protocol):
    """Knows the adapters, and loads them on executors."""

    @property
    def listed(self) -> Sequence[Adapter]:
        """The adapters that requests may name."""

    def pin(self, submission: TokenSubmission) -> str:
        """Returns the digest of the adapter of a request that arrives; empty: it names none. Raises RpcError
        NOT_FOUND."""

    async def prepare(self, request: Request) -> None:
        """Returns when an executor can compute a request with an adapter. Raises RpcError FAILED_PRECONDITION if the
        adapter is not available any longer."""

    async def find(self, name: str) -> Adapter:
        """Returns what a name stands for. An unknown one is looked for in the directory of the executors, and loaded.
        Raises RpcError NOT_FOUND, or UNAVAILABLE."""

    async def load(self, request: AdminServiceLoadAdapterRequest) -> AdminServiceLoadAdapterResponse:
        """Loads an adapter on all executors, or on none. Raises RpcError."""

    async def unload(self, request: AdminServiceUnloadAdapterRequest) -> AdminServiceUnloadAdapterResponse:
        """Takes a name away from later requests. Raises RpcError NOT_FOUND."""

    def on_attached(self, driver: ReplicaDriver) -> None:
        """Takes in what an executor reports, and gives it what it lacks."""

    def stop(self) -> None: ...


class WeightsInForce(Protocol):
    """Decides which weights each executor must have."""

    @property
    def is_under_way(self) -> bool:
        """True while weights are being replaced."""

    def check(self, request: Request) -> None:
        """Raises RpcError for a request with tokens from weights that no executor has any longer."""

    def note(self, present: Weights) -> None:
        """Takes in the weights of an executor that sleeps."""

    def wanted(self, present: Weights) -> Weights:
        """Returns the weights that an executor with `present` must have before it is used."""

    def watch_stranded(self, requests: Sequence[Request]) -> None:
        """Ends those requests that no executor can continue, unless one with their weights connects in time."""

    async def replace(self, request: ReplaceWeightsRequest) -> ReplaceWeightsResponse:
        """Replaces the weights of all executors; raises RpcError."""

    def notify(self) -> None:
        """Takes in that a request ended, or an executor joined or left."""

    def on_attached(self) -> None: ...

    def on_client_lost(self) -> None:
        """Takes in that the stream of a tokenizer service ended; it resubmits its requests."""

    def stop(self) -> None: ...


class Sleep(admin.Sleep, Protocol):
    """Decides whether the model sleeps."""

    @property
    def status(self) -> ModelSleepStatus: ...

    def check_awake(self) -> None:
        """Raises RpcError FAILED_PRECONDITION while the model sleeps."""

    def on_request(self) -> None:
        """Takes in that a request arrives, which may wake the model. Raises RpcError if that failed just before."""

    async def slept(self, driver: ReplicaDriver, description: DescribeResponse) -> bool:
        """Keeps an executor asleep as long as the model sleeps, and wakes it; see `ExecutorListener.slept`."""

    def start(self) -> None: ...

    def stop(self) -> None: ...
