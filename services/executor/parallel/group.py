"""The processes of one executor, as one of them sees them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import torch

from pagewire.errors import StartupError
from pagewire.services.executor.device.errors import DeviceError
from pagewire.services.executor.parallel.communicator import ALONE, Communicator
from pagewire.services.executor.parallel.pipe import NO_PIPES, Pipes
from pagewire.services.executor.parallel.shared_memory import SharedMemory
from pagewire.services.executor.parallel.stage import WHOLE, Stage

LEADER = 0  # the rank that samples, and answers the scheduler
# Seconds for the reason to arrive after a collective has failed.
REASON_S = 2.0


class RankLost(DeviceError):
    """A process of the group has ended, hangs or failed: the others cannot continue without it."""

    def __init__(self, reason: str, in_a_step: bool = False) -> None:
        """in_a_step: the rank itself reported that it failed in a step, which a request may have caused."""
        super().__init__(reason, grpc.StatusCode.INTERNAL if in_a_step else grpc.StatusCode.UNAVAILABLE)
        self.in_a_step = in_a_step


class Failure:
    """The reason why a group ends: the first one counts. Used on any thread."""

    def __init__(self, memory: SharedMemory | None = None) -> None:
        """memory: the shared memory of the group, if there is any."""
        self.reason: str | None = None
        self._in_a_step = False
        self._memory = memory
        self._lock = threading.Lock()
        self._is_known = threading.Event()

    def set(self, reason: str, after: float = 0.0, in_a_step: bool = False) -> bool:
        """Sets the reason; returns whether it is the first. after: seconds to wait for a better one. in_a_step: see
        RankLost."""
        self._is_known.wait(after)
        with self._lock:
            if self.reason is not None:
                return False
            self.reason, self._in_a_step = reason, in_a_step
        self._is_known.set()
        if self._memory is not None:
            self._memory.end()  # ends the waiting of other ranks
        return True

    def check(self) -> None:
        """Raises RankLost if there is a reason, or if the memory has ended and its reason has yet to arrive."""
        if self.reason is None and not (self._memory is not None and self._memory.has_ended):
            return
        self._is_known.wait(REASON_S)
        reason = self.reason or "a rank was lost, or ranks made different calls; see the log of the leader"
        raise RankLost(reason, self._in_a_step)


@dataclass(frozen=True)
class Group:
    """The ranks of an executor. Each makes the same calls in the same order. Once one is lost, results of collectives
    are undefined, and `check` raises."""

    rank: int = 0
    size: int = 1
    world: Communicator = ALONE  # of all ranks
    tensor: Communicator = ALONE  # of the ranks that have parts of the same layers
    loading: Communicator = ALONE  # of all ranks, for weights that are read while steps run
    loading_tensor: Communicator = ALONE  # as `tensor`, likewise
    num_local: int = 1  # ranks that share this machine
    failure: Failure = field(default_factory=Failure)
    stage: Stage = WHOLE  # of this rank
    pipes: Pipes = NO_PIPES  # to other stages

    def check(self) -> None:
        """Raises RankLost once a rank is lost. Call it before results of collectives leave this process."""
        self.failure.check()

    def of_all(self, number: int) -> list[int]:
        """Returns the number of each rank. Raises RankLost."""
        return self._gathered(self.world, number)

    def least(self, number: int) -> int:
        """Returns the smallest of all ranks' numbers. Raises RankLost."""
        return min(self.of_all(number))

    def all_have(self, has: bool) -> bool:
        """Returns whether `has` is true on all ranks. Raises RankLost."""
        return self.least(int(has)) == 1

    def check_same(self, what: str, text: str) -> None:
        """Raises StartupError if ranks have different texts, or RankLost."""
        self._check_same(what, text, self.world)

    def check_same_read(self, what: str, text: str) -> None:
        """Does the same of what is read while steps run."""
        self._check_same(what, text, self.loading)

    def _check_same(self, what: str, text: str, among: Communicator) -> None:
        digest = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little")
        digests = self._gathered(among, digest)
        for rank, other in enumerate(digests):
            if other != digests[0]:
                raise StartupError(f"rank {rank} has other {what} than rank 0; give all ranks the same")

    def without_error(self, error: Exception | None) -> None:
        """Raises the error of this rank, or StartupError if another rank has one; for weights that are read."""
        wrong = [rank for rank, failed in enumerate(self._gathered(self.loading, int(error is not None))) if failed]
        if error is not None:
            raise error
        if wrong:
            raise StartupError(f"rank {wrong[0]} of the executor cannot read them; see its log")

    def _gathered(self, communicator: Communicator, number: int) -> list[int]:
        if communicator.size == 1:
            return [number]
        numbers = communicator.all_gather(torch.tensor([[number]], dtype=torch.int64)).tolist()
        self.check()
        gathered: Sequence[int] = numbers[0]
        return list(gathered)


ALONE_GROUP = Group()
