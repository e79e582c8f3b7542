"""Answers to TGI's routes."""

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from pagewire.gateway.core.encoding import event
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.outputs import ChoiceOutput
from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.dialects.tgi.bodies import (
    FinishReason,
    TgiDetails,
    TgiEvent,
    TgiGenerateRequest,
    TgiOutput,
    TgiParameters,
    TgiToken,
)
from pagewire.gateway.dialects.tgi.errors import TGI
from pagewire.gateway.generation.answer import finish_reason, stop_reason
from pagewire.gateway.generation.logprobs import finite
from pagewire.gateway.generation.usage import UsageTotal
from pagewire.v1.inference_pb2 import TokenLogprob


class TgiAnswer:
    """An `Answer`. Each event has a token, and the text that it completes."""

    operation = "text_completion"

    def __init__(self, body: TgiGenerateRequest, request_id: str, seed: int, *, in_list: bool) -> None:
        """in_list: whether a whole answer is a list with one output."""
        params = body.parameters or TgiParameters()
        self.id = request_id
        self._in_list = in_list
        self._before = body.inputs if params.return_full_text else ""
        self._has_details, self._num_top = bool(params.details), params.top_n_tokens or 0
        self._seed = seed if params.do_sample or params.seed is not None else None
        self._text = ""
        self._index, self._logprob = 0, 0.0  # of the latest token

    def start(self, out: list[bytes], generations: Sequence[PendingChoice], usage: UsageTotal) -> None:
        """Writes nothing: the first token is the first event."""

    def delta(self, out: list[bytes], generation: PendingChoice, output: ChoiceOutput, usage: UsageTotal) -> None:
        self._text += output.text
        events = self._events(generation, output)
        if output.finish_reason:
            events[-1].generated_text = self._before + self._text
            events[-1].details = self._details(output, usage)
        out += map(event, events)

    def _events(self, generation: PendingChoice, output: ChoiceOutput) -> list[TgiEvent]:
        """Returns an event for each token; an output without tokens is written with the latest one."""
        if output.logprobs:
            tokens = [_token(one) for one in output.logprobs]
        else:
            # Text that was held back, or an end: the latest token has both.
            ids = output.token_ids or generation.token_ids[-1:] or (0,)
            tokens = [TgiToken(id=id, text="", logprob=self._logprob, special=True) for id in ids]
        self._logprob = tokens[-1].logprob
        if "".join(token.text for token in tokens) != output.text:  # a character of several tokens, or a stop string
            for token in tokens:
                token.text = ""
            tokens[-1].text = output.text
        events = []
        for place, token in enumerate(tokens):
            token.special = not token.text
            self._index += 1
            top = self._top(output.logprobs[place]) if output.logprobs else UNSET
            events.append(TgiEvent(index=self._index, token=token, top_tokens=top, generated_text=None, details=None))
        return events

    def _top(self, token: TokenLogprob) -> list[TgiToken] | UnsetType:
        return [_token(one) for one in token.top_logprobs] if self._num_top else UNSET

    def end(self, out: list[bytes], usage: UsageTotal) -> None:
        """Writes nothing: the last token is the last event."""

    def error(self, out: list[bytes], error: ApiError) -> None:
        out.append(event(TGI.error_body(error, self.id)))

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: UsageTotal
    ) -> TgiOutput | list[TgiOutput]:
        [output] = outputs
        found = TgiOutput(generated_text=self._before + output.text)
        if self._has_details:
            found.details = self._details(output, usage)
            found.details.prefill = []
            found.details.tokens = [_token(one) for one in output.logprobs]
            if self._num_top:
                found.details.top_tokens = [[_token(top) for top in one.top_logprobs] for one in output.logprobs]
        return [found] if self._in_list else found

    def _details(self, output: ChoiceOutput, usage: UsageTotal) -> TgiDetails:
        return TgiDetails(
            finish_reason=_finish(output),
            generated_tokens=usage.completion_tokens,
            seed=self._seed,
            input_length=usage.prompt_tokens,
        )


def _token(token: TokenLogprob) -> TgiToken:
    return TgiToken(id=token.token_id, text=token.token, logprob=finite(token.logprob), special=not token.token)


def _finish(output: ChoiceOutput) -> FinishReason:
    reason = finish_reason(output)
    if reason == "length":
        return "length"
    if reason == "abort":
        return "abort"
    return "stop_sequence" if isinstance(stop_reason(output), str) else "eos_token"
