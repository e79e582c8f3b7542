"""Answers to /generate."""

import time
from collections.abc import Iterable, Sequence

from msgspec import UNSET, UnsetType

from pagewire.gateway.core.encoding import DONE, event
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.outputs import ChoiceOutput
from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.dialects.sglang.bodies import (
    NativeFinish,
    NativeGenerateRequest,
    NativeLogprob,
    NativeMeta,
    NativeOutput,
)
from pagewire.gateway.generation.answer import finish_reason, stop_reason, version_of
from pagewire.gateway.generation.logprobs import MIN_LOGPROB
from pagewire.gateway.generation.usage import UsageTotal
from pagewire.v1.inference_pb2 import TokenLogprob


class NativeAnswer:
    operation = "generate"

    def __init__(self, body: NativeGenerateRequest, request_id: str) -> None:
        self.id = request_id
        self._is_single = body.is_single
        self._has_logprobs = bool(body.return_logprob)
        self._has_top_logprobs = bool(body.return_logprob and body.top_logprobs_num)
        self._has_texts = bool(body.return_text_in_logprobs)
        self._started = time.monotonic()
        self._texts: dict[int, str] = {}  # the current text of each choice
        self._logprobs: dict[int, list[NativeLogprob]] = {}
        self._top_logprobs: dict[int, list[list[NativeLogprob]]] = {}

    def start(self, out: list[bytes], generations: Sequence[PendingChoice], usage: UsageTotal) -> None:
        """Writes nothing: the first text is the first event."""

    def delta(self, out: list[bytes], generation: PendingChoice, output: ChoiceOutput, usage: UsageTotal) -> None:
        out.append(event(self._output(generation, output)))

    def end(self, out: list[bytes], usage: UsageTotal) -> None:
        out.append(DONE)

    def error(self, out: list[bytes], error: ApiError) -> None:
        out += (event(error.body()), DONE)

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: UsageTotal
    ) -> NativeOutput | list[NativeOutput]:
        outputs_ = [self._output(generation, output) for generation, output in zip(generations, outputs, strict=True)]
        return outputs_[0] if self._is_single else outputs_

    def _output(self, generation: PendingChoice, output: ChoiceOutput) -> NativeOutput:
        """Returns the whole output up to this one."""
        index = generation.index
        text = self._texts[index] = self._texts.get(index, "") + output.text
        usage = generation.usage
        meta = NativeMeta(
            id=self.id if self._is_single else f"{self.id}-{index}",
            finish_reason=_finish(output, usage.completion_tokens) if output.finish_reason else None,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            weight_version=version_of(generation) or "default",
            e2e_latency=time.monotonic() - self._started,
        )
        if self._has_logprobs:
            chosen = self._logprobs.setdefault(index, [])
            chosen += self._logprobs_of(output.logprobs)
            meta.output_token_logprobs = chosen
        if self._has_top_logprobs:
            top = self._top_logprobs.setdefault(index, [])
            top += [self._logprobs_of(token.top_logprobs) for token in output.logprobs]
            meta.output_top_logprobs = top
        place: int | UnsetType = UNSET if self._is_single else index
        return NativeOutput(text=text, output_ids=generation.token_ids, meta_info=meta, index=place)

    def _logprobs_of(self, tokens: Iterable[TokenLogprob]) -> list[NativeLogprob]:
        return [
            (max(token.logprob, MIN_LOGPROB), token.token_id, token.token if self._has_texts else None)
            for token in tokens
        ]


def _finish(output: ChoiceOutput, num_tokens: int) -> NativeFinish:
    reason = finish_reason(output)
    if reason == "length":
        return NativeFinish(type="length", length=num_tokens)
    if reason == "abort":
        return NativeFinish(type="abort", message="the request was aborted")
    return NativeFinish(type="stop", matched=stop_reason(output))
