"""Between /generate and the completions that it stands for."""

import time
from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from pagewire.gateway.core.encoding import DONE, event
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.field_names import GRAMMAR
from pagewire.gateway.core.reply import ChoiceOutput, PendingChoice
from pagewire.gateway.generation.answer import finish_reason, stop_reason
from pagewire.gateway.generation.logprobs import MIN_LOGPROB
from pagewire.gateway.generation.usage import UsageTotal
from pagewire.gateway.schema.sglang import OF_SGLANG
from pagewire.gateway.sglang.bodies import (
    MAX_NEW_TOKENS,
    NativeFinish,
    NativeGenerateRequest,
    NativeLogprob,
    NativeMeta,
    NativeOutput,
    NativeSamplingParams,
)
from pagewire.v1.inference_pb2 import TokenLogprob

# SGLang's names -> those of completions.
_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}


def completion_body(body: NativeGenerateRequest) -> dict[str, Any]:
    """What a body of /v1/completions says for it."""
    params = (body.sampling_params or NativeSamplingParams()).model_dump(exclude_none=True)
    tag = params.pop("structural_tag", None)
    given = {
        "prompt": body.input_ids if body.text is None else body.text,
        "stream": body.stream,
        "request_id": body.rid,
        "logprobs": (body.top_logprobs_num or 0) if body.return_logprob else None,
        "structured_outputs": None if tag is None else {"structural_tag": tag},
        "cache_salt": body.cache_salt,
        "priority": body.priority,
        "max_tokens": MAX_NEW_TOKENS,
    }
    return given | {_NAMES.get(name, name): value for name, value in params.items()}


def names_of(body: NativeGenerateRequest) -> dict[str, str]:
    """Parameters of completions -> what this API calls them."""
    params = body.sampling_params
    forms = ("json_schema", "regex", "ebnf", "structural_tag")
    form = next((name for name in forms if getattr(params, name, None) is not None), "")
    own = {
        **{name: name for name in NativeSamplingParams.model_fields},
        **{ours: name for name, ours in _NAMES.items()},
        **{ours: name for name, ours in OF_SGLANG.items() if name in NativeSamplingParams.model_fields},
        **({GRAMMAR: form} if form else {}),
    }
    return {
        **{ours: f"sampling_params.{name}" for ours, name in own.items()},
        "prompt": "input_ids" if body.text is None else "text",
        "logprobs": "top_logprobs_num",
    }


class NativeAnswer:
    operation = "generate"

    def __init__(self, body: NativeGenerateRequest, request_id: str) -> None:
        self._request_id = request_id
        self._is_single = body.is_single
        self._has_logprobs = bool(body.return_logprob)
        self._has_top_logprobs = bool(body.return_logprob and body.top_logprobs_num)
        self._has_texts = bool(body.return_text_in_logprobs)
        self._started = time.monotonic()
        self._texts: dict[int, str] = {}  # by choice, so far
        self._logprobs: dict[int, list[NativeLogprob]] = {}
        self._top_logprobs: dict[int, list[list[NativeLogprob]]] = {}

    def start(self, out: list[bytes], generations: Sequence[PendingChoice], usage: UsageTotal) -> None:
        """The first text is the first event."""

    def delta(self, out: list[bytes], generation: PendingChoice, output: ChoiceOutput, usage: UsageTotal) -> None:
        out.append(event(self._output(generation, output)))

    def end(self, out: list[bytes], usage: UsageTotal) -> None:
        out.append(DONE)

    def error(self, out: list[bytes], error: ApiError) -> None:
        out += (event(error.body()), DONE)

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: UsageTotal
    ) -> NativeOutput | list[NativeOutput]:
        told = [self._output(generation, output) for generation, output in zip(generations, outputs, strict=True)]
        return told[0] if self._is_single else told

    def _output(self, generation: PendingChoice, output: ChoiceOutput) -> NativeOutput:
        """All of it up to this output."""
        index = generation.index
        text = self._texts[index] = self._texts.get(index, "") + output.text
        usage = generation.usage
        meta = NativeMeta(
            id=self._request_id if self._is_single else f"{self._request_id}-{index}",
            finish_reason=_finish(output, usage.completion_tokens) if output.finish_reason else None,
            prompt_tokens=usage.prompt_tokens,
            completion_tokens=usage.completion_tokens,
            cached_tokens=usage.cached_tokens,
            weight_version=generation.weights_version or "default",
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
