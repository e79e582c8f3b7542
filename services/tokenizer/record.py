"""The observation of one generation: its span, its metrics, and where its time went."""

import time
from weakref import WeakSet

import grpc

from pagewire.services.tokenizer import stats
from pagewire.services.tokenizer.received import Received
from pagewire.telemetry import semconv
from pagewire.telemetry.recent import Accounts
from pagewire.telemetry.spans import Span
from pagewire.telemetry.trace import Trace
from pagewire.v1 import common_pb2
from pagewire.v1.admin_pb2 import RequestAccount
from pagewire.wire.rpc import RpcError

_METHOD = "pagewire.v1.InferenceService/Generate"
_unended: "WeakSet[Record]" = WeakSet()
ACCOUNTS = Accounts(lambda: list(_unended))


class Record:
    """Observes a request from its arrival, which is now, to its end."""

    def __init__(self, received: Received, model: str) -> None:
        """model: the name for metrics; clients may send any, and each would add a time series."""
        self.arrived = time.monotonic()
        request = received.request
        self._operation = "chat" if request.WhichOneof("prompt") == "chat" else "text_completion"
        self._model = model
        self.span = Span(f"{self._operation} {self._model}", Trace.of(received.context), serves=True)
        self._request_id, self._tenant = request.request_id, received.context.tenant
        self._submitted: float | None = None
        self._first_output = self._last_output = 0.0
        self._detokenized = 0.0  # seconds
        _unended.add(self)

    def on_submitted(self) -> None:
        """Notes that the request goes to the scheduler."""
        self._submitted = time.monotonic()

    def on_tokens(self) -> float:
        """Notes that tokens have arrived; returns the time, for `on_text`."""
        now = time.monotonic()
        if self._last_output:
            stats.INTER_TOKEN_LATENCY.observe(now - self._last_output)
            stats.RECENT_INTER_TOKEN.observe(now, now - self._last_output)
        else:
            self._first_output = now
            stats.TIME_TO_FIRST_TOKEN.observe(now - self.arrived, self.span.exemplar)
            stats.GENAI_TIME_TO_FIRST_TOKEN.labels(*self._labels).observe(now - self.arrived, self.span.exemplar)
            stats.RECENT_FIRST_TOKENS.observe(now, now - self.arrived)
            self.span.event("first token", now)
        self._last_output = now
        return now

    def on_text(self, began: float) -> None:
        """Notes that tokens that arrived at `began` have become text."""
        self._detokenized += time.monotonic() - began

    @property
    def _labels(self) -> tuple[str, ...]:
        return self._operation, semconv.PROVIDER, self._model, self._model

    def on_end(self, finish_reason: common_pb2.FinishReason, usage: common_pb2.Usage) -> None:
        now = time.monotonic()
        exemplar = self.span.exemplar
        stats.E2E_LATENCY.observe(now - self.arrived, exemplar)
        if usage.completion_tokens > 1 and self._first_output:
            per_token = (self._last_output - self._first_output) / (usage.completion_tokens - 1)
            stats.TIME_PER_OUTPUT_TOKEN.observe(per_token, exemplar)
            stats.GENAI_TIME_PER_OUTPUT_TOKEN.labels(*self._labels).observe(per_token, exemplar)
        self._close(now, "OK", None, _name(finish_reason), usage)

    def on_error(self, error: BaseException) -> None:
        """Ends it: the request was refused, or failed."""
        code = error.code if isinstance(error, RpcError) else grpc.StatusCode.INTERNAL
        self._close(time.monotonic(), code.name, str(error) or type(error).__name__, "error", None)

    def on_cancelled(self) -> None:
        """Ends it: the client does not want the rest."""
        self._close(time.monotonic(), "CANCELLED", None, "abort", None)

    def _close(
        self, now: float, code: str, message: str | None, finish_reason: str, usage: common_pb2.Usage | None
    ) -> None:
        error_type = code if code in semconv.FAULTS_OF_SERVERS else None
        stats.GENAI_REQUEST_DURATION.labels(*self._labels, error_type or "").observe(
            now - self.arrived, self.span.exemplar
        )
        usage = usage or common_pb2.Usage()
        _unended.discard(self)
        if self._request_id:
            ACCOUNTS.add(self._tenant, self._account(now, finish_reason, usage))
        if not self.span.is_recorded:
            self.span.end()
            return
        if self._first_output:
            busy = {"pagewire.busy_seconds": self._detokenized}
            self.span.child("detokenize", self._first_output, self._last_output, busy)
        attributes = {
            semconv.RPC_SYSTEM: "grpc",
            semconv.RPC_METHOD: _METHOD,
            semconv.RPC_STATUS: code,
            semconv.ERROR_TYPE: error_type,
            semconv.OPERATION_NAME: self._operation,
            semconv.PROVIDER_NAME: semconv.PROVIDER,
            semconv.REQUEST_MODEL: self._model,
            semconv.RESPONSE_MODEL: self._model,
            "pagewire.client_request_id": self._request_id or None,
            semconv.RESPONSE_FINISH_REASONS: [finish_reason],
            semconv.RESPONSE_TIME_TO_FIRST_CHUNK: self._first_output - self.arrived if self._first_output else None,
            semconv.USAGE_INPUT_TOKENS: usage.prompt_tokens or None,
            semconv.USAGE_OUTPUT_TOKENS: usage.completion_tokens,
            semconv.USAGE_CACHED_TOKENS: usage.cached_tokens,
            semconv.USAGE_REASONING_TOKENS: usage.reasoning_tokens or None,
        }
        self.span.end(attributes, error=message if error_type else None, at=now)

    @property
    def account_owner(self) -> tuple[str, str]:
        return self._tenant, self._request_id

    def account(self) -> RequestAccount:
        """Returns the account of a request that has not ended. The scheduler adds the tokens."""
        account = self._account(time.monotonic(), "", common_pb2.Usage())
        account.is_running = True
        return account

    def _account(self, now: float, finish_reason: str, usage: common_pb2.Usage) -> RequestAccount:
        submitted = now if self._submitted is None else self._submitted
        account = RequestAccount(
            service="tokenizer",
            request_id=self._request_id,
            trace_id=self.span.trace.trace_id,
            seconds=now - self.arrived,
            finish_reason=finish_reason,
            usage=usage,
        )
        account.phases.add(name="encode", seconds=submitted - self.arrived)
        account.phases.add(name="wait for tokens", start_seconds=submitted - self.arrived, seconds=now - submitted)
        account.detokenize_seconds = self._detokenized
        if self._first_output:
            account.first_token_seconds = self._first_output - self.arrived
        return account


class Unrecorded(Record):
    """Observes nothing: for one of several outputs that are observed together."""

    def __init__(self) -> None:
        pass

    def on_tokens(self) -> float:
        return 0.0

    def on_text(self, began: float) -> None:
        pass

    def on_end(self, finish_reason: common_pb2.FinishReason, usage: common_pb2.Usage) -> None:
        pass


def _name(reason: common_pb2.FinishReason) -> str:
    return common_pb2.FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower()
