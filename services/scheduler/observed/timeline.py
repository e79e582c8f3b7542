"""The timeline of a request: phases without gaps from its arrival to its end, named after what the request waits
for."""

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from pagewire.services.scheduler.values.request import Request
from pagewire.telemetry import semconv
from pagewire.telemetry.spans import Span
from pagewire.v1.admin_pb2 import RequestAccount

# From the start of a request: its grammar is compiled, its adapter is loaded.
GRAMMAR, ADAPTER = "grammar", "adapter"
QUEUE, PREFILL, DECODE = "queue", "prefill", "decode"
PREEMPTED, RECOVERY = "preempted", "recovery"
HANDOVER = "handover"  # from the executor that computed the prompt to the one that decodes
LOAD = "load"  # of its KV blocks from a tier; then it waits as before
# The phases in which a request holds a row.
_RUNNING = frozenset({PREFILL, DECODE})
_METHOD = "pagewire.v1.SchedulerService/Generate"


@dataclass(slots=True)
class Chunk:
    """A part of a prompt that one step computes. Times are of time.monotonic()."""

    start: float
    num_tokens: int
    end: float | None = None  # None until the result arrives


@dataclass(slots=True)
class Phase:
    name: str
    start: float
    executor: str = ""
    num_tokens: int = 0  # output tokens at the start of the phase
    chunks: list[Chunk] = field(default_factory=list)


class Timeline:
    """The phases of one request. Costs nothing per token: an entry per phase, and one per chunk of a prompt."""

    __slots__ = ("end", "is_prefilling", "phases")

    def __init__(self, name: str, now: float) -> None:
        self.phases = [Phase(name, now)]
        self.is_prefilling = False
        self.end = now

    @property
    def runs(self) -> bool:
        return self.phases[-1].name in _RUNNING

    def enter(self, name: str, now: float, executor: str = "", num_output_tokens: int = 0) -> None:
        self.phases.append(Phase(name, now, executor or self._executor(name), num_output_tokens))
        self.is_prefilling = name == PREFILL

    def on_load(self, now: float, num_output_tokens: int, *, begins: bool) -> None:
        """Takes in that a request that waits begins to wait for a load, or ends that."""
        if begins and not self.runs:
            self.enter(LOAD, now, num_output_tokens=num_output_tokens)
        elif not begins and self.phases[-1].name == LOAD:
            self.enter(self.phases[-2].name, now, num_output_tokens=num_output_tokens)

    def _executor(self, name: str) -> str:
        return self.phases[-1].executor if name == DECODE else ""

    def add_chunk(self, now: float, num_tokens: int) -> Chunk:
        """Adds a chunk of `num_tokens` tokens, which is sent now, and returns it."""
        chunk = Chunk(now, num_tokens)
        self.phases[-1].chunks.append(chunk)
        return chunk

    def close(self, now: float, num_output_tokens: int) -> None:
        self.end = now
        self.phases.append(Phase("", now, num_tokens=num_output_tokens))

    def intervals(self, so_far: Phase | None = None) -> list[tuple[Phase, float, int]]:
        """Returns each phase, its end, and the number of tokens that it computed.

        so_far: the phase that closes a timeline that is still open.
        """
        phases = self.phases if so_far is None else [*self.phases, so_far]
        return [
            (
                phase,
                after.start,
                sum(chunk.num_tokens for chunk in phase.chunks)
                if phase.name == PREFILL
                else after.num_tokens - phase.num_tokens,
            )
            for phase, after in pairwise(phases)
        ]


def end_span(span: Span, request: Request, timeline: Timeline, code: str, message: str | None) -> None:
    """Ends the span of a request, with a child span for each phase. code: that of its gRPC status."""
    if not span.is_recorded:
        span.end()
        return
    for phase, end, num_tokens in timeline.intervals():
        attributes = {"pagewire.executor": phase.executor or None, "pagewire.tokens": num_tokens or None}
        if phase.name in (PREEMPTED, RECOVERY):
            span.event(phase.name, phase.start)
        span.child(phase.name, phase.start, end, attributes)
        for chunk in phase.chunks:
            span.child("prefill chunk", chunk.start, chunk.end or end, {"pagewire.tokens": chunk.num_tokens})
    fault = code in semconv.FAULTS_OF_SERVERS
    assert request.finish_reason is not None
    of_request: dict[str, Any] = {
        semconv.RPC_SYSTEM: "grpc",
        semconv.RPC_METHOD: _METHOD,
        semconv.RPC_STATUS: code,
        semconv.ERROR_TYPE: code if fault else None,
        semconv.RESPONSE_FINISH_REASONS: [request.finish_reason.name.lower()],
        semconv.USAGE_INPUT_TOKENS: request.num_prompt_tokens,
        semconv.USAGE_OUTPUT_TOKENS: request.num_output_tokens,
        semconv.USAGE_CACHED_TOKENS: request.num_cached_tokens or 0,
        "pagewire.preemptions": request.num_preemptions,
    }
    span.end(of_request, error=message if fault else None, at=timeline.end)


def account(
    external_id: str,
    request: Request,
    timeline: Timeline,
    trace_id: str,
    first_token: float | None,
    now: float | None = None,
) -> RequestAccount:
    """Returns where the time of a request went.

    Args:
        first_token: the time of its first token, of time.monotonic().
        now: the present time, for a request that has not ended.
    """
    start = timeline.phases[0].start
    so_far = None if now is None else Phase("", now, num_tokens=request.num_output_tokens)
    result = RequestAccount(
        service="scheduler",
        request_id=external_id,
        trace_id=trace_id,
        seconds=(timeline.end if now is None else now) - start,
        finish_reason=request.finish_reason.name.lower() if request.finish_reason is not None else "",
        first_token_seconds=first_token - start if first_token is not None else 0.0,
        is_running=now is not None,
    )
    result.usage.prompt_tokens = request.num_prompt_tokens
    result.usage.cached_tokens = request.num_cached_tokens or 0
    result.usage.completion_tokens = request.num_output_tokens
    for phase, end, num_tokens in timeline.intervals(so_far):
        result.phases.add(
            name=phase.name,
            start_seconds=phase.start - start,
            seconds=end - phase.start,
            num_tokens=num_tokens,
            num_chunks=len(phase.chunks),
            executor=phase.executor,
        )
    return result
