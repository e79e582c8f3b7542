"""Builds one step: decodes first, then prompts, within the remaining tokens and time.

Several prompts share a step. A part of it is kept for the first prompt in order. The others take the rest before it,
the shortest first, and so do newly admitted prompts with fewer tokens to compute: short prompts overtake long ones,
which still make progress. Feature code does not belong here: the budget of prompts is in `step_budget.py`, the turns of
waiting requests are in `waiting.py`, and features join in `seams.py`.
"""

from collections.abc import Sequence

from pagewire.services.scheduler.core.policy import choose_victims, keeping_order
from pagewire.services.scheduler.core.rows import Rows
from pagewire.services.scheduler.core.seams import Shares, Taker
from pagewire.services.scheduler.core.step_budget import StepBudget
from pagewire.services.scheduler.core.waiting import Turns, WaitingQueue
from pagewire.services.scheduler.costs.prefill_budget import PrefillTarget
from pagewire.services.scheduler.values.blocks import NewBlocks
from pagewire.services.scheduler.values.request import Request, RequestStatus
from pagewire.services.scheduler.values.step import NewRequest, ScheduledStep

# A step stops searching the queue after it has left this many requests to other replicas.
_MAX_LEFT = 32


class StepBuilder:
    """Fills a step with running requests, and with waiting ones that fit."""

    def __init__(
        self,
        rows: Rows,
        shares: Shares,
        target: PrefillTarget,
        waiting: WaitingQueue,
        taker: Taker,
        in_flight: Sequence[ScheduledStep],
    ) -> None:
        """in_flight: the steps that were sent and have no result yet, oldest first."""
        self._rows = rows
        self._kv = rows.kv
        self._limits = rows.limits
        self._is_contended = shares.is_contended
        self._shares = shares
        self._is_suspect = rows.quarantine.is_suspect
        self._target = target
        self._waiting = waiting
        self._taker = taker
        self._takes = taker.takes
        self._in_flight = in_flight
        self._is_idle = not in_flight
        self._order = rows.running  # the tail is preempted first

    def fill(self, step: ScheduledStep) -> None:
        self._step = step
        self._rows.start_step()
        first = self._turns().next() if self._waiting else None
        if first is not None and self._rows.running:
            self._make_room_for(first)
        num_preemptions = self._rows.counts.num_preemptions
        prefills = self._run_decodes(self._is_suspect_due(first))
        if prefills or self._waiting:
            # When blocks are short, no other request gets any.
            self._run_prompts(prefills, may_admit=self._rows.counts.num_preemptions == num_preemptions)

    # -- decodes -----------------------------------------------------------------------------------------------------

    def _run_decodes(self, is_suspect_due: bool) -> list[Request]:
        """Schedules the requests that need one token, and preempts from the tail when blocks run out. Returns the other
        running requests, which are in prefill."""
        rows, kv, step, limits = self._rows, self._kv, self._step, self._limits
        if self._is_contended and not kv.has_free_blocks(len(rows.running)):
            self._order = keeping_order(rows.running)
        # The loop may pop from the tail while it runs: requests that it has not reached yet, or the present one.
        runners = rows.quarantine.runners(self._order, is_suspect_due, self._is_idle)
        runners = rows.cohorts.of_next_step(self._taker.staying(runners), self._in_flight)
        draft_budget = limits.draft_budget(len(runners))
        if draft_budget and (plan := rows.drafts.plan(runners)).is_empty:
            draft_budget = 0
        if draft_budget:
            step.draft_methods = plan.methods
        num_decodes = 0
        prefills: list[Request] = []
        for request in runners:
            num_tokens = len(request.token_ids) + request.num_output_placeholders
            if num_tokens - request.num_computed_tokens > 1:
                if request.status is RequestStatus.RUNNING:
                    prefills.append(request)
                continue
            if num_tokens >= request.max_num_tokens:
                continue  # its last token is in flight
            if draft_budget and (num_drafts := self._draft(request, min(plan.of(request), draft_budget))):
                draft_budget -= num_drafts
                num_decodes += 1 + num_drafts
                continue
            # Most have room for a token, which is checked without a call.
            has_room = request.num_computed_tokens < request.blocks.num_slots
            new_blocks = kv.no_blocks if has_room else self._slot_for(request)
            if new_blocks is None and not request.is_accepted:
                continue  # it releases blocks before its windows once that step is done
            while new_blocks is None and request.status is RequestStatus.RUNNING:
                self._preempt_tail()
                new_blocks = self._slot_for(request)
            if new_blocks is not None:
                self._run(request, 1, new_blocks)
                num_decodes += 1
        step.work.num_decodes = num_decodes
        return prefills

    def _slot_for(self, request: Request) -> NewBlocks | None:
        """Reserves a block for one token. Returns None if none is free, or if the request was preempted for one before
        it."""
        return self._kv.allocate_slots(request, 1) if request.status is RequestStatus.RUNNING else None

    def _draft(self, request: Request, wanted: int) -> int:
        """Schedules one token of a request and up to `wanted` drafts after it, as free blocks allow. Returns the number
        of drafts; 0: none is possible, and nothing was scheduled."""
        kv, step = self._kv, self._step
        max_gain = request.max_num_tokens - len(request.token_ids) - request.num_output_placeholders
        num_drafts = min(wanted, max_gain - 1)
        # No request loses blocks to a draft.
        if num_drafts <= 0 or not kv.has_free_blocks(len(self._rows.running) + num_drafts):
            return 0
        if request.status is not RequestStatus.RUNNING:
            return 0
        new_blocks = kv.allocate_slots(request, 1 + num_drafts)
        assert new_blocks is not None
        step.drafts_of[len(step.sampled)] = num_drafts
        self._run(request, 1, new_blocks)
        step.num_scheduled_tokens[-1] += num_drafts
        request.num_computed_tokens += num_drafts
        request.num_output_placeholders += num_drafts
        return num_drafts

    # -- prompts -----------------------------------------------------------------------------------------------------

    def _run_prompts(self, prefills: list[Request], may_admit: bool) -> None:
        # Requests without a row would gain nothing from a longer step.
        num_short_waiting = min(self._waiting.num_short, self._rows.num_open)
        self._budget = StepBudget(
            self._step,
            self._rows,
            self._shares,
            self._target,
            num_short_prompts=num_short_waiting + sum(not request.is_long for request in prefills),
            is_alone=len(self._rows.running) + len(self._waiting) == 1,
        )
        self._prefilling = {request for request in prefills if request.status is RequestStatus.RUNNING}
        if prefills and not self._rows.lacks_blocks:
            # New requests would take the blocks that a running prompt waits for.
            first, *others = prefills
            kept = self._budget.kept_for(first)
            for request in sorted(others, key=self._urgency):
                if not self._continue(request, kept):
                    return
            if may_admit and self._waiting:
                self._admit(kept, first)
            prefills = [first]
        self._rows.lacks_blocks = False
        for request in prefills:
            if not self._continue(request):
                return
        if may_admit and self._waiting:
            self._admit()

    def _urgency(self, request: Request) -> tuple[float, int]:
        served = request.account.served if self._is_contended else 0.0
        return served, len(request.token_ids) - request.num_computed_tokens

    def _continue(self, request: Request, kept: float = 0.0) -> bool:
        """Computes more of a running prompt. Returns False if it waits for blocks, which no other request may take
        then."""
        if request.status is not RequestStatus.RUNNING:
            return True  # preempted for another one
        start = request.num_computed_tokens
        if (num_wanted := self._budget.chunk(request, start, kept)) > 0:
            num_tokens = self._fitting(request, num_wanted)
            if num_tokens == 0:
                self._rows.lacks_blocks = True
                return False
            self._run_prompt(request, num_tokens)
        return True

    def _fitting(self, request: Request, num_tokens: int) -> int:
        """Returns how many of `num_tokens` tokens of a running prompt have blocks; 0 if other requests hold too many,
        as a group with a window has blocks for the next chunk only. Preempts the tail if no running request is going to
        release any."""
        num_fitting = self._kv.num_allocatable_tokens(request, num_tokens)
        while num_fitting == 0 and not self._step.request_ids and self._is_idle:
            self._preempt_tail()
            if request.status is not RequestStatus.RUNNING:
                return 0
            num_fitting = self._kv.num_allocatable_tokens(request, num_tokens)
        return num_fitting

    # -- admission ---------------------------------------------------------------------------------------------------

    def _turns(self) -> Turns:
        return Turns(self._waiting, self._limits.max_running_per_tenant, self._suits, self._taker.kinds)

    def _suits(self, request: Request) -> bool:
        if self._taker.is_anothers(request) or not self._rows.has_weights_for(request):
            return False
        if not (has_slot := self._rows.slots.take(request)):
            self._rows.slots.reserve(request)
        return has_slot

    def _admit(self, kept: float = 0.0, first: Request | None = None) -> None:
        """Admits waiting requests in their turns until one does not fit. A request that waits for blocks of another
        request is passed over, but keeps a row free. A request of another replica is passed over, too.

        first: a running prompt, which only requests with fewer tokens to compute may overtake.
        """
        rows, kv, step = self._rows, self._kv, self._step
        turns, num_passed, num_left = self._turns(), 0, 0
        while num_passed < rows.num_open and not self._budget.is_spent and step.takes_more:
            request = turns.next()
            if request is None:
                return
            if kv.keeps_waiting(request):
                turns.pass_over(request)
                num_passed += 1
                continue
            if not rows.quarantine.admits(request, is_alone=self._is_idle and not step.request_ids):
                return
            computed = rows.find_room(request)
            if computed is None:
                return
            if not self._takes(request):
                turns.pass_over(request)
                num_left += 1
                if num_left == _MAX_LEFT:
                    return
                continue
            # Otherwise a suspect, for which the others pause, would wait for them forever.
            if not self._is_suspect(request) and kv.awaits(request, computed):
                turns.pass_over(request)
                num_passed += 1
                continue
            missing = request.num_tokens - computed.num_tokens
            if not self._is_suspect(request) and self._waits_for_long_ones(missing, self._prefilling):
                turns.close(request)
                continue
            if first is not None and not self._overtakes(request, missing, first):
                return
            num_tokens = self._budget.chunk(request, computed.num_tokens, kept)
            if num_tokens == 0 or (num_tokens < missing and not self._takes_partial(request)):
                return
            self._waiting.remove(request)
            request.is_long = missing > self._limits.long_prompt_tokens
            rows.enter(request, computed)
            step.admitted.append(request)
            step.num_image_bytes += request.images.num_bytes
            step.new_requests.append(NewRequest.of(request))
            self._run_prompt(request, num_tokens)

    def _waits_for_long_ones(self, missing: int, prefilling: set[Request]) -> bool:
        """Returns whether a prompt with `missing` tokens to compute is long while the limit of running long prompts is
        reached."""
        limits, num_longs = self._limits, sum(request.is_long for request in prefilling)
        return missing > limits.long_prompt_tokens and num_longs >= limits.max_long_partial_prefills

    def _takes_partial(self, request: Request) -> bool:
        return len(self._prefilling) < self._limits.max_num_partial_prefills or self._is_suspect(request)

    def _overtakes(self, request: Request, missing: int, first: Request) -> bool:
        """Returns whether a waiting request is scheduled before a running prompt."""
        remaining = len(first.token_ids) - first.num_computed_tokens
        if self._is_contended and request.account is not first.account:
            return (request.account.served, missing) < (first.account.served, remaining)
        return missing < remaining

    def _is_suspect_due(self, first: Request | None) -> bool:
        """Returns whether a suspect is first in line, and enters this replica as soon as it would be alone."""
        if first is None or not self._is_suspect(first) or self._rows.quarantine.is_closed:
            return False
        return self._rows.num_open > 0 and self._rows.find_room(first) is not None and self._takes(first)

    # -- preemption --------------------------------------------------------------------------------------------------

    def _make_room_for(self, request: Request) -> None:
        """Preempts running requests if the first waiting one lacks a row or blocks and gains enough by it: those of
        lower priority, and those of other tenants if its own has none running. Never happens under fcfs with one
        tenant, as running requests came first."""
        rows, kv = self._rows, self._kv
        victims = choose_victims(request, rows.running, self._is_contended, rows.num_open, kv)
        if not victims or rows.quarantine.is_closed or not self._takes(request):
            return
        computed, prefilling = kv.get_computed_blocks(request), {one for one in rows.running if one.is_prefilling}
        waits = self._waits_for_long_ones(request.num_tokens - computed.num_tokens, prefilling.difference(victims))
        for victim in () if waits or kv.awaits(request, computed) else victims:
            rows.preempt(victim, self._waiting)

    def _preempt_tail(self) -> None:
        victim = self._order[-1]
        if self._order is not self._rows.running:
            self._order.pop()
        self._rows.preempt(victim, self._waiting)

    # -- running -----------------------------------------------------------------------------------------------------

    def _run(self, request: Request, num_tokens: int, new_blocks: NewBlocks) -> None:
        """Adds a request to the step, and advances its state as if the step were done."""
        step = self._step
        step.request_ids.append(request.request_id)
        step.num_scheduled_tokens.append(num_tokens)
        step.num_new_blocks.extend(new_blocks.counts)
        if new_blocks.ids:
            step.new_block_ids += new_blocks.ids
        request.num_computed_tokens += num_tokens
        if request.num_computed_tokens == len(request.token_ids) + request.num_output_placeholders:
            request.num_output_placeholders += 1
            if request.yields_vector:
                step.yielding.append((request, request.epoch))
            else:
                step.sampled.append(request)
                step.epochs.append(request.epoch)
        if request.num_computed_tokens >= request.blocks.num_tokens_to_cache:
            self._kv.cache_blocks(request)

    def _run_prompt(self, request: Request, num_tokens: int) -> None:
        """Adds tokens of a prompt, for which there are blocks and time, to the step."""
        new_blocks = self._kv.allocate_slots(request, num_tokens)
        assert new_blocks is not None
        self._budget.spend(request, request.num_computed_tokens, num_tokens)
        self._shares.charge_prompt(request, request.num_computed_tokens + num_tokens)
        self._run(request, num_tokens, new_blocks)
        if request.num_computed_tokens < len(request.token_ids):
            self._prefilling.add(request)
        else:
            self._prefilling.discard(request)
