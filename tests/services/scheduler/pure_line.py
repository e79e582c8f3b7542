"""The scheduler and a fake executor without anything between them, for tests of the pure core."""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from pagewire.config import SchedulerConfig
from pagewire.config.sampling_checks import resolve
from pagewire.errors import InvalidRequest
from pagewire.services.scheduler.compose import make_scheduler
from pagewire.services.scheduler.core.outcome import Outputs
from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.kv_events.prefix_caches import PrefixCaches
from pagewire.services.scheduler.placement.fleet import Fleet
from pagewire.services.scheduler.placement.integrity import check_integrity
from pagewire.services.scheduler.tiers.contents import TierContents
from pagewire.services.scheduler.tiers.tiers import Tiers
from pagewire.services.scheduler.values.executor_info import Adapter, ExecutorInfo, Weights
from pagewire.services.scheduler.values.executor_loss import Loss
from pagewire.services.scheduler.values.images import NO_IMAGES, PromptImages
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.services.scheduler.values.step import ScheduledStep, StepResult
from pagewire.services.scheduler.values.tenant import Tenant
from pagewire.v1.common_pb2 import Logprobs, SamplingParams
from pagewire.v1.executor_pb2 import BlockHashes, KVLoaded, KVTier, KVTierKind
from tests.fakes import FakeExecutor, FakeTier


def info_of(executor: FakeExecutor, max_model_len: int = 1 << 20) -> ExecutorInfo:
    return ExecutorInfo(
        incarnation=1,
        model="fake",
        max_model_len=max_model_len,
        vocab_size=executor.vocab_size,
        eos_token_ids=executor.eos_token_ids,
        max_logprobs=20,
        kv_groups=executor.kv_groups,
        block_size=executor.block_size,
        max_num_seqs=executor.max_num_seqs,
        max_num_batched_tokens=executor.max_num_batched_tokens,
        max_draft_tokens=executor.max_draft_tokens,
        pipeline_stages=executor.pipeline_stages,
        decode_costs=executor.decode_costs,
        draft_bounds=executor.draft_bounds,
        weights=Weights(executor.weights_version, int(executor.weights_version[1:] or 0)),
        max_adapters=executor.max_adapters,
        role=executor.role,
        kv_format=executor.kv_format,
        adapters=tuple(Adapter(one, digest=one) for one in sorted(executor.loaded_adapters)),
        kv_tiers=(KVTier(kind=KVTierKind.KV_TIER_KIND_DISK, load_rate=executor.load_rate),) if executor.tier else (),
    )


class LineCalls:
    """The calls to the tier of an executor; `line.tell_tiers` makes the scheduler see what changed."""

    def __init__(self, tier: FakeTier) -> None:
        self._tier = tier

    def watch(self, contents: TierContents) -> None:
        self.contents: TierContents | None = contents
        for changes in self._tier.snapshot():
            contents.apply(changes)
        self._num_told = len(self._tier.changes)

    def tell(self) -> None:
        """Tells the scheduler what has changed."""
        for changes in self._tier.changes[self._num_told :] if self.contents is not None else ():
            self.contents.apply(changes)  # type: ignore[union-attr]
        self._num_told = len(self._tier.changes)

    def forget(self, blocks: Sequence[BlockHashes] | None, on_forgotten: Callable[[], None], reset_at: int = 0) -> None:
        self._tier.forget(blocks)
        on_forgotten()

    def stop(self) -> None:
        self.contents = None


class PureLine:
    """Steps are executed when they are scheduled; their results arrive when `receive` is called. One replica for each
    executor; what takes a replica means the first by default."""

    def __init__(
        self,
        *executors: FakeExecutor,
        max_model_len: int = 1 << 20,
        attach: bool = True,
        check: bool = True,
        **config: Any,
    ) -> None:
        """check: the scheduler's integrity, at every turn."""
        self.executors = list(executors)
        self.max_model_len = max_model_len
        self.config = SchedulerConfig(**config)
        self.soon: list[Callable[[], None]] = []  # what the caches would do after a step
        self.caches = PrefixCaches(call_soon=self.soon.append)
        self.tier_calls: dict[int, LineCalls] = {}  # by replica id
        self.tiers = Tiers(self._calls_to)
        self.scheduler = make_scheduler(self.config, len(executors), self.caches.on_memory, self.tiers)
        self.caches.follow(self.scheduler, {}, None)
        self.steps: list[ScheduledStep] = []
        self.outputs: dict[int, list[int]] = {}
        self.vectors: dict[int, list[float]] = {}
        self.prompt_logprobs: dict[int, list[Logprobs]] = {}  # as often as they came
        self.ends: dict[int, list[FinishReason]] = {}
        self.errors: dict[int, InvalidRequest] = {}
        self.crashers: list[Request] = []  # ended because executors died of them
        self._results: list[deque[StepResult]] = [deque() for _ in executors]
        self._in_flight: list[deque[ScheduledStep]] = [deque() for _ in executors]
        self._num_requests = self._num_lives = 0
        self._checks = check
        if attach:
            for index in range(len(executors)):
                self.attach(index)

    def _calls_to(self, replica_id: int) -> LineCalls | None:
        index = next(i for i, one in enumerate(self.scheduler.replicas) if one.replica_id == replica_id)
        tier = self.executors[index].tier
        if tier is None:
            return None
        self.tier_calls[replica_id] = LineCalls(tier)
        return self.tier_calls[replica_id]

    def tell_tiers(self) -> None:
        """Makes the scheduler see what the tiers hold."""
        for calls in self.tier_calls.values():
            calls.tell()

    def end_load(self, index: int = 0, number: int = 0, lost: Collection[int] = (), seconds: float = 0.0) -> KVLoaded:
        """Ends a load that is under way. lost: indices of blocks that cannot be read. seconds: that it took; 0:
        unknown."""
        sources = {f"executor-{i}": one.tier for i, one in enumerate(self.executors) if one.tier is not None}
        loaded = self.executors[index].end_load(number, lost, sources, seconds)
        tiers = self.scheduler.replicas[index].kv.tiers
        assert tiers is not None
        tiers.end_loads([loaded])
        self._check_integrity()
        return loaded

    @property
    def executor(self) -> FakeExecutor:
        return self.executors[0]

    @property
    def replica(self) -> Replica:
        return self.scheduler.replicas[0]

    @property
    def info(self) -> ExecutorInfo:
        return info_of(self.executor, self.max_model_len)

    @property
    def fleet(self) -> Fleet:
        assert isinstance(self.scheduler.placement, Fleet)
        return self.scheduler.placement

    def is_suspect(self, request: Request) -> bool:
        return self.fleet.is_suspect(request)

    def max_num_tokens(self) -> int:
        """Returns the length of the longest request; the same wherever it runs, as the model decides."""
        return min(info_of(executor, self.max_model_len).max_num_tokens for executor in self.executors)

    def attach(self, index: int = 0, predecessor_failed: bool = False) -> None:
        self._num_lives += 1
        info = info_of(self.executors[index], self.max_model_len)
        info = replace(info, incarnation=self._num_lives, predecessor_failed=predecessor_failed)
        for request in self.scheduler.on_successor(self.scheduler.replicas[index], info):
            self._note_end(request)
            self.crashers.append(request)
        for request, error in self.scheduler.attach(self.scheduler.replicas[index], info):
            self._note_end(request)
            if error is not None:
                self.errors[request.request_id] = error

    def lose(self, index: int = 0, loss: Loss = Loss.SILENT) -> None:
        """The executor is gone, with everything in it, steps in flight included."""
        for request in self.scheduler.detach(self.scheduler.replicas[index], loss):
            self._note_end(request)
            self.crashers.append(request)
        self._check_integrity()
        self.executors[index].reset()
        self._results[index].clear()
        self._in_flight[index].clear()

    def join(self, executor: FakeExecutor) -> int:
        """One more; returns its index."""
        self.scheduler.add_replica()
        self.executors.append(executor)
        self._results.append(deque())
        self._in_flight.append(deque())
        self.attach(len(self.executors) - 1)
        return len(self.executors) - 1

    def leave(self, index: int) -> None:
        """One fewer, whatever it ran; those behind it have another index from now on."""
        replica = self.scheduler.replicas[index]
        if replica.info is not None:
            self.lose(index)
        self.scheduler.remove_replica(replica)
        for column in (self.executors, self._results, self._in_flight):
            del column[index]
        self._check_integrity()

    def die(self, successor: FakeExecutor | None = None, index: int = 0, loss: Loss = Loss.SILENT) -> None:
        """The executor loses everything, steps in flight included, and comes back, or another one does."""
        self.lose(index, loss)
        if successor is not None:
            self.executors[index] = successor
        self.attach(index)

    def add(
        self,
        prompt: Sequence[int],
        resume: Sequence[int] = (),
        *,
        is_resubmitted: bool = False,
        yields_vector: bool = False,
        images: PromptImages = NO_IMAGES,
        cache_salt: str = "",
        tenant: str = "",
        tenant_weight: float = 0.0,
        adapter_digest: str = "",
        **params: Any,
    ) -> Request:
        self._num_requests += 1
        sampling_params = resolve(SamplingParams(**params))
        request = Request(
            self._num_requests,
            list(prompt),
            sampling_params,
            list(resume),
            is_resubmitted=is_resubmitted,
            yields_vector=yields_vector,
            images=images,
            cache_salt=cache_salt,
            tenant=Tenant(tenant, tenant_weight),
            adapter_digest=adapter_digest,
        )
        self.outputs[request.request_id] = []
        self.ends[request.request_id] = []
        if not self.scheduler.add_request(request):
            self._note_end(request)
        return request

    def abort(self, request: Request, reason: FinishReason = FinishReason.ABORT) -> None:
        self.scheduler.abort(request, reason)
        self._note_end(request)
        self._check_integrity()

    def schedule(self, index: int = 0) -> ScheduledStep | None:
        step = self.scheduler.schedule(self.scheduler.replicas[index])
        self._check_integrity()
        if step is not None:
            self._check_turns(index, step)
            self.steps.append(step)
            self._results[index].append(self.executors[index].execute(step))
            self._in_flight[index].append(step)
        return step

    def receive(self, index: int = 0, seconds: float = 0.0) -> Outputs:
        """Takes in the result of the oldest step. seconds: reported for the step; 0: unknown."""
        outputs = self.scheduler.update(self.scheduler.replicas[index], self._results[index].popleft(), seconds)
        self._in_flight[index].popleft()
        self._check_integrity()
        end = 0
        for i, (request, num_tokens) in enumerate(zip(outputs.requests, outputs.num_tokens, strict=True)):
            start, end = end, end + num_tokens
            assert not self.ends[request.request_id], "a token after the end"
            self.outputs[request.request_id] += outputs.token_ids[start:end]
            if i in outputs.prompt_logprobs:
                assert len(self.outputs[request.request_id]) == num_tokens, "they come with the first token"
                self.prompt_logprobs.setdefault(request.request_id, []).append(outputs.prompt_logprobs[i])
            if i in outputs.vectors:
                self.vectors[request.request_id] = list(outputs.vectors[i].values)
            if request.finish_reason is not None:
                self._note_end(request)
        for request, _ in outputs.refused:
            self._note_end(request)
        return outputs

    def find_drafts(self, num_drafted: int, index: int = 0) -> None:
        """Makes the result of the last step one for which so many drafts of each request were found."""
        result = self._results[index].pop()
        self._results[index].append(replace(result, num_drafted=[num_drafted] * len(result.request_ids)))

    def oldest_in_flight(self, index: int = 0) -> ScheduledStep:
        """Returns the step that is answered next."""
        return self._in_flight[index][0]

    def num_in_flight(self, index: int = 0) -> int:
        return len(self._results[index])

    def run(self, max_steps: int = 10_000) -> None:
        """Runs until all requests have ended, as many steps in flight as the scheduler gives."""
        for _ in range(max_steps):
            for index in range(len(self.executors)):
                while self.schedule(index) is not None:
                    pass
            # A replica to which another leaves a request after it has decided decides again.
            wanted = self.scheduler.placement.take_wanted()
            self.tell_tiers()
            busy = [index for index in range(len(self.executors)) if self.num_in_flight(index)]
            loading = [index for index, executor in enumerate(self.executors) if executor.loads]
            if not busy and not wanted and not loading:
                break
            for index in busy:
                self.receive(index)
            for index in loading:
                self.end_load(index)
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0, "requests are stuck"

    def _note_end(self, request: Request) -> None:
        assert request.finish_reason is not None
        self.ends[request.request_id].append(request.finish_reason)

    def _check_turns(self, index: int, step: ScheduledStep) -> None:
        """That no stage of a pipeline would wait for a token that is sampled in one of the S - 1 steps before, and that
        no more steps are in flight than stages can have, and one."""
        num_stages, in_flight = self.executors[index].pipeline_stages, list(self._in_flight[index])
        assert len(in_flight) < num_stages - 1 + self.config.pipeline_depth
        under_way = set[int]()
        for one in [*in_flight[max(0, len(in_flight) - num_stages + 1) :], step]:
            # Those that were preempted, and enter again, do not wait for it.
            under_way.difference_update(new.request_id for new in one.new_requests)
            if one is step and num_stages > 1:
                assert not under_way.intersection(step.request_ids), "a stage would wait for a token"
            under_way.update(request.request_id for request in one.sampled)

    def _check_integrity(self) -> None:
        if self._checks:
            check_integrity(self.scheduler)
