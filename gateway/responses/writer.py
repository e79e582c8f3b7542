"""Writes the outputs of one generation as a response: its items, and the events of a stream.

Items and events depend only on the response's id and the outputs, so another process can write them again.
"""

from collections.abc import Iterable, Iterator

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.outputs import ChoiceOutput
from pagewire.gateway.generation.logprobs import chat_logprobs
from pagewire.gateway.responses.bodies.answers import (
    FunctionCallItem,
    IncompleteDetails,
    ItemStatus,
    ModelResponse,
    OutputItem,
    OutputMessage,
    OutputText,
    ReasoningItem,
    ReasoningText,
    ResponseError,
    ResponseStatus,
    ResponseUsage,
)
from pagewire.gateway.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    ErrorEvent,
    EventStream,
    ItemEvent,
    Lifecycle,
    PartEvent,
    ReasoningDelta,
    ReasoningDone,
    ResponseEvent,
    TextDelta,
    TextDone,
)
from pagewire.gateway.schema.answers import ChatLogprob
from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import TokenLogprob

_ERROR_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
_LAST_EVENTS: dict[ResponseStatus, Lifecycle] = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "cancelled": "response.incomplete",  # OpenAI has no event for it
    "failed": "response.failed",
}


class _OpenItem:
    """An item that is being written. `item` is its state in the events."""

    def __init__(self, stream: EventStream, item: OutputItem, index: int) -> None:
        self._stream = stream
        self._index = index
        self._pieces: list[str] = []
        self.item = item
        stream.add(ItemEvent("response.output_item.added", index, item))

    def _done(self, status: ItemStatus) -> None:
        self.item.status = status
        self._stream.add(ItemEvent("response.output_item.done", self._index, self.item))

    def _part_added(self, part: OutputText | ReasoningText) -> None:
        self._stream.add(PartEvent("response.content_part.added", self.item.id, self._index, 0, part))

    def _part_done(self, part: OutputText | ReasoningText) -> None:
        self._stream.add(PartEvent("response.content_part.done", self.item.id, self._index, 0, part))


class _OpenMessage(_OpenItem):
    def __init__(self, stream: EventStream, id: str, index: int) -> None:
        super().__init__(stream, OutputMessage(id=id, status="in_progress", content=[]), index)
        self._part_added(OutputText(text=""))
        # Reused for each token: making it takes as long as encoding it.
        self._delta = TextDelta(item_id=id, output_index=index)
        self._logprobs: list[ChatLogprob] = []

    def add(self, text: str, logprobs: list[ChatLogprob]) -> None:
        self._pieces.append(text)
        self._logprobs += logprobs
        self._delta.delta, self._delta.logprobs = text, logprobs
        self._stream.add(self._delta)

    def close(self, status: ItemStatus) -> None:
        text = "".join(self._pieces)
        self._stream.add(TextDone(item_id=self.item.id, output_index=self._index, text=text, logprobs=self._logprobs))
        part = OutputText(text=text, logprobs=self._logprobs)
        self._part_done(part)
        assert isinstance(self.item, OutputMessage)
        self.item.content.append(part)
        self._done(status)


class _OpenReasoning(_OpenItem):
    def __init__(self, stream: EventStream, id: str, index: int) -> None:
        super().__init__(stream, ReasoningItem(id=id, status="in_progress", content=[]), index)
        self._part_added(ReasoningText(text=""))
        self._delta = ReasoningDelta(item_id=id, output_index=index)

    def add(self, text: str) -> None:
        self._pieces.append(text)
        self._delta.delta = text
        self._stream.add(self._delta)

    def close(self, status: ItemStatus) -> None:
        text = "".join(self._pieces)
        self._stream.add(ReasoningDone(item_id=self.item.id, output_index=self._index, text=text))
        part = ReasoningText(text=text)
        self._part_done(part)
        assert isinstance(self.item, ReasoningItem)
        self.item.content.append(part)
        self._done(status)


class _OpenCall(_OpenItem):
    def __init__(self, stream: EventStream, id: str, index: int, call_id: str, name: str) -> None:
        item = FunctionCallItem(id=id, status="in_progress", call_id=call_id, name=name, arguments="")
        super().__init__(stream, item, index)
        self._name = name
        self._delta = ArgumentsDelta(item_id=id, output_index=index)

    def add(self, arguments: str) -> None:
        self._pieces.append(arguments)
        self._delta.delta = arguments
        self._stream.add(self._delta)

    def close(self, status: ItemStatus) -> None:
        arguments = "".join(self._pieces)
        self._stream.add(
            ArgumentsDone(item_id=self.item.id, output_index=self._index, name=self._name, arguments=arguments)
        )
        assert isinstance(self.item, FunctionCallItem)
        self.item.arguments = arguments
        self._done(status)


class ResponseWriter:
    """Fills a response without output. Events go to `stream.out`."""

    def __init__(self, response: ModelResponse, *, logprobs: bool, first_event: int = 0) -> None:
        """
        Args:
            logprobs: whether text has log probabilities.
            first_event: number of the first event to write; earlier ones are only counted.
        """
        self.response = response
        self.stream = EventStream(first_event)
        self._hex = response.id.partition("_")[2]
        self._with_logprobs = logprobs
        # Log probabilities of tokens with text that is held back.
        self._logprobs: list[TokenLogprob] = []
        self._open: _OpenMessage | _OpenReasoning | _OpenCall | None = None

    def start(self) -> None:
        """Writes the first events of a response."""
        self._write("response.created")
        if self.response.status == "queued":
            self._write("response.queued")
        else:
            self._write("response.in_progress")

    def begin(self) -> None:
        """Marks a queued response as in progress."""
        self.response.status = "in_progress"
        self._write("response.in_progress")

    def add(self, output: ChoiceOutput) -> None:
        if output.reasoning:
            if not isinstance(self._open, _OpenReasoning):
                self._close()
                self._open = _OpenReasoning(self.stream, *self._next_item("rs"))
            self._open.add(output.reasoning)
        logprobs = self._logprobs_of_text(output) if self._with_logprobs else []
        if output.text:
            if not isinstance(self._open, _OpenMessage):
                self._close()
                self._open = _OpenMessage(self.stream, *self._next_item("msg"))
            self._open.add(output.text, logprobs)
        for delta in output.tool_calls:
            if delta.id:
                self._close()
                self._open = _OpenCall(self.stream, *self._next_item("fc"), delta.id, delta.name)
            if delta.arguments and isinstance(self._open, _OpenCall):
                self._open.add(delta.arguments)

    def end(self, finish_reason: common_pb2.FinishReason, usage: ResponseUsage, now: float) -> None:
        """Ends the response. now: Unix time, seconds."""
        response = self.response
        response.usage = usage
        if finish_reason == common_pb2.FINISH_REASON_ERROR:
            self.fail(ApiError(500, "the engine failed; its log has the cause"))
        elif finish_reason == common_pb2.FINISH_REASON_ABORT:
            self.cancel(usage)
        elif finish_reason == common_pb2.FINISH_REASON_LENGTH:
            response.incomplete_details = IncompleteDetails("max_output_tokens")
            self._end("incomplete")
        else:
            response.completed_at = int(now)
            self._end("completed")

    def cancel(self, usage: ResponseUsage | None) -> None:
        self.response.usage = usage
        self._end("cancelled")

    def fail(self, error: ApiError) -> None:
        self._close("incomplete")
        code = _ERROR_CODES.get(error.status, "server_error")
        self.response.error = ResponseError(code, error.message)
        self.stream.add(ErrorEvent(code=code, message=error.message, param=error.param))
        self._end("failed")

    def end_as(self, response: ModelResponse) -> None:
        """Writes the last events of a response that another process has ended."""
        self._close("completed" if response.status == "completed" else "incomplete")
        if (error := response.error) is not None:
            self.stream.add(ErrorEvent(code=error.code, message=error.message, param=None))
        self.response = response
        self._write(_LAST_EVENTS[response.status])

    def _end(self, status: ResponseStatus) -> None:
        self._close("completed" if status == "completed" else "incomplete")
        self.response.status = status
        self._write(_LAST_EVENTS[status])

    def _close(self, status: ItemStatus = "completed") -> None:
        if self._open is not None:
            self._open.close(status)
            self.response.output.append(self._open.item)
            self._open = None

    def _next_item(self, prefix: str) -> tuple[str, int]:
        """Returns (id, index) of the next item. The id contains that of the response."""
        index = len(self.response.output)
        return f"{prefix}_{self._hex}_{index}", index

    def _write(self, type: Lifecycle) -> None:
        self.stream.add(ResponseEvent(type, self.response))

    def _logprobs_of_text(self, output: ChoiceOutput) -> list[ChatLogprob]:
        """Returns the log probabilities of the tokens of the text, without those of reasoning and calls."""
        tokens = [*self._logprobs, *output.logprobs]
        if not output.text:
            self._logprobs = [] if output.reasoning or output.tool_calls else tokens
            return []
        self._logprobs = []
        if output.reasoning or output.tool_calls or not isinstance(self._open, _OpenMessage):
            tokens = list(_tokens_of(output.text.encode(), output.reasoning.encode(), tokens))
        return chat_logprobs(tokens, as_ids=False).content


def _tokens_of(text: bytes, before: bytes, tokens: Iterable[TokenLogprob]) -> Iterator[TokenLogprob]:
    """Yields the tokens with a part in `text`, which follows `before`."""
    tokens = list(tokens)
    whole = b"".join([token.token_bytes for token in tokens])
    start = whole.find(text, max(whole.find(before), 0) + len(before))
    end = 0
    for token in tokens:
        begin, end = end, end + len(token.token_bytes)
        if start < 0 or (begin < start + len(text) and end > start):
            yield token
