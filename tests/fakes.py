"""Fakes of the services, for tests without a model.

`FakeExecutor` samples tokens that are a pure function of all tokens before them, and checks everything an executor may
rely on: a wrong block table, a wrong prefix hit, a lost or repeated token or a row too many is an AssertionError.
`FakeExecutorServicer` puts it behind the real gRPC contract.
"""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

import grpc

from pagewire.services.scheduler.service.convert import from_step
from pagewire.services.scheduler.values.executor_info import KVGroup
from pagewire.services.scheduler.values.step import ScheduledStep, StepResult
from pagewire.v1 import common_pb2, executor_pb2, executor_pb2_grpc
from pagewire.wire import rpc
from pagewire.wire.status.executor_failures import ExecutorFailure

_MASK = (1 << 64) - 1
_REFUSAL = common_pb2.RequestError(code=3, message="the fake executor refuses it")
_NAN = common_pb2.RequestError(code=13, message="the fake executor has no numbers for it")
_ROLES = {
    "both": "EXECUTOR_ROLE_UNSPECIFIED",
    "prefill": "EXECUTOR_ROLE_PREFILL",
    "decode": "EXECUTOR_ROLE_DECODE",
}
EMPTY_HISTORY = 0x9E3779B97F4A7C15


def extend_history(history: int, token_id: int) -> int:
    """The 64-bit fingerprint of a token sequence, one token longer."""
    history = ((history ^ (token_id + 1)) * 0xBF58476D1CE4E5B9) & _MASK
    return history ^ (history >> 29)


def first_history(weights_version: str, adapter_digest: str = "") -> int:
    """Returns the history of an empty sequence of the weights of this version, with an adapter."""
    history = EMPTY_HISTORY
    for byte in (weights_version + adapter_digest).encode():
        history = extend_history(history, byte)
    return history


def next_token(history: int, vocab_size: int, banned: Collection[int] = ()) -> int:
    """The token that follows a history."""
    token_id = (history >> 7) % vocab_size
    while token_id in banned:
        token_id = (token_id + 1) % vocab_size
    return token_id


def expected_output(
    prompt_token_ids: Sequence[int],
    max_tokens: int,
    *,
    vocab_size: int,
    end_token_ids: Collection[int] = (),
    min_tokens: int = 0,
    weights_version: str = "",
    adapter_digest: str = "",
) -> list[int]:
    """Returns the tokens that a FakeExecutor must generate; end_token_ids are end-of-sequence and stop tokens
    together."""
    history = first_history(weights_version, adapter_digest)
    for token_id in prompt_token_ids:
        history = extend_history(history, token_id)
    output: list[int] = []
    while len(output) < max_tokens:
        banned = end_token_ids if len(output) < min_tokens else ()
        output.append(next_token(history, vocab_size, banned))
        history = extend_history(history, output[-1])
        if output[-1] in end_token_ids and len(output) > min_tokens:
            break
    return output


class FakeExecutorDied(rpc.RpcError):
    """The executor received a request that kills it, and reports it."""

    def __init__(self) -> None:
        super().__init__(
            grpc.StatusCode.INTERNAL, "fatal device error: a deadly token", reason=ExecutorFailure.DEVICE_FAILED
        )


@dataclass(slots=True)
class FakeRow:
    """The executor's state of one request."""

    token_ids: list[int]
    num_prompt_tokens: int
    num_computed_tokens: int
    block_tables: list[list[int]]  # by group; -1 = it has none at this place
    sampling_params: common_pb2.SamplingParams
    yields_vector: bool = False
    num_read_from: int = 0  # position of the first token of the last step
    weights_version: str = ""
    adapter_slot: int = 0
    adapter_digest: str = ""
    histories: list[int] = field(default_factory=list)  # [i] = fingerprint of token_ids[: i + 1]

    def extend_histories(self) -> None:
        for token_id in self.token_ids[len(self.histories) :]:
            start = first_history(self.weights_version, self.adapter_digest)
            before = self.histories[-1] if self.histories else start
            self.histories.append(extend_history(before, token_id))


class FakeTier:
    """A tier of fake executors, which may share it: what blocks hold, by group and hash."""

    def __init__(self, max_blocks: int = 1 << 30) -> None:
        self.blocks: dict[tuple[int, bytes], list[int]] = {}
        self.max_blocks = max_blocks
        self.num_saves = 0
        self.reset_at = 0  # the latest reset
        self.changes: list[executor_pb2.TierChanges] = []  # all since the beginning

    def save(self, group: int, block_hash: bytes, contents: list[int]) -> None:
        self.num_saves += 1
        known = self.blocks.get((group, block_hash))
        assert known is None or known == contents, "one hash for other contents"
        self.blocks[group, block_hash] = contents
        self._note(stored=[executor_pb2.BlockHashes(group=group, hashes=block_hash)])
        while len(self.blocks) > self.max_blocks:
            self.remove(*next(iter(self.blocks)))

    def remove(self, group: int, block_hash: bytes) -> None:
        if self.blocks.pop((group, block_hash), None) is not None:
            self._note(removed=[executor_pb2.BlockHashes(group=group, hashes=block_hash)])

    def forget(self, blocks: Sequence[executor_pb2.BlockHashes] | None) -> None:
        """Forgets blocks; None: all."""
        if blocks is None:
            self.blocks.clear()
            self._note(cleared=True)
        for one in blocks or ():
            for start in range(0, len(one.hashes), 32):
                self.remove(one.group, one.hashes[start : start + 32])

    def _note(self, **change: Any) -> None:
        self.changes.append(executor_pb2.TierChanges(kind=executor_pb2.KV_TIER_KIND_DISK, **change))

    def snapshot(self) -> list[executor_pb2.TierChanges]:
        stored = [executor_pb2.BlockHashes(group=group, hashes=block_hash) for group, block_hash in self.blocks]
        return [executor_pb2.TierChanges(kind=executor_pb2.KV_TIER_KIND_DISK, stored=stored, is_complete=True)]


class FakeExecutor:
    """Executes steps (the scheduler's `Step` or a `StepRequest`, which have the same fields) without a model.

    KV is a dict (group, slot) -> fingerprint of the tokens up to and including the slot's; check_kv=False does without
    it, for speed. Of states it is (group, block) -> fingerprint of the tokens that the state is after.

    Running a request with deadly_token_id first in its prompt raises FakeExecutorDied, once it has deadly_from tokens
    of output; a new one that begins with refused_token_id is answered with an error. One that begins with nan_token_id
    has no numbers for its next token, once it has that many; what it writes to the KV cache is wrong.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 256,
        windows: Mapping[int, int] | None = None,
        states: Mapping[int, int] | None = None,
        block_size: int = 16,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        vocab_size: int = 1000,
        eos_token_ids: Collection[int] = (),
        check_kv: bool = True,
        deadly_token_id: int | None = None,
        deadly_from: int = 0,
        refused_token_id: int | None = None,
        nan_token_id: int | None = None,
        max_draft_tokens: int = 0,
        pipeline_stages: int = 1,
        draw_gain: Callable[[int], int] | None = None,
        max_adapters: int = 0,
        tier: "FakeTier | None" = None,
    ) -> None:
        """num_blocks: of the layers that see all tokens; 0 = there are none. windows: a window -> blocks of the layers
        that have it. states: tokens that a block is for -> blocks of layers with a state.

        max_draft_tokens: of one request and step. draw_gain(most): how many tokens, up to `most`, a request that has
        drafts gains; by default 1 to `most`, at random."""
        self.kv_groups = (
            *[KVGroup(num_blocks)] * (num_blocks > 0),
            *(KVGroup(count, window) for window, count in (windows or {}).items()),
            *(KVGroup(count, state_tokens=tokens) for tokens, count in (states or {}).items()),
        )
        self.block_size = block_size
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(eos_token_ids)
        self.check_kv = check_kv
        self.deadly_token_id = deadly_token_id
        self.deadly_from = deadly_from
        self.refused_token_id = refused_token_id
        self.nan_token_id = nan_token_id
        self.max_draft_tokens = max_draft_tokens
        self.pipeline_stages = pipeline_stages
        self.max_adapters = max_adapters
        self.tier = tier
        self.load_rate = 0.0  # bytes per second; 0 = unknown
        self.role = "both"  # or prefill, decode
        self.kv_format = "fake"
        self.loaded_adapters = set[str]()  # digests; another adapter makes other tokens
        self.draw_gain = draw_gain or (lambda most: random.randint(1, most))
        self.decode_costs: tuple[tuple[int, float], ...] = ()  # as in the scheduler's ExecutorInfo
        self.draft_bounds: tuple[tuple[int, int], ...] = ()
        self.num_executed_tokens = 0
        self.weights_version = ""  # another one makes other tokens; to a PureLine, v1 is followed by v2
        self.reset()

    def reset(self) -> None:
        """Empty rows and KV cache, as at the start of a stream."""
        self.rows: dict[int, FakeRow] = {}
        self.adapters: dict[int, str] = {}  # slot -> digest
        self._kv: dict[tuple[int, int], int] = {}
        self._last_step_id = self._last_load_id = 0
        self.loads: list[executor_pb2.KVLoad] = []  # that are under way
        self._filling: set[tuple[int, int]] = set()  # groups and blocks

    def execute(self, step: Any) -> StepResult:
        """Executes the next step. Raises AssertionError if it breaks a promise of `executor.proto`."""
        assert step.step_id == self._last_step_id + 1, f"step {step.step_id} follows {self._last_step_id}"
        self._last_step_id = step.step_id
        message = from_step(step) if isinstance(step, ScheduledStep) else step
        self._begin_loads(message)
        self._apply_rows(step)
        self._apply_blocks(step, message)
        assert sum(step.num_scheduled_tokens) <= self.max_num_batched_tokens, "more tokens than a step may compute"
        if any(self._is_poisoned(self.rows[request_id], self.deadly_token_id) for request_id in step.request_ids):
            raise FakeExecutorDied
        refused = {new.request_id: _REFUSAL for new in step.new_requests if new.token_ids[0] == self.refused_token_id}
        drafts = list(message.num_draft_tokens) or [0] * len(step.request_ids)
        self._write_kv(step, drafts)
        result = StepResult(step.step_id, [], [], [], {}, {}, refused, {})
        for request_id, num_drafts in zip(step.request_ids, drafts, strict=True):
            row = self.rows[request_id]
            has_nan = self._is_poisoned(row, self.nan_token_id)
            if has_nan:
                self._spoil_kv(row)
            elif self.check_kv:
                self._check_kv(request_id, row)
            if row.num_computed_tokens == len(row.token_ids) and not row.yields_vector:
                self._sample_into(result, request_id, row, num_drafts)
                if has_nan:
                    result.token_ids[-result.num_tokens[-1] :] = [-1] * result.num_tokens[-1]
                    result.errors[request_id] = _NAN  # type: ignore[index]
        for request_id in step.request_ids:
            row = self.rows[request_id]
            if row.num_computed_tokens == len(row.token_ids) and row.yields_vector:
                result.vectors[len(result.request_ids)] = common_pb2.Vector(values=[row.histories[-1] % 997])  # type: ignore[index]
                result.request_ids.append(request_id)
                result.num_tokens.append(0)
                result.num_drafted.append(0)
        self.num_executed_tokens += sum(step.num_scheduled_tokens)
        self._save(message)
        return result

    # -- tiers -------------------------------------------------------------------------------------------------------

    def _slots_of(self, group: int, block_id: int) -> list[tuple[int, int]]:
        if self.kv_groups[group].is_state:
            return [(group, block_id)]
        return [(group, block_id * self.block_size + offset) for offset in range(self.block_size)]

    def _begin_loads(self, message: executor_pb2.StepRequest) -> None:
        """What the blocks hold is undefined until the load has ended."""
        for load in message.loads:
            assert self.tier is not None or load.source, "there is nothing to load from"
            assert load.load_id == self._last_load_id + 1, f"load {load.load_id} follows {self._last_load_id}"
            self._last_load_id = load.load_id
            self.loads.append(load)
            for one in load.blocks:
                assert len(one.hashes) == 32 * len(one.ids) > 0
                for block_id in one.ids:
                    assert (one.group, block_id) not in self._filling, "a block is loaded twice"
                    self._filling.add((one.group, block_id))
                    for slot in self._slots_of(one.group, block_id):
                        self._kv[slot] = -2

    def end_load(
        self,
        index: int = 0,
        lost: Collection[int] = (),
        sources: "Mapping[str, FakeTier] | None" = None,
        seconds: float = 0.0,
    ) -> executor_pb2.KVLoaded:
        """Ends a load that is under way, and returns its outcome. lost: indices of blocks that cannot be read. sources:
        what other executors have, by address."""
        load = self.loads.pop(index)
        tier = (sources or {}).get(load.source) if load.source else self.tier
        loaded = executor_pb2.KVLoaded(load_id=load.load_id, seconds=seconds)
        wanted = [
            (one.group, block_id, one.hashes[32 * i :][:32])
            for one in load.blocks
            for i, block_id in enumerate(one.ids)
        ]
        num_bytes = 0
        for i, (group, block_id, block_hash) in enumerate(wanted):
            self._filling.remove((group, block_id))
            contents = tier.blocks.get((group, block_hash)) if tier is not None else None
            if contents is None or i in lost:
                loaded.missing.append(i)
                continue
            num_bytes += self.kv_groups[group].block_bytes
            self._kv.update(zip(self._slots_of(group, block_id), contents, strict=True))
        loaded.bytes.add(kind=executor_pb2.KV_TIER_KIND_DISK, bytes=num_bytes)
        return loaded

    def _save(self, message: executor_pb2.StepRequest) -> None:
        for one in message.saves:
            assert self.tier is not None, "there is nowhere to save to"
            assert len(one.hashes) == 32 * len(one.ids) > 0
            for i, block_id in enumerate(one.ids):
                assert (one.group, block_id) not in self._filling, "a block is saved that is being loaded"
                contents = [self._kv[slot] for slot in self._slots_of(one.group, block_id)]
                self.tier.save(one.group, one.hashes[32 * i :][:32], contents)

    def _is_poisoned(self, row: FakeRow, first: int | None) -> bool:
        return row.token_ids[0] == first and len(row.token_ids) - row.num_prompt_tokens >= self.deadly_from

    def _spoil_kv(self, row: FakeRow) -> None:
        """What the step has written is wrong."""
        for index, group in enumerate(self.kv_groups):
            if not group.is_state:
                for position in range(row.num_read_from, row.num_computed_tokens):
                    self._kv[self._slot(row, index, position)] = -1

    def _sample_into(self, result: StepResult, request_id: int, row: FakeRow, num_drafts: int) -> None:
        """A request that has reached its last known token gains as many of its drafts and one more as is drawn."""
        index = len(result.request_ids)
        result.request_ids.append(request_id)
        gain = self.draw_gain(1 + num_drafts) if num_drafts else 1
        result.num_tokens.append(gain)
        result.num_drafted.append(num_drafts)
        params = row.sampling_params
        if params.HasField("prompt_logprobs") and len(row.token_ids) == row.num_prompt_tokens:
            result.prompt_logprobs[index] = fake_prompt_logprobs(row.token_ids, params.prompt_logprobs, self.vocab_size)  # type: ignore[index]
        for _ in range(gain):
            token_id = self._sample(row)
            if params.HasField("logprobs"):
                message = result.logprobs.setdefault(index, common_pb2.Logprobs())  # type: ignore[attr-defined]
                message.MergeFrom(_fake_logprobs(token_id, params.logprobs, self.vocab_size))
            result.token_ids.append(token_id)
            row.token_ids.append(token_id)
            row.extend_histories()
        # The drafts that were accepted have their KV; the last token gained has none yet.
        for position in range(row.num_computed_tokens, row.num_computed_tokens + gain - 1):
            for group in range(len(self.kv_groups)):
                self._kv[self._slot(row, group, position)] = row.histories[position]
        row.num_computed_tokens += gain - 1

    def _apply_rows(self, step: Any) -> None:
        for request_id in step.finished_request_ids:
            assert request_id in self.rows, f"request {request_id} has no row to free"
            del self.rows[request_id]
        self._apply_slots(step)
        for new in step.new_requests:
            assert new.request_id not in self.rows, f"request {new.request_id} has a row already"
            assert new.request_id in step.request_ids, f"new request {new.request_id} does not run"
            assert 0 <= new.num_computed_tokens < len(new.token_ids), "nothing is left to compute"
            assert 1 <= new.num_prompt_tokens <= len(new.token_ids)
            is_scored = new.sampling_params.HasField("prompt_logprobs") and not new.yields_vector
            if is_scored and len(new.token_ids) == new.num_prompt_tokens:
                assert not new.num_computed_tokens, "log probabilities are wanted of cached tokens"
            assert len(new.blocks) == len(self.kv_groups), "blocks of other groups than there are"
            self.rows[new.request_id] = FakeRow(
                list(new.token_ids),
                new.num_prompt_tokens,
                new.num_computed_tokens,
                [[-1] * blocks.first + list(blocks.ids) for blocks in new.blocks],
                new.sampling_params,
                new.yields_vector,
                weights_version=self.weights_version,
                adapter_slot=new.adapter_slot,
                adapter_digest=self.adapters[new.adapter_slot] if new.adapter_slot else "",
            )
        assert len(self.rows) <= self.max_num_seqs, f"{len(self.rows)} requests in {self.max_num_seqs} rows"

    def _apply_slots(self, step: Any) -> None:
        changes = [(one.slot, one.digest) if hasattr(one, "slot") else one for one in step.adapter_slots]
        used = {row.adapter_slot for row in self.rows.values()}
        assert len({slot for slot, _ in changes}) == len(changes), "a slot twice in a step"
        for slot, digest in changes:
            assert 1 <= slot <= self.max_adapters, f"there is no slot {slot}"
            assert slot not in used, f"slot {slot} is in use"
            assert digest in self.loaded_adapters, f"adapter {digest} was not loaded"
            self.adapters[slot] = digest

    def _apply_blocks(self, step: Any, message: executor_pb2.StepRequest) -> None:
        num_requests = len(step.request_ids)
        assert num_requests or step.finished_request_ids or message.loads, "a step that says nothing"
        assert len(set(step.request_ids)) == num_requests, "a request twice"
        num_tables = num_requests * len(self.kv_groups)
        assert len(step.num_scheduled_tokens) == num_requests, "columns of unequal length"
        assert len(step.num_new_blocks) == num_tables, "columns of unequal length"
        assert sum(step.num_new_blocks) == len(step.new_block_ids)
        new_request_ids = {new.request_id for new in step.new_requests}
        new_block_ids = iter(step.new_block_ids)
        counts = iter(step.num_new_blocks)
        for request_id in step.request_ids:
            assert request_id in self.rows, f"request {request_id} runs without a row"
            row = self.rows[request_id]
            for number, (group, table) in enumerate(zip(self.kv_groups, row.block_tables, strict=True)):
                num_new_blocks = next(counts)
                assert not (num_new_blocks and request_id in new_request_ids), "a new request has its blocks already"
                table += islice(new_block_ids, num_new_blocks)
                # Before the next token's window are blocks that may have been given to others, or come back.
                seen = table[self._first_seen(group, row.num_computed_tokens) // self._block_tokens(group) :]
                assert len(set(seen)) == len(seen), f"request {request_id} has a block twice"
                assert all(0 <= block_id < group.num_blocks for block_id in seen)
                for index, block_id in self._filling:
                    assert index != number or block_id not in seen, "it runs with a block that is being loaded"

    def _write_kv(self, step: Any, drafts: Sequence[int]) -> None:
        """Writes all slots of the step, before anything is read: what a model does layer by layer. What is written for
        drafts is worth nothing, until they are accepted."""
        written: set[tuple[int, int]] = set()
        states = {index: group for index, group in enumerate(self.kv_groups) if group.is_state}
        if self.check_kv:
            for index, group in states.items():
                self._step_states(step, index, group)
        slots = [index for index in range(len(self.kv_groups)) if index not in states]
        for request_id, num_tokens, num_drafts in zip(step.request_ids, step.num_scheduled_tokens, drafts, strict=True):
            row = self.rows[request_id]
            end = row.num_computed_tokens + num_tokens
            known = end - num_drafts
            assert num_tokens > num_drafts >= 0, f"request {request_id} runs without tokens of its own"
            assert num_drafts <= self.max_draft_tokens, f"request {request_id} has {num_drafts} drafts"
            assert known <= len(row.token_ids), f"request {request_id} runs beyond its tokens"
            assert known == len(row.token_ids) or not num_drafts, f"request {request_id} has drafts in mid-prompt"
            for group, table in zip(self.kv_groups, row.block_tables, strict=True):
                reach = len(table) * self._block_tokens(group)
                assert end <= reach, f"request {request_id} runs beyond its blocks"
            row.extend_histories()
            if self.check_kv:
                for index, position in product(slots, range(row.num_computed_tokens, end)):
                    slot = self._slot(row, index, position)
                    assert slot not in written, f"slot {slot} is written twice in step {step.step_id}"
                    written.add(slot)
                    self._kv[slot] = row.histories[position] if position < known else -1
            row.num_computed_tokens = known
            row.num_read_from = known - (num_tokens - num_drafts)

    def _step_states(self, step: Any, index: int, group: KVGroup) -> None:
        """Each request reads the state before its first token and writes to the blocks that its tokens are in. Requests
        run side by side: none may read or write a block that another one writes."""
        before, reads, writes = dict(self._kv), list[tuple[int, int]](), list[tuple[int, int]]()
        for request_id, num_tokens in zip(step.request_ids, step.num_scheduled_tokens, strict=True):
            row = self.rows[request_id]
            row.extend_histories()
            start, end, table = row.num_computed_tokens, row.num_computed_tokens + num_tokens, row.block_tables[index]
            read = (index, table[(start - 1) // group.state_tokens]) if start else None
            if read is not None:
                assert before.get(read) == row.histories[start - 1], f"request {request_id} reads a wrong state"
            own = dict[tuple[int, int], int]()
            for position in range(start, end):
                own[index, table[position // group.state_tokens]] = row.histories[position]
            self._kv |= own
            writes += own
            reads += [read] if read is not None and read not in own else []
        assert len(set(writes)) == len(writes), f"a state is written by two requests in step {step.step_id}"
        assert not set(reads) & set(writes), f"a state is read while another request writes it in step {step.step_id}"

    def _check_kv(self, request_id: int, row: FakeRow) -> None:
        """All that the queries of this step have read, the first of which stands at num_read_from."""
        for index, group in enumerate(self.kv_groups):
            if group.is_state:
                continue
            for position in range(self._first_seen(group, row.num_read_from), row.num_computed_tokens):
                found = self._kv.get(self._slot(row, index, position))
                assert found == row.histories[position], f"request {request_id} reads wrong KV at position {position}"

    def _first_seen(self, group: KVGroup, position: int) -> int:
        """The first token that a query at this position attends to; of states, the one that it goes on from."""
        window = 2 if group.is_state else group.window
        return max(0, position - window + 1) if window else 0

    def _block_tokens(self, group: KVGroup) -> int:
        return group.state_tokens or self.block_size

    def _slot(self, row: FakeRow, group: int, position: int) -> tuple[int, int]:
        block_id = row.block_tables[group][position // self.block_size]
        return group, block_id * self.block_size + position % self.block_size

    def _sample(self, row: FakeRow) -> int:
        params = row.sampling_params
        banned: Collection[int] = ()
        # As if every grammar could end at any time, and had to, where its request samples an end token.
        if len(row.token_ids) - row.num_prompt_tokens < params.min_tokens and not params.HasField("grammar"):
            banned = set(params.stop_token_ids) | (set() if params.ignore_eos else self.eos_token_ids)
        return next_token(row.histories[-1], self.vocab_size, banned)


def _fake_logprobs(token_id: int, num_logprobs: int, vocab_size: int) -> common_pb2.Logprobs:
    """The chosen token as the most probable, its successors as the alternatives."""
    token_ids = [token_id, *((token_id + i) % vocab_size for i in range(num_logprobs))]
    return common_pb2.Logprobs(
        entries_per_token=num_logprobs + 1,
        token_ids=token_ids,
        logprobs=[-1.0, *(-1.0 - i for i in range(num_logprobs))],
        ranks=[1],
    )


def fake_prompt_logprobs(token_ids: Sequence[int], num_top: int, vocab_size: int) -> common_pb2.Logprobs:
    """Returns `_fake_logprobs` of all tokens of a prompt but the first."""
    message = common_pb2.Logprobs(entries_per_token=1 + num_top)
    for token_id in token_ids[1:]:
        of_token = _fake_logprobs(token_id, num_top, vocab_size)
        message.token_ids.extend(of_token.token_ids)
        message.logprobs.extend(of_token.logprobs)
        message.ranks.extend(of_token.ranks)
    return message


class FakeExecutorServicer(executor_pb2_grpc.ExecutorServiceServicer):
    """A FakeExecutor behind the gRPC contract.

    step_seconds is the device time of a step. While `loaded` is clear, calls wait. `fail_after(n)` breaks the stream as
    a dying process would.
    """

    def __init__(
        self,
        make_executor: Callable[[], FakeExecutor] = FakeExecutor,
        *,
        model: str = "fake",
        max_model_len: int = 4096,
        max_logprobs: int = 20,
        step_seconds: float = 0.0,
        whole_prompts: bool = False,
        kind: common_pb2.ModelKind = common_pb2.MODEL_KIND_UNSPECIFIED,
        weights_version: str = "",
        checkpoints: Mapping[str, str] | None = None,
        adapters: Mapping[str, str] | None = None,
        adapter_files: MutableMapping[str, str] | None = None,
    ) -> None:
        """kind: what the model is served for; a vector has one number. weights_version: of the weights that it starts
        with. checkpoints: which others can be loaded, with digests.

        adapters: names of those that it starts with, with digests. adapter_files: paths of those that can be loaded,
        with digests; a digest "bad" is refused. --lora-dir is /ad."""
        self.adapter_files = {} if adapter_files is None else adapter_files
        self.given_adapters = {
            (name, digest): common_pb2.Adapter(name=name, path=f"/{name}", digest=digest, rank=8)
            for name, digest in (adapters or {}).items()
        }
        self.has_been_asked_for_adapter, self.has_unloaded = asyncio.Event(), asyncio.Event()
        self.adapter_loads: list[common_pb2.Adapter] = []  # that it was asked for
        self.read_adapters = set[tuple[str, str]]()  # paths and digests
        self.hidden_adapters = set[tuple[str, str]]()  # paths and digests
        self.files_changed_at = 0  # Unix time, ns, of those of all adapters
        self.may_load_adapter = asyncio.Event()
        self.may_load_adapter.set()
        self.weights = executor_pb2.Weights(version=weights_version, digest=weights_version, model=model)
        self.checkpoints = {} if checkpoints is None else checkpoints
        self.loaded_weights: executor_pb2.Weights | None = None
        self.num_loads = 0
        self.sleep = executor_pb2.SleepState()
        self.sleep_decision: executor_pb2.SleepDecision | None = None  # the last one that it was told
        self.sleeps: list[int] = []  # levels that it was asked for; 0: to wake
        self.wake_problem = ""  # why it cannot wake
        self.may_sleep, self.may_wake = asyncio.Event(), asyncio.Event()
        self.may_sleep.set()
        self.may_wake.set()
        self.may_load, self.may_install = asyncio.Event(), asyncio.Event()
        self.sources: dict[str, FakeTier] = {}  # what other executors have, by address
        self.may_forget = asyncio.Event()
        self.may_forget.set()
        self.may_load.set()
        self.may_install.set()
        self.incarnation = random.getrandbits(63)
        self.executor = make_executor()
        self.executor.weights_version = weights_version
        self.executor.loaded_adapters |= set(self.adapters)
        self.step_seconds = step_seconds
        self.whole_prompts = whole_prompts
        self.num_steps = 0
        self.num_streams = 0
        self.terms: list[int] = []  # of the streams
        self.num_descriptions = 0
        self.asked = asyncio.Event()
        self.grammars: list[common_pb2.Grammar] = []  # that it was asked to compile
        self.released = asyncio.Event()
        self.loaded = asyncio.Event()
        self.loaded.set()
        self.new_requests: list[executor_pb2.NewRequest] = []
        self._model_info = common_pb2.ModelInfo(
            model=model,
            max_model_len=max_model_len,
            vocab_size=self.executor.vocab_size,
            eos_token_ids=sorted(self.executor.eos_token_ids),
            max_logprobs=max_logprobs,
            kind=kind,
            vector_size=1,
        )
        self._stream: asyncio.Task[Any] | None = None
        self._steps_until_failure: int | None = None
        self._step_id_error = 0

    def fail_after(self, num_steps: int) -> None:
        """Makes the stream break, with UNAVAILABLE, after so many more steps."""
        self._steps_until_failure = num_steps

    def answer_wrongly(self) -> None:
        """Makes the next result name a step that is not in flight."""
        self._step_id_error = 1000

    def _take_step_id_error(self) -> int:
        error, self._step_id_error = self._step_id_error, 0
        return error

    async def Describe(self, request: Any, context: grpc.aio.ServicerContext) -> executor_pb2.DescribeResponse:
        self.num_descriptions += 1
        self.asked.set()
        await self.loaded.wait()
        return executor_pb2.DescribeResponse(
            incarnation=self.incarnation,
            model_info=self._model_info,
            kv_groups=[
                executor_pb2.KVGroup(num_blocks=group.num_blocks, window=group.window, state_tokens=group.state_tokens)
                for group in self.executor.kv_groups
            ],
            block_size=self.executor.block_size,
            max_num_seqs=self.executor.max_num_seqs,
            max_num_batched_tokens=self.executor.max_num_batched_tokens,
            max_draft_tokens=self.executor.max_draft_tokens,
            pipeline_stages=self.executor.pipeline_stages,
            whole_prompts=self.whole_prompts,
            device="fake",
            dtype="none",
            weights=self.weights,
            max_adapters=self.executor.max_adapters,
            adapters=self.given_adapters.values(),
            adapter_directory="/ad",
            kv_tiers=[executor_pb2.KVTier(kind=executor_pb2.KV_TIER_KIND_DISK)] if self.executor.tier else [],
            found_adapters=self._found_adapters(),
            role=_ROLES[self.executor.role],
            kv_format=f"{self.executor.kv_format} {self.weights.digest}",
            sleep=self.sleep if self.sleep.level else None,
            sleep_decision=self.sleep_decision or executor_pb2.SleepDecision(state=self.sleep),
            reset_at=self.executor.tier.reset_at if self.executor.tier else 0,
        )

    @property
    def adapters(self) -> dict[str, common_pb2.Adapter]:
        """The adapters that it was given, by digest."""
        return {digest: adapter for (_, digest), adapter in self.given_adapters.items()}

    def _found_adapters(self) -> Iterator[executor_pb2.FoundAdapter]:
        for path, digest in self.adapter_files.items():
            if path.startswith("/ad/") and (path, digest) not in self.hidden_adapters:
                is_read = digest in self.adapters
                problem = "it is for another model" if digest == "bad" and (path, digest) in self.read_adapters else ""
                name = path.removeprefix("/ad/")
                yield executor_pb2.FoundAdapter(
                    name=name,
                    path=path,
                    digest=digest if is_read else "",
                    problem=problem,
                    changed_at=self.files_changed_at,
                )

    async def LoadAdapter(
        self, request: executor_pb2.LoadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.LoadAdapterResponse:
        wanted = request.adapter
        self.adapter_loads.append(wanted)
        self.has_been_asked_for_adapter.set()
        await self.may_load_adapter.wait()
        if wanted.digest in self.adapters:  # it is in memory
            self.given_adapters[wanted.name, wanted.digest] = wanted
            return executor_pb2.LoadAdapterResponse(adapter=wanted)
        digest = self.adapter_files.get(wanted.path)
        if digest is None:
            raise rpc.RpcError(grpc.StatusCode.NOT_FOUND, f"nothing is at {wanted.path}")
        self.read_adapters.add((wanted.path, digest))
        if digest == "bad":
            raise rpc.RpcError(grpc.StatusCode.INVALID_ARGUMENT, "it is for another model")
        if wanted.digest not in ("", digest):
            raise rpc.RpcError(grpc.StatusCode.FAILED_PRECONDITION, f"{wanted.path} has other contents now")
        found = common_pb2.Adapter(name=wanted.name, path=wanted.path, digest=digest, rank=8, number=wanted.number)
        self.given_adapters[wanted.name, digest] = found
        self.hidden_adapters.discard((wanted.path, digest))
        self.executor.loaded_adapters.add(digest)
        return executor_pb2.LoadAdapterResponse(adapter=found)

    async def UnloadAdapter(
        self, request: executor_pb2.UnloadAdapterRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.UnloadAdapterResponse:
        if not request.digest:
            for key in [key for key in self.given_adapters if key[0] == request.name]:
                adapter = self.given_adapters.pop(key)
                if adapter.digest not in self.adapters:
                    adapter.name = ""
                    self.given_adapters["", adapter.digest] = adapter
            path = f"/ad/{request.name}"
            self.hidden_adapters.add((path, self.adapter_files.get(path, "")))
            return executor_pb2.UnloadAdapterResponse()
        for name, digest in list(self.given_adapters):
            if digest == request.digest and request.name in ("", name):
                del self.given_adapters[name, digest]
        if request.digest not in self.adapters:
            self.executor.loaded_adapters.discard(request.digest)
        self.has_unloaded.set()
        return executor_pb2.UnloadAdapterResponse()

    async def LoadWeights(
        self, request: executor_pb2.LoadWeightsRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.LoadWeightsResponse:
        self.num_loads += 1
        await self.may_load.wait()
        wanted, digest = request.weights, self.checkpoints.get(request.weights.model)
        if digest is None:
            raise rpc.RpcError(grpc.StatusCode.INVALID_ARGUMENT, f"the fake has no weights {wanted.model}")
        if wanted.digest not in ("", digest):
            raise rpc.RpcError(grpc.StatusCode.FAILED_PRECONDITION, "there are other weights now")
        self.loaded_weights = wanted
        wanted.digest, wanted.version = digest, wanted.version or digest
        return executor_pb2.LoadWeightsResponse(weights=wanted)

    async def InstallWeights(
        self, request: executor_pb2.InstallWeightsRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.InstallWeightsResponse:
        await self.may_install.wait()
        assert request.weights == self.loaded_weights, "other weights were loaded"
        is_open = self._stream is not None and not self._stream.done()
        assert not (is_open and self.executor.rows), "requests run"
        self.weights, self.loaded_weights = request.weights, None
        self.executor.weights_version = request.weights.version
        return executor_pb2.InstallWeightsResponse()

    async def DropWeights(
        self, request: executor_pb2.DropWeightsRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.DropWeightsResponse:
        self.loaded_weights = None
        return executor_pb2.DropWeightsResponse()

    async def Sleep(
        self, request: executor_pb2.SleepRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.SleepResponse:
        self.sleeps.append(request.state.level)
        self.sleep_decision = executor_pb2.SleepDecision(state=request.state, decided_at=request.decided_at)
        await self.may_sleep.wait()
        self.sleep = request.state
        return executor_pb2.SleepResponse()

    async def Wake(
        self, request: executor_pb2.WakeRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.WakeResponse:
        self.sleeps.append(0)
        self.sleep_decision = executor_pb2.SleepDecision(decided_at=request.decided_at)
        await self.may_wake.wait()
        if self.wake_problem:
            raise rpc.RpcError(grpc.StatusCode.FAILED_PRECONDITION, f"the model cannot be woken: {self.wake_problem}")
        self.sleep = executor_pb2.SleepState()
        return executor_pb2.WakeResponse()

    async def CompileGrammar(
        self, request: executor_pb2.CompileGrammarRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.CompileGrammarResponse:
        """Takes all but the regex "refused"; one that is "slow" waits until it is released."""
        self.grammars.append(request.grammar)
        if request.grammar.regex == "refused":
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "regex: refused")
        if request.grammar.regex == "slow":
            await self.released.wait()
        return executor_pb2.CompileGrammarResponse()

    async def Execute(
        self, request_iterator: AsyncIterator[executor_pb2.StepRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[executor_pb2.StepResult]:
        await self.loaded.wait()
        opening = await anext(request_iterator)
        assert opening.step_id == 0, "a stream begins with its opening message"
        assert not self.sleep.level, "it sleeps"
        current = asyncio.current_task()
        if self._stream is not None and self._stream is not current:
            self._stream.cancel()
        self._stream = current
        self.num_streams += 1
        self.executor.reset()
        self.terms.append(opening.term)
        yield executor_pb2.StepResult()
        idle_since: float | None = None
        async for step in request_iterator:
            idle_ns = None if idle_since is None else int((time.monotonic() - idle_since) * 1e9)
            step_seconds = self.step_seconds  # what this one takes, whatever a test sets meanwhile
            if step_seconds:
                await asyncio.sleep(step_seconds)
            if self._steps_until_failure is not None:
                self._steps_until_failure -= 1
                if self._steps_until_failure < 0:
                    self._steps_until_failure = None
                    raise rpc.RpcError(grpc.StatusCode.UNAVAILABLE, "the fake executor is set to fail")
            self.new_requests.extend(step.new_requests)
            result = self.executor.execute(step)
            self.num_steps += 1
            idle_since = time.monotonic()
            yield executor_pb2.StepResult(
                step_id=result.step_id + self._take_step_id_error(),
                request_ids=result.request_ids,
                num_tokens=result.num_tokens,
                num_drafted=result.num_drafted,
                token_ids=result.token_ids,
                logprobs=result.logprobs,
                vectors=result.vectors,
                errors=result.errors,
                prompt_logprobs=result.prompt_logprobs,
                execute_ns=int(step_seconds * 1e9),
                idle_ns=idle_ns,
            )
            while self.executor.loads:
                yield executor_pb2.StepResult(step_id=-1, loaded=[self.executor.end_load(sources=self.sources)])

    async def WatchTiers(
        self, request: executor_pb2.WatchTiersRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[executor_pb2.TierChanges]:
        tier = self.executor.tier
        assert tier is not None
        num_told = len(tier.changes)
        for changes in tier.snapshot():
            yield changes
        while True:
            for changes in tier.changes[num_told:]:
                yield changes
                num_told += 1
            await asyncio.sleep(0.001)

    async def ForgetBlocks(
        self, request: executor_pb2.ForgetBlocksRequest, context: grpc.aio.ServicerContext
    ) -> executor_pb2.ForgetBlocksResponse:
        await self.may_forget.wait()
        assert self.executor.tier is not None
        self.executor.tier.forget(request.blocks or None)
        self.executor.tier.reset_at = max(request.reset_at, self.executor.tier.reset_at)
        return executor_pb2.ForgetBlocksResponse()


async def serve_fake_executor(address: str, servicer: FakeExecutorServicer) -> rpc.Server:
    """Serves a fake executor at an address such as "unix:/path", or several with commas; `await server.stop()` is its
    death."""
    server = rpc.Server(address.split(","), shutdown_timeout=0)
    name = executor_pb2.DESCRIPTOR.services_by_name["ExecutorService"].full_name
    server.add(servicer, executor_pb2_grpc.add_ExecutorServiceServicer_to_server, name)
    server.add_admin("executor")
    await server.start()
    await server.set_serving(True)
    return server
