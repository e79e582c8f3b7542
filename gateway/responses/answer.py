"""Answers to /v1/responses that are generated while the client waits."""

import time
from collections.abc import Sequence

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.outputs import ChoiceOutput
from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.generation.usage import UsageTotal
from pagewire.gateway.responses.bodies.answers import (
    InputTokensDetails,
    ModelResponse,
    OutputTokensDetails,
    ResponseUsage,
)
from pagewire.gateway.responses.writer import ResponseWriter
from pagewire.v1 import common_pb2


class ResponseAnswer:
    operation = "chat"

    def __init__(self, writer: ResponseWriter) -> None:
        self._writer = writer
        self._finish_reason: common_pb2.FinishReason = common_pb2.FINISH_REASON_UNSPECIFIED

    @property
    def id(self) -> str:
        return self.response.id

    @property
    def response(self) -> ModelResponse:
        """The response so far."""
        return self._writer.response

    def start(self, out: list[bytes], generations: Sequence[PendingChoice], usage: UsageTotal) -> None:
        self._writer.stream.out = out
        self._writer.start()

    def delta(self, out: list[bytes], generation: PendingChoice, output: ChoiceOutput, usage: UsageTotal) -> None:
        self._writer.stream.out = out
        self._writer.add(output)
        self._finish_reason = output.finish_reason

    def end(self, out: list[bytes], usage: UsageTotal) -> None:
        self._writer.stream.out = out
        self._writer.end(self._finish_reason, response_usage(usage), time.time())

    def error(self, out: list[bytes], error: ApiError) -> None:
        self._writer.stream.out = out
        self._writer.fail(error)

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: UsageTotal
    ) -> ModelResponse:
        writer = self._writer
        writer.start()
        writer.add(outputs[0])
        writer.end(outputs[0].finish_reason, response_usage(usage), time.time())
        return writer.response


def response_usage(usage: UsageTotal | common_pb2.Usage) -> ResponseUsage:
    return ResponseUsage(
        input_tokens=usage.prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.cached_tokens),
        output_tokens=usage.completion_tokens,
        output_tokens_details=OutputTokensDetails(usage.reasoning_tokens),
        total_tokens=usage.prompt_tokens + usage.completion_tokens,
    )
