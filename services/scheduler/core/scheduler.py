"""The waiting requests and the replicas that take them: a pure core without I/O.

One rule: every request has `num_computed_tokens` and `num_tokens`, and each step moves the first closer to the second,
within a token budget: requests that need one token come first, then running prefills, then waiting requests. Prefill
and decode, chunked prefill, prefix hits, resumption after preemption and drafted tokens are all this rule. `replica.py`
applies it; each replica decides its own steps and takes from the requests that wait here.

State advances when a step is scheduled, not when its result arrives, so that the next step can be scheduled meanwhile.

Feature code does not belong here: features join in `seams.py`, and the choice among replicas in `placing.py`.
"""

from collections.abc import Iterable, Iterator, Mapping

from pagewire.config import SchedulerConfig
from pagewire.errors import InvalidRequest
from pagewire.services.scheduler.core.ahead import ahead
from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.core.placing import Placement
from pagewire.services.scheduler.core.policy import POLICIES
from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.seams import Features
from pagewire.services.scheduler.core.waiting import WaitingQueue
from pagewire.services.scheduler.costs.output_lengths import OutputLengths
from pagewire.services.scheduler.values.account import Account
from pagewire.services.scheduler.values.executor_info import ExecutorInfo
from pagewire.services.scheduler.values.executor_loss import Loss
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.services.scheduler.values.step import ScheduledStep, StepResult


class QueueFull(Exception):
    """Raised when max_waiting_requests requests wait already."""


class NotInterchangeable(Exception):
    """Raised when an executor differs from the others in what a request may be."""


class Scheduler:
    """Keeps the waiting requests, and hands them to replicas. A replica without an executor takes none."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_replicas: int,
        features: Features,
        placement: Placement,
        output_lengths: OutputLengths,
    ) -> None:
        """output_lengths: an estimate that the scheduler updates and the placement may read."""
        self.output_lengths = output_lengths
        self._config = config
        self._features = features
        self._shares = self._features.shares
        self._policy = POLICIES[config.scheduling_policy]
        self._num_arrivals = 0
        self._waiting = WaitingQueue(self._shares)
        self._has_leftovers = False  # the last step could not take all that waited
        self.placement = placement
        self._replicas: dict[int, Replica] = {}
        self._num_replicas_made = 0
        self.replicas: tuple[Replica, ...] = ()  # in the order in which they were added
        for _ in range(num_replicas):
            self.add_replica()

    # -- executors ---------------------------------------------------------------------------------------------------

    def add_replica(self) -> Replica:
        """Adds a replica without an executor. Its id is new; its name may be that of a removed replica, so that the
        number of names in metrics stays bounded."""
        taken = {replica.name for replica in self.replicas}
        number = next(number for number in range(len(taken) + 1) if f"executor-{number}" not in taken)
        replica = Replica(self._num_replicas_made, self._config, self._features, f"executor-{number}")
        self._num_replicas_made += 1
        self._replicas[replica.replica_id] = replica
        self.replicas = tuple(self._replicas.values())
        self.placement.add(replica)
        return replica

    def remove_replica(self, replica: Replica) -> None:
        """Removes a replica without an executor."""
        assert replica.info is None, "a replica is removed with its executor"
        self.placement.remove(replica)
        del self._replicas[replica.replica_id]
        self.replicas = tuple(self._replicas.values())

    def attach(self, replica: Replica, info: ExecutorInfo) -> list[tuple[Request, InvalidRequest | None]]:
        """Attaches an executor with empty rows and an empty KV cache to a replica.

        Returns:
            The requests that ended because of it, each with an error if it does not fit this executor, or None if the
            executor's limits make it complete.

        Raises:
            NotInterchangeable: others serve another model, or longer or shorter requests; nothing was changed.
        """
        present = self.info
        if present is not None and not info.is_interchangeable_with(present):
            raise NotInterchangeable(
                f"it serves {_described(info)}, while others serve {_described(present)}; it is not used until they "
                "have left: give every executor of --executor-address the same --model and files, --max-model-len and "
                "--block-size"
            )
        replica.attach(info)
        self.placement.note(replica)
        ended: list[tuple[Request, InvalidRequest | None]] = []
        for request in list(self._waiting):
            if present is None:
                request.blocks.forget_hashes()  # the block size may be another
            try:
                self._resolve(request)
            except InvalidRequest as error:
                self._end_waiting(request, FinishReason.ERROR)
                ended.append((request, error))
            else:
                if reason := self._find_early_end(request):
                    self._end_waiting(request, reason)
                    ended.append((request, None))
        return ended

    def on_successor(self, replica: Replica, info: ExecutorInfo) -> Mapping[Request, int]:
        """Takes in what an executor, which is not attached yet, reports about the one before it.

        Returns:
            The requests that ended because they crashed it, with the number of executors that each crashed.
        """
        ended = self._features.suspects.on_successor(replica.replica_id, info, list(self.requests()))
        for request in ended:
            self.abort(request, FinishReason.ERROR)
        return ended

    def detach(self, replica: Replica, loss: Loss = Loss.SILENT) -> Mapping[Request, int]:
        """Drops a replica's lost executor: its requests wait, in order and with their tokens, for any replica.

        Returns:
            The requests that ended because every executor that ran them failed, with the number of lost executors.
        """
        ended = self._features.suspects.on_lost(replica.lost(loss), list(self.requests()))
        for request in ended:
            self.abort(request, FinishReason.ERROR)
        for request in replica.detach():
            self._waiting.push(request)
        self.placement.note(replica)
        self._has_leftovers = bool(self._waiting)
        return ended

    # -- requests ----------------------------------------------------------------------------------------------------

    def add_request(self, request: Request) -> bool:
        """Takes a request in.

        Returns:
            False if it is complete already, as its resumed tokens satisfy an end condition; see its finish_reason.

        Raises:
            InvalidRequest: it cannot be served.
            QueueFull: max_waiting_requests requests wait already, and no earlier attempt of this one was taken. A
                request of a tenant with less than its share of the queue is still taken, until twice as many wait.
        """
        if self.info is not None:
            self._resolve(request)
            if reason := self._find_early_end(request):
                request.finish(reason)
                return False
        request.account = self._shares.account(request.tenant.name, request.tenant.weight)
        if not request.is_resubmitted:
            self._check_queue(request.account)
        request.is_long = self._is_long(request)
        request.order = self._policy(request, self._num_arrivals)
        self._num_arrivals += 1
        self._waiting.push(request)
        return True

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends a live request at any moment."""
        if request.replica_id is None:
            self._waiting.remove(request)
        else:
            replica = self._replicas[request.replica_id]
            replica.abort(request)
            self.placement.note(replica)
            self.placement.want(replica)
        self._finish(request, reason)

    # -- steps -------------------------------------------------------------------------------------------------------

    def schedule(self, replica: Replica) -> ScheduledStep | None:
        """Decides the replica's next step. Returns None if nothing can run now or enough steps are in flight."""
        if not replica.can_schedule:
            return None
        step = replica.schedule(self._waiting, self.placement.taker(replica))
        self.placement.on_step(replica, step)
        found = (request for request in self._waiting if request.blocks.awaited is None)
        left = next(found, None) if self._waiting else None
        self._has_leftovers = left is not None and not any(
            other.has_room_for(left) for other in self.placement.least_loaded() if other is not replica
        )
        return step

    def update(self, replica: Replica, result: StepResult, seconds: float = 0.0) -> Outputs:
        """Takes in the result of the replica's oldest step in flight; see `Replica.update`."""
        outputs = replica.update(result, seconds)
        self.output_lengths.learn(len(outputs.token_ids), len(outputs.ends) + len(outputs.refused))
        for request in self.placement.on_result(replica, outputs):
            replica.abort(request)
            request.preempt()
            self._waiting.push(request)
            self.placement.note(replica)
        return outputs

    # -- state -------------------------------------------------------------------------------------------------------

    @property
    def info(self) -> ExecutorInfo | None:
        """The facts about an executor, or None without one; all executors accept the same requests."""
        return next((replica.info for replica in self.replicas if replica.info), None)

    @property
    def num_running(self) -> int:
        return sum(replica.num_running for replica in self.replicas)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def waiting(self) -> Iterable[Request]:
        """The waiting requests, in the policy's order."""
        return self._waiting

    @property
    def num_short_waiting(self) -> int:
        """The number of waiting requests with short prompts."""
        return self._waiting.num_short

    def waiting_before(self, request: Request) -> tuple[float, float]:
        """Returns how many requests have their turn before one that is added now, and about how many tokens they have.
        Long prompts that wait for a running one are overtaken."""
        request.order, request.is_long = self._policy(request, self._num_arrivals), self._is_long(request)
        passes = all(replica.holds_long_back for replica in self.placement.least_loaded(len(self.replicas)))
        behind, kinds = request.is_long or not passes, self.placement.kinds_before_new
        return ahead(self._waiting, request, is_behind_long_ones=behind, kinds=kinds)

    def requests(self) -> Iterator[Request]:
        """Yields all live requests, running ones first, each part in the policy's order."""
        for replica in self.replicas:
            yield from replica.running
        yield from self._waiting

    # -- checks ------------------------------------------------------------------------------------------------------

    def _resolve(self, request: Request) -> None:
        """Raises InvalidRequest if the request can never run on one of the executors, of which there must be one."""
        assert self.info is not None
        request.resolve(self.info)
        for replica in self.replicas:
            replica.check(request)

    def _check_queue(self, account: Account) -> None:
        """Raises QueueFull if no request of this tenant may join the waiting ones."""
        limit = self._config.max_waiting_requests
        if limit is None or self.num_waiting < limit + (num_open := self._num_open_rows()):
            return
        # A tenant that fills the queue does not keep others out. The second bound is for all tenants, as a client may
        # use many names.
        has_less = account.num_waiting < max(1.0, limit * self._shares.share(account))
        if not has_less or self.num_waiting >= 2 * limit + num_open:
            raise QueueFull(
                f"{self.num_waiting} requests are waiting and {limit} may (max_waiting_requests); try again later"
            )

    def _end_waiting(self, request: Request, reason: FinishReason) -> None:
        self._waiting.remove(request)
        self._finish(request, reason)

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.num_cached_tokens is not None:  # it has run before
            self.output_lengths.learn(0, 1)
        request.finish(reason)

    def _find_early_end(self, request: Request) -> FinishReason | None:
        """Returns why a request with resumed output is already complete."""
        return request.find_end() if request.num_output_tokens else None

    def _is_long(self, request: Request) -> bool:
        """Returns whether the prompt is long on every replica that may take it."""
        first = self.placement.least_loaded(1)
        if not first or not first[0].is_long(request):
            return False
        return all(replica.is_long(request) for replica in self.placement.near(request))

    def _num_open_rows(self) -> int:
        """Returns the number of rows that new requests would get in the next steps; 0 if the last step left requests
        waiting."""
        return 0 if self._has_leftovers else sum(replica.num_open_rows for replica in self.replicas if replica.info)


def _described(info: ExecutorInfo) -> str:
    version = f" (weights {info.weights.version})" if info.weights.version else ""
    return f"{info.model}{version} with requests of up to {info.max_num_tokens} tokens in blocks of {info.block_size}"
