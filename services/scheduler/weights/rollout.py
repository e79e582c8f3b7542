"""The replacement of weights: all executors load the new weights, then switch to them, one at a time.

An executor switches when no request runs on it: the scheduler closes its stream and opens a new one with the new
weights (`ExecutorClient.on_connect`). An executor that restarts receives its weights in the same way.
"""

import asyncio
import logging
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Protocol

import grpc

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.scheduler import Scheduler
from pagewire.services.scheduler.observed import stats
from pagewire.services.scheduler.service.replica_driver import ReplicaDriver
from pagewire.services.scheduler.values.executor_info import Weights
from pagewire.services.scheduler.values.request import Request
from pagewire.services.scheduler.weights.replacements import MAX_ID_BYTES, Replacements
from pagewire.services.scheduler.weights.target import WeightsPlan, is_attached, may_switch, version_needed
from pagewire.v1.admin_pb2 import ReplaceWeightsRequest, ReplaceWeightsResponse
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

# Seconds in which tokenizer services resubmit requests after the scheduler has started or their stream has broken.
# These requests may need the present weights, so no executor switches earlier.
RESUBMITTED_S = 5.0

_VERSION = re.compile(r"[A-Za-z0-9._:+-]{1,64}")


class RequestEnder(Protocol):
    def __call__(self, request: Request, error: RpcError) -> None:
        """Ends a live request with an error."""


class Rollout:
    """Switches replicas from their present weights to the planned ones."""

    def __init__(
        self,
        scheduler: Scheduler,
        drivers: Mapping[int, ReplicaDriver],
        wake: Callable[[], None],
        end: RequestEnder,
        recovery_timeout: float,
        check_awake: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            drivers: the drivers of all replicas, a live view.
            wake: called when there may be steps to decide.
            end: ends a live request with an error.
            recovery_timeout: seconds after which a request ends if no executor has the weights of its tokens.
            check_awake: raises RpcError while the model sleeps.
        """
        self._check_awake = check_awake
        self._scheduler = scheduler
        self._drivers = drivers
        self._wake = wake
        self._end = end
        self._recovery_timeout = recovery_timeout
        self._plan = WeightsPlan()
        # The time until which requests may continue with old weights, even if an executor dies; time.monotonic().
        self._deadline: float | None = None
        self._learns_until = self._expects_until = time.monotonic() + RESUBMITTED_S
        self._moved = asyncio.Event()  # set by every change that the rollout may wait for
        self._rolling: asyncio.Task[None] | None = None
        self._replacements = Replacements(self._replace)

    # -- events ------------------------------------------------------------------------------------------------------

    @property
    def is_under_way(self) -> bool:
        return self._rolling is not None

    def notify(self) -> None:
        """Takes in that a request ended, or an executor joined or left."""
        self._moved.set()

    def on_client_lost(self) -> None:
        """Takes in that the stream of a tokenizer service ended; it resubmits its requests."""
        self._expects_until = time.monotonic() + RESUBMITTED_S

    def note(self, present: Weights) -> None:
        """Takes in the weights of an executor."""
        self._plan.note(present, self._scheduler.replicas)

    def wanted(self, present: Weights) -> Weights:
        """Returns the weights that an executor with `present` must have before it is used."""
        replicas = self._scheduler.replicas
        self.note(present)
        if time.monotonic() < self._learns_until:
            return present  # it switches later
        return self._plan.wanted(present, self._scheduler.waiting, replicas)

    def on_attached(self) -> None:
        self.notify()
        if self._rolling is None and self._behind() is not None:
            self._start()

    def stop(self) -> None:
        if self._rolling is not None:
            self._rolling.cancel()

    # -- requests with replaced weights ------------------------------------------------------------------------------

    def check(self, request: Request) -> None:
        """Raises RpcError for a request with tokens from weights that no executor has any longer."""
        version, replicas = version_needed(request), self._scheduler.replicas
        if not version or is_attached(version, replicas):
            return
        if replicas and all(replica.info is not None for replica in replicas):
            raise _gone(version)
        self.watch_stranded([request])

    def watch_stranded(self, requests: Sequence[Request]) -> None:
        """Ends those requests that no executor can continue, unless one with their weights connects in time."""
        stranded = [one for one in requests if not one.is_finished and self._is_stranded(one)]
        if stranded:
            asyncio.get_running_loop().call_later(self._recovery_timeout, self._end_stranded, stranded)

    def _end_stranded(self, requests: Sequence[Request]) -> None:
        if self._scheduler.info is None:  # the model sleeps, or `Availability` ends all requests
            self.watch_stranded(requests)
            return
        for request in requests:
            if not request.is_finished and request.replica_id is None and self._is_stranded(request):
                self._end(request, _gone(request.weights_version))

    def _is_stranded(self, request: Request) -> bool:
        version = version_needed(request)
        return bool(version) and not is_attached(version, self._scheduler.replicas)

    # -- replacing ---------------------------------------------------------------------------------------------------

    async def replace(self, request: ReplaceWeightsRequest) -> ReplaceWeightsResponse:
        """Replaces the weights of all executors, and returns when all of them have the new ones.

        Raises:
            RpcError: the old weights remain in force if not all executors had loaded the new ones.
        """
        if not request.model:
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, "model is empty; name the weights", [("model", "empty")])
        if request.version and not _VERSION.fullmatch(request.version):
            what = "use up to 64 letters, digits and ._:+-"
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, f"version: {what}", [("version", what)])
        if request.HasField("max_wait_seconds") and not request.max_wait_seconds >= 0:
            what = f"max_wait_seconds is {request.max_wait_seconds}; it must be 0 or more"
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, what, [("max_wait_seconds", what)])
        if len(request.request_id.encode()) > MAX_ID_BYTES:
            what = f"request_id is longer than {MAX_ID_BYTES} bytes; use a shorter one"
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, what, [("request_id", what)])
        self._check_awake()
        return await self._replacements.answer(request)

    async def _replace(self, request: ReplaceWeightsRequest) -> ReplaceWeightsResponse:
        previous = self._plan.target.version if self._plan.target is not None else ""
        wanted = Weights(request.version, self._plan.next_number, request.model, request.revision)
        loaded = await self._load(wanted)
        if self._is_in_force(loaded):
            await self._drop()
        else:
            self._plan.replace(loaded)
            stats.WEIGHTS_REPLACED.inc()
            logger.info("weights %s replace %s, one executor at a time", loaded.version, previous)
            waits = request.HasField("max_wait_seconds")
            self._deadline = time.monotonic() + request.max_wait_seconds if waits else None
            self._start()
        count = await self._settled(loaded)
        return ReplaceWeightsResponse(version=loaded.version, previous_version=previous, num_executors=count)

    async def _settled(self, weights: Weights) -> int:
        """Waits until all executors have the weights in force, and returns the number of executors."""
        while True:
            if self._rolling is not None:
                await asyncio.shield(self._rolling)
            elif count := sum(driver.has_executor for driver in self._staying()):
                return count
            elif not await self._has_moved(self._recovery_timeout):
                raise RpcError(
                    grpc.StatusCode.UNAVAILABLE,
                    f"weights {weights.version} are in force, but no executor is available; one that connects "
                    "receives them",
                )

    def _is_in_force(self, weights: Weights) -> bool:
        target = self._plan.target
        return target is not None and (weights.version, weights.digest) == (target.version, target.digest)

    async def _load(self, wanted: Weights) -> Weights:
        """Makes all executors load the weights. An executor that is not connected loads them when it connects."""
        drivers = self._staying()
        were_attached = [driver.has_executor for driver in drivers]
        answers = await asyncio.gather(*(driver.client.load(wanted) for driver in drivers), return_exceptions=True)
        loaded = {answer for answer in answers if isinstance(answer, Weights)}
        errors = [
            answer
            for answer, was_attached in zip(answers, were_attached, strict=True)
            if isinstance(answer, BaseException) and (was_attached or not _is_away(answer))
        ]
        if not errors and len(loaded) == 1:
            return loaded.pop()
        await self._drop()
        if errors:
            raise _of_executor(errors[0]) if isinstance(errors[0], grpc.aio.AioRpcError) else errors[0]
        if loaded:
            found = ", ".join(sorted(weights.digest for weights in loaded))
            what = f"executors found different weights at {wanted.model}: {found}; give all of them the same files"
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, what, [("model", what)])
        raise RpcError(grpc.StatusCode.UNAVAILABLE, "no executor is available to load the weights; try again later")

    async def _drop(self) -> None:
        await asyncio.gather(*(driver.client.drop() for driver in self._staying()), return_exceptions=True)

    # -- switching ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._rolling is None:
            self._rolling = asyncio.create_task(self._roll(), name="weights")

    def _staying(self) -> list[ReplicaDriver]:
        """Returns the drivers of listed executors; an unlisted one keeps its weights until it is removed."""
        return [driver for driver in self._drivers.values() if not driver.is_unlisted]

    def _behind(self) -> ReplicaDriver | None:
        """Returns the first driver with an attached executor that does not have the target weights."""
        target = self._plan.target
        return next(
            (d for d in self._staying() if (info := d.replica.info) is not None and info.weights != target),
            None,
        )

    async def _roll(self) -> None:
        try:
            while (driver := self._behind()) is not None:
                await self._switch(driver)
            in_use = {version_needed(request) for request in self._scheduler.requests()}
            in_use |= {replica.info.weights.version for replica in self._scheduler.replicas if replica.info}
            self._plan.forget_all_but(in_use)
        finally:
            self._rolling = None

    async def _switch(self, driver: ReplicaDriver) -> None:
        """Drains one replica and restarts its stream with other weights; the other replicas take its requests."""
        replica = driver.replica
        old = replica.info.weights if replica.info is not None else None
        replica.drain()
        self._wake()
        while replica.info is not None and replica.info.weights == old:
            now = time.monotonic()
            if may_switch(replica, self._scheduler) and now >= self._expects_until:
                driver.client.start_over("it gets other weights")
                await self._until_other_weights(driver, old)
                return
            if self._deadline is not None and now >= self._deadline:
                self._end_requests_of(replica)
            times = (self._deadline, self._expects_until)
            await self._has_moved(min((at - now for at in times if at is not None and at > now), default=None))

    async def _until_other_weights(self, driver: ReplicaDriver, old: Weights | None) -> None:
        """Waits until the executor has other weights, but no longer than for a lost one."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._recovery_timeout):
                while ((info := driver.replica.info) is None or info.weights == old) and not driver.is_unlisted:
                    await self._has_moved(None)

    def _end_requests_of(self, replica: Replica) -> None:
        """Ends all requests that need the weights of a replica."""
        error = RpcError(
            grpc.StatusCode.ABORTED, "the weights were replaced and max_wait_seconds has passed; send the request again"
        )
        version = replica.info.weights.version if replica.info else ""
        waiting = [request for request in self._scheduler.waiting if version_needed(request) == version]
        for request in [*replica.running, *waiting]:
            self._end(request, error)

    async def _has_moved(self, timeout: float | None) -> bool:
        """Waits for a change; returns False if there was none in `timeout` seconds."""
        self._moved.clear()
        try:
            await asyncio.wait_for(self._moved.wait(), timeout)
        except TimeoutError:
            return False
        return True


def _is_away(error: BaseException) -> bool:
    return isinstance(error, grpc.aio.AioRpcError) and error.code() is grpc.StatusCode.UNAVAILABLE


def _of_executor(error: grpc.aio.AioRpcError) -> RpcError:
    if not _is_away(error):
        return RpcError.from_call(error)
    return RpcError(
        grpc.StatusCode.UNAVAILABLE,
        f"an executor was lost while it loaded the weights ({error.details()}); the old weights remain in force, "
        "try again",
    )


def _gone(version: str) -> RpcError:
    return RpcError(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"the first tokens of the request were generated with weights {version}, which were replaced; send it again "
        "from its start",
    )
