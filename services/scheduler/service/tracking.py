"""Updates the timelines of live requests when steps are decided, sent, answered and lost."""

import logging
import time
from collections.abc import Mapping

from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.observed.timeline import PREEMPTED, PREFILL, RECOVERY, Chunk
from pagewire.services.scheduler.service.live_request import LiveRequest
from pagewire.services.scheduler.values.step import ScheduledStep

logger = logging.getLogger(__name__)

# Seconds in which at most one preemption is logged: a full cache preempts several requests in a second.
_PREEMPTION_LOG_S = 10.0


class Tracking:
    def __init__(self, live: Mapping[int, LiveRequest]) -> None:
        """live: the live requests by id, a live view."""
        self._live = live
        self._chunks: dict[tuple[int, int], list[Chunk]] = {}  # those of steps in flight, by replica and step
        self._preemptions: dict[int, int] = {}  # already counted, by replica id
        self._num_preemptions = 0  # of all replicas
        self._next_log_time = 0.0  # of a preemption

    def on_step(self, replica: Replica, step: ScheduledStep) -> None:
        """Takes in a step that is about to be sent."""
        now = time.monotonic()
        for request in step.admitted:
            self._live[request.request_id].timeline.enter(PREFILL, now, replica.name, request.num_output_tokens)
        if max(step.num_scheduled_tokens, default=1) == 1:
            return
        chunks = []
        for request_id, num_tokens in zip(step.request_ids, step.num_scheduled_tokens, strict=True):
            if num_tokens > 1 and (live := self._live.get(request_id)) is not None and live.timeline.is_prefilling:
                # If a step is sent before the first token is known, tokens beyond the known ones are drafts.
                request = live.request
                known = len(request.token_ids) - (request.num_computed_tokens - num_tokens)
                if known > 0:
                    chunks.append(live.timeline.add_chunk(now, min(num_tokens, known)))
        if chunks:
            self._chunks[replica.replica_id, step.step_id] = chunks

    def on_result(self, replica: Replica, step_id: int) -> None:
        if self._chunks and (chunks := self._chunks.pop((replica.replica_id, step_id), None)) is not None:
            now = time.monotonic()
            for chunk in chunks:
                chunk.end = now

    def on_decision(self, replica: Replica) -> None:
        """Takes in a decision, which may have preempted requests."""
        num_new = replica.counts.num_preemptions - self._preemptions.get(replica.replica_id, 0)
        if num_new:
            self._preemptions[replica.replica_id] = replica.counts.num_preemptions
            self._num_preemptions += num_new
            self._stop(PREEMPTED)
            if (now := time.monotonic()) >= self._next_log_time:
                self._next_log_time = now + _PREEMPTION_LOG_S
                self._log_preemption(replica)

    def _log_preemption(self, replica: Replica) -> None:
        logger.warning(
            "a request on %s was preempted: other requests needed its KV blocks, and it is computed again when there"
            " is room; if this happens often, give it more blocks (--kv-cache-memory-bytes, --gpu-memory-utilization,"
            " --kv-cache-dtype fp8) or run fewer requests (--max-num-seqs); total_cumulative_preemption_cnt=%d",
            replica.name,
            self._num_preemptions,
        )

    def on_lost(self, replica: Replica) -> None:
        """Takes in the loss of an executor; its requests wait to run on any executor."""
        for key in [key for key in self._chunks if key[0] == replica.replica_id]:
            del self._chunks[key]
        self._stop(RECOVERY)

    def on_removed(self, replica: Replica) -> None:
        self._preemptions.pop(replica.replica_id, None)

    def _stop(self, name: str) -> None:
        """Enters this phase for the requests that no longer run."""
        now = time.monotonic()
        for live in self._live.values():
            request = live.request
            if live.timeline.runs and request.replica_id is None and not request.is_finished:
                live.timeline.enter(name, now, num_output_tokens=request.num_output_tokens)
