"""Answers to /v1/messages."""

from collections.abc import Sequence

import msgspec

from pagewire.gateway.core.body import Body
from pagewire.gateway.core.encoding import encode
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.outputs import ChoiceOutput
from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.generation.call_arguments import arguments_object
from pagewire.gateway.generation.tool_calls import whole_calls
from pagewire.gateway.generation.usage import UsageTotal
from pagewire.gateway.messages.bodies.answers import (
    SIGNATURE,
    AnsweredMessage,
    ContentBlock,
    ContentBlockDelta,
    ContentBlockStart,
    ContentBlockStop,
    InputJsonDelta,
    MessageDelta,
    MessageStart,
    MessageStop,
    MessageUsage,
    Ping,
    SignatureDelta,
    StopDelta,
    StopReason,
    TextBlock,
    TextBlockDelta,
    ThinkingBlock,
    ThinkingBlockDelta,
    ThinkingTokensDetails,
    ToolUseBlock,
)
from pagewire.gateway.messages.errors import MESSAGES
from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import ToolCallDelta

_DELTA = b"event: content_block_delta\ndata: "
_END = b"\n\n"
_NO_INPUT = msgspec.Raw(b"{}")


class MessagesAnswer:
    """An `Answer` of content blocks; each ends before the next begins."""

    operation = "chat"

    def __init__(self, request_id: str, model: str, *, max_tokens: int, show_thinking: bool) -> None:
        self._request_id, self.id = request_id, f"msg_{request_id}"
        self._model = model
        self._max_tokens = max_tokens
        self._show_thinking = show_thinking
        self._index = -1  # of the latest block
        self._open = ""  # what it is: text, thinking or tool_use; "" once it is closed
        self._has_calls = False
        self._stop = StopDelta(stop_reason="end_turn", stop_sequence=None)
        # Reused for each token: making the two objects takes as long as encoding them.
        self._text = TextBlockDelta(text="")
        self._text_event = ContentBlockDelta(index=0, delta=self._text)

    def start(self, out: list[bytes], generations: Sequence[PendingChoice], usage: UsageTotal) -> None:
        _write(out, "message_start", MessageStart(message=self._message([], None, usage)))

    def delta(self, out: list[bytes], generation: PendingChoice, output: ChoiceOutput, usage: UsageTotal) -> None:
        """Raises ApiError if the generation was ended by the server."""
        if output.reasoning:
            if self._open != "thinking":
                self._begin(out, ThinkingBlock(thinking="", signature=""), "thinking")
            if self._show_thinking:
                delta = ContentBlockDelta(index=self._index, delta=ThinkingBlockDelta(thinking=output.reasoning))
                out += (_DELTA, encode(delta), _END)
        if output.text:
            if self._open != "text":
                self._begin(out, TextBlock(text=""), "text")
                self._text_event.index = self._index
            self._text.text = output.text
            out += (_DELTA, encode(self._text_event), _END)
        for call in output.tool_calls:
            self._call(out, call)
        if output.finish_reason:
            self._close(out)
            self._stop = self._stop_of(output, usage, has_calls=self._has_calls)

    def _call(self, out: list[bytes], call: ToolCallDelta) -> None:
        if call.id:
            self._begin(out, ToolUseBlock(id=call.id, name=call.name, input=_NO_INPUT), "tool_use")
            self._has_calls = True
        if call.arguments:
            delta = ContentBlockDelta(index=self._index, delta=InputJsonDelta(partial_json=call.arguments))
            out += (_DELTA, encode(delta), _END)

    def _begin(self, out: list[bytes], block: ContentBlock, kind: str) -> None:
        self._close(out)
        self._index += 1
        self._open = kind
        _write(out, "content_block_start", ContentBlockStart(index=self._index, content_block=block))
        if not self._index:
            _write(out, "ping", Ping())

    def _close(self, out: list[bytes]) -> None:
        if self._open == "thinking":
            delta = ContentBlockDelta(index=self._index, delta=SignatureDelta(signature=SIGNATURE))
            out += (_DELTA, encode(delta), _END)
        if self._open:
            _write(out, "content_block_stop", ContentBlockStop(index=self._index))
        self._open = ""

    def end(self, out: list[bytes], usage: UsageTotal) -> None:
        _write(out, "message_delta", MessageDelta(delta=self._stop, usage=_usage(usage)))
        _write(out, "message_stop", MessageStop())

    def error(self, out: list[bytes], error: ApiError) -> None:
        _write(out, "error", MESSAGES.error_body(error, self._request_id))

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: UsageTotal
    ) -> AnsweredMessage:
        """Raises ApiError if the generation was ended by the server."""
        [output] = outputs
        content: list[ContentBlock] = []
        if output.reasoning:
            content.append(ThinkingBlock(output.reasoning if self._show_thinking else "", signature=SIGNATURE))
        if output.text:
            content.append(TextBlock(output.text))
        for call in whole_calls(output.tool_calls):
            content.append(ToolUseBlock(call.id, call.name, arguments_object(call.arguments)))
        return self._message(content, self._stop_of(output, usage, has_calls=bool(output.tool_calls)), usage)

    def _stop_of(self, output: ChoiceOutput, usage: UsageTotal, *, has_calls: bool) -> StopDelta:
        """Returns the end of the last output. Raises ApiError for an end without a name in this API."""
        reason: StopReason
        if output.finish_reason == common_pb2.FINISH_REASON_LENGTH:
            is_full = usage.completion_tokens < self._max_tokens
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif output.finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS:
            reason = "tool_use"
        elif output.finish_reason == common_pb2.FINISH_REASON_STOP:
            if sequence := getattr(output, "stop_string", ""):
                return StopDelta(stop_reason="stop_sequence", stop_sequence=sequence)
            reason = "tool_use" if has_calls else "end_turn"
        else:
            raise ApiError(500, "the server ended the generation")
        return StopDelta(stop_reason=reason, stop_sequence=None)

    def _message(self, content: list[ContentBlock], stop: StopDelta | None, usage: UsageTotal) -> AnsweredMessage:
        return AnsweredMessage(
            id=self.id,
            model=self._model,
            content=content,
            stop_reason=stop.stop_reason if stop else None,
            stop_sequence=stop.stop_sequence if stop else None,
            usage=_usage(usage),
        )


def _write(out: list[bytes], name: str, event: Body) -> None:
    out.append(b"event: %b\ndata: %b\n\n" % (name.encode(), encode(event)))


def _usage(usage: UsageTotal) -> MessageUsage:
    cached = usage.cached_tokens
    return MessageUsage(
        input_tokens=usage.prompt_tokens - cached,
        cache_creation_input_tokens=0,  # every computed prefix is cached, so no entries are counted
        cache_read_input_tokens=cached,
        output_tokens=usage.completion_tokens,
        output_tokens_details=ThinkingTokensDetails(thinking_tokens=usage.reasoning_tokens),
    )
