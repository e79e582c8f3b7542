"""Answers to /api/chat and /api/generate: one object, or lines of JSON as the output grows."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Protocol

from msgspec import UNSET

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.encoding import EVENT_STREAM_HEADERS, encode
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.outputs import ChoiceOutput
from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.core.request_context import RequestContext
from pagewire.gateway.dialects.ollama.answers import (
    DoneReason,
    OllamaCall,
    OllamaChatResponse,
    OllamaFunctionCall,
    OllamaGenerateResponse,
    OllamaMessage,
)
from pagewire.gateway.dialects.ollama.errors import OllamaError
from pagewire.gateway.generation.answer import finish_reason
from pagewire.gateway.generation.call_arguments import arguments_object
from pagewire.gateway.generation.logprobs import chat_logprobs
from pagewire.gateway.generation.serving import GenerationResponse
from pagewire.gateway.generation.timing import Timing
from pagewire.gateway.generation.tool_calls import whole_calls
from pagewire.gateway.generation.usage import UsageTotal
from pagewire.gateway.schema.answers import ChatLogprob
from pagewire.v1.inference_pb2 import TokenLogprob, ToolCallDelta

Line = OllamaChatResponse | OllamaGenerateResponse
NDJSON = "application/x-ndjson"
NDJSON_HEADERS = [(b"content-type", NDJSON.encode()), *EVENT_STREAM_HEADERS[1:]]


class NdjsonResponse(GenerationResponse):
    stream_headers = NDJSON_HEADERS


def now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def line(data: Body) -> bytes:
    return encode(data) + b"\n"


class Form(Protocol):
    """The form of the lines of one route."""

    def line(
        self, model: str, text: str, thinking: str, calls: Sequence[OllamaCall], logprobs: Sequence[ChatLogprob]
    ) -> Line:
        """Returns a line with this output."""

    def last(self, line: Line, generation: PendingChoice) -> None:
        """Adds what only the last line has."""


class ChatForm:
    def line(
        self, model: str, text: str, thinking: str, calls: Sequence[OllamaCall], logprobs: Sequence[ChatLogprob]
    ) -> Line:
        message = OllamaMessage(content=text, thinking=thinking or UNSET, tool_calls=list(calls) or UNSET)
        return OllamaChatResponse(model=model, created_at=now(), message=message, logprobs=list(logprobs) or UNSET)

    def last(self, line: Line, generation: PendingChoice) -> None:
        """Adds nothing."""


class PromptForm:
    def __init__(self, *, has_context: bool) -> None:
        self._has_context = has_context

    def line(
        self, model: str, text: str, thinking: str, calls: Sequence[OllamaCall], logprobs: Sequence[ChatLogprob]
    ) -> Line:
        return OllamaGenerateResponse(
            model=model, created_at=now(), response=text, thinking=thinking or UNSET, logprobs=list(logprobs) or UNSET
        )

    def last(self, line: Line, generation: PendingChoice) -> None:
        if self._has_context and isinstance(line, OllamaGenerateResponse):
            line.context = [*generation.prompt_token_ids, *generation.token_ids]


class OllamaAnswer:
    """An `Answer`. A call is written once it is complete, as its arguments are an object."""

    def __init__(self, form: Form, operation: str, model: str, context: RequestContext, timing: Timing) -> None:
        self.operation, self.id = operation, context.request_id
        self._form = form
        self._model = model
        self._context, self._timing = context, timing
        self._calls: list[ToolCallDelta] = []  # of the call that is not complete
        self._last: Line | None = None

    def start(self, out: list[bytes], generations: Sequence[PendingChoice], usage: UsageTotal) -> None:
        """Writes nothing: the first text is in the first line."""

    def delta(self, out: list[bytes], generation: PendingChoice, output: ChoiceOutput, usage: UsageTotal) -> None:
        complete = self._complete(output.tool_calls, is_last=bool(output.finish_reason))
        if output.text or output.reasoning or complete or output.logprobs:
            out.append(line(self._line(output.text, output.reasoning, complete, output.logprobs)))
        if output.finish_reason:
            self._last = self._ended(self._line("", "", (), ()), generation, output)

    def _complete(self, deltas: Iterable[ToolCallDelta], *, is_last: bool) -> list[OllamaCall]:
        """Returns the calls that are now complete: the next one has begun, or the output has ended."""
        self._calls += deltas
        if not self._calls:
            return []
        open_index = None if is_last else self._calls[-1].index
        done = [one for one in self._calls if one.index != open_index]
        self._calls = [one for one in self._calls if one.index == open_index]
        first = done[0].index if done else 0
        return _calls(done, first)

    def end(self, out: list[bytes], usage: UsageTotal) -> None:
        if self._last is not None:
            out.append(line(self._counted(self._last, usage)))

    def error(self, out: list[bytes], error: ApiError) -> None:
        out.append(line(OllamaError(error.message)))

    def whole(self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: UsageTotal) -> Line:
        [generation], [output] = generations, outputs
        found = self._line(output.text, output.reasoning, _calls(output.tool_calls, 0), output.logprobs)
        return self._counted(self._ended(found, generation, output), usage)

    def _line(self, text: str, thinking: str, calls: Sequence[OllamaCall], logprobs: Sequence[TokenLogprob]) -> Line:
        entries = chat_logprobs(logprobs, as_ids=False).content if logprobs else ()
        return self._form.line(self._model, text, thinking, calls, entries)

    def _ended(self, last: Line, generation: PendingChoice, output: ChoiceOutput) -> Line:
        reason = finish_reason(output)
        last.done, last.done_reason = True, "stop" if reason == "tool_calls" else reason
        self._form.last(last, generation)
        return last

    def _counted(self, last: Line, usage: UsageTotal) -> Line:
        """Adds the counts and times. Those that no service knows any more are part of the total."""
        metrics = self._timing.metrics
        last.total_duration = _ns(self._context.elapsed)
        last.load_duration = _ns(((metrics and metrics.queue_time_ms) or 0) / 1000)
        last.prompt_eval_count, last.eval_count = usage.prompt_tokens, usage.completion_tokens
        last.prompt_eval_duration = _ns(((metrics and metrics.time_to_first_token_ms) or 0) / 1000)
        rest = last.total_duration - last.load_duration - last.prompt_eval_duration
        known = metrics.generation_time_ms if metrics else None
        last.eval_duration = max(1, rest if known is None else _ns(known / 1000))
        return last


def _calls(deltas: Iterable[ToolCallDelta], first: int) -> list[OllamaCall]:
    return [
        OllamaCall(
            id=call.id,
            function=OllamaFunctionCall(index=index, name=call.name, arguments=arguments_object(call.arguments)),
        )
        for index, call in enumerate(whole_calls(deltas), first)
    ]


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def without_output(form: Form, model: str, reason: DoneReason) -> Line:
    """Returns the answer to a request that only loads the model, or puts it away."""
    answer = form.line(model, "", "", (), ())
    answer.done, answer.done_reason = True, reason
    return answer
