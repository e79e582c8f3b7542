"""One live request: takes tokens, delivers deltas of text.

The text is a pure function of the tokens of prompt and output, no matter how they arrived, so another process can
resume the request from its tokens alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pagewire.services.tokenizer import stats
from pagewire.services.tokenizer.output.detokenizer import Detokenizers
from pagewire.services.tokenizer.output.prompt_logprobs import prompt_logprobs
from pagewire.services.tokenizer.output.reading import OutputReader, Parsed
from pagewire.services.tokenizer.output.stop import StopChecker, StopHit
from pagewire.services.tokenizer.output.text_output import TextDelta, TextOutput
from pagewire.services.tokenizer.record import Record
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.wire.rpc import RpcError

STOP = common_pb2.FINISH_REASON_STOP


@dataclass(frozen=True)
class OutputOptions:
    """Settings for turning output tokens into text."""

    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    # Special tokens that are not skipped, as the reader looks for them.
    marks: frozenset[str] = frozenset()
    # Stop strings that end before this many tokens do not count.
    min_tokens: int = 0
    # Whether log probabilities are reported, with the places of their tokens in the text.
    has_logprobs: bool = False
    # Of the adapter that computes the tokens, for the first response.
    adapter_digest: str = ""


class OutputText:
    """The text of one request's output, token by token: detokenized, and cut at the first stop string."""

    __slots__ = ("_check", "_detokenizer", "_min_tokens", "_num_chars", "num_tokens", "offsets")

    def __init__(self, detokenizers: Detokenizers, options: OutputOptions, prompt_token_ids: Sequence[int]) -> None:
        self._detokenizer = detokenizers.make(skip_special_tokens=options.skip_special_tokens, but=options.marks)
        self._detokenizer.follow(prompt_token_ids)
        self._check = StopChecker(options.stop, include_stop_str_in_output=options.include_stop_str_in_output)
        self._min_tokens = options.min_tokens
        self._num_chars = 0
        self.num_tokens = 0
        # Where the text of each token begins; only with log probabilities.
        self.offsets: list[int] | None = [] if options.has_logprobs else None

    def push(self, token_id: int) -> str | StopHit:
        """Returns the text that this token makes certain, or the end of the output."""
        self.num_tokens += 1
        if self.offsets is not None:
            self.offsets.append(self._num_chars + self._detokenizer.num_held(token_id))
        text = self._detokenizer.push(token_id)
        if self.offsets is not None:
            self._num_chars += len(text)
        return self._check.push(text, check=self.num_tokens > self._min_tokens)

    def push_silent(self) -> None:
        """Counts a token without text: the one that ends the generation."""
        self.num_tokens += 1
        if self.offsets is not None:
            self.offsets.append(self._num_chars + self._detokenizer.num_held(None))

    def flush(self) -> str | StopHit:
        """Returns the text that was held back, as no token follows."""
        out = self._check.push(self._detokenizer.flush(), check=self.num_tokens > self._min_tokens)
        return out if isinstance(out, StopHit) else out + self._check.flush()


Deliver = Callable[[TextOutput], None]


class TextStream:
    """A TokenListener that turns a request's tokens into GenerateResponses and passes them to `deliver`."""

    def __init__(
        self,
        detokenizers: Detokenizers,
        options: OutputOptions,
        prompt_token_ids: Sequence[int],
        deliver: Deliver,
        record: Record,
        reader: OutputReader | None,
        prompt_text: str | None,
        prompt_field: str,
    ) -> None:
        """reader: reads the output's text; None if all of it is text. prompt_text: the prompt, if it was given as text.
        prompt_field: the field of the client's request that has the prompt."""
        self._detokenizers = detokenizers
        self._options = options
        self._text = OutputText(detokenizers, options, prompt_token_ids)
        self._reader = reader
        # Reported with the first output.
        self._prompt_token_ids: Sequence[int] | None = prompt_token_ids
        self._prompt_text = prompt_text
        self._prompt_logprobs: inference_pb2.PromptLogprobs | None = None
        self._weights_version = ""
        self._usage = common_pb2.Usage(prompt_tokens=len(prompt_token_ids))
        self._deliver = deliver
        self._prompt_field = prompt_field
        self.record = record
        self._has_output = False
        self.finished = False
        # Called when a stop string ends the request, as the scheduler does not search for them.
        self.stop_upstream: Callable[[], None] = lambda: None

    def replay(self, token_ids: Sequence[int]) -> None:
        """Takes tokens with text that an earlier attempt has delivered; may finish the request."""
        for token_id in token_ids:
            out = self._text.push(token_id)
            if isinstance(out, StopHit):
                self._finish_at(out, [], (), None)
                return
            if self._reader is not None:
                self._reader.push(out)

    def on_tokens(
        self,
        token_ids: Sequence[int],
        finish_reason: common_pb2.FinishReason,
        cached_tokens: int,
        stop_token_id: int | None,
        logprobs: common_pb2.Logprobs | None,
    ) -> None:
        if not self._has_output:
            # Not updated later: a request that is computed again after an interruption hits its own blocks.
            self._usage.cached_tokens = cached_tokens
            self._has_output = True
        if not token_ids:
            self._take(token_ids, finish_reason, stop_token_id, logprobs)
            return
        began = self.record.on_tokens()
        self._take(token_ids, finish_reason, stop_token_id, logprobs)
        if not self.finished:
            self.record.on_text(began)

    def _take(
        self,
        token_ids: Sequence[int],
        finish_reason: common_pb2.FinishReason,
        stop_token_id: int | None,
        logprobs: common_pb2.Logprobs | None,
    ) -> None:
        output = self._text
        texts: list[str] = []
        # The token that ends a generation is counted, but its text is returned only on request.
        num_silent = 1 if finish_reason == STOP and token_ids and not self._options.include_stop_str_in_output else 0
        for index in range(len(token_ids) - num_silent):
            out = output.push(token_ids[index])
            if isinstance(out, StopHit):
                self._finish_at(out, texts, token_ids[: index + 1], logprobs)
                if not finish_reason:
                    self.stop_upstream()
                return
            texts.append(out)
        if num_silent:
            output.push_silent()
        if not finish_reason:
            self._deliver(self._more(texts, token_ids, logprobs))
            return
        tail = output.flush()
        if isinstance(tail, StopHit):
            self._finish_at(tail, texts, token_ids, logprobs)
            return
        response = self._last_response(texts, tail, token_ids, logprobs, finish_reason)
        if stop_token_id is not None:
            response.stop_token_id = stop_token_id
        self._finish(response)

    def on_weights(self, version: str) -> None:
        self._weights_version = version

    def on_prompt_logprobs(self, logprobs: common_pb2.Logprobs) -> None:
        assert self._prompt_token_ids is not None, "they come with the first output"
        self._prompt_logprobs = prompt_logprobs(
            self._detokenizers,
            logprobs,
            self._prompt_token_ids,
            self._prompt_text,
            skip_special_tokens=self._options.skip_special_tokens,
        )

    def on_vector(self, vector: common_pb2.Vector) -> None:
        raise ValueError("the scheduler returned a vector for a request for text")

    def on_error(self, error: RpcError) -> None:
        if self.finished:
            return
        self.finished = True
        self.record.on_error(error)
        self._deliver(error.renamed("prompt_token_ids", self._prompt_field))

    def end_early(self) -> None:
        """Delivers the text that was held back, as the end."""
        tail = self._text.flush()
        rest = tail.text if isinstance(tail, StopHit) else tail
        self._finish(self._last_response([], rest, (), None, common_pb2.FINISH_REASON_ABORT))

    def cancel(self) -> None:
        """Ends the stream without a response: the client does not want the rest."""
        if not self.finished:
            self.finished = True
            self.record.on_cancelled()

    def _finish_at(
        self, hit: StopHit, texts: Sequence[str], token_ids: Sequence[int], logprobs: common_pb2.Logprobs | None
    ) -> None:
        stats.STOP_STRING_HITS.inc()
        response = self._last_response(texts, hit.text, token_ids, logprobs, STOP)
        if not token_ids:
            # The text of a replayed hit was delivered with its last token.
            for said in ("text", "reasoning", "tool_calls"):
                response.ClearField(said)  # type: ignore[arg-type]
        response.stop_string = hit.stop_string
        self._finish(response)

    def _finish(self, response: inference_pb2.GenerateResponse) -> None:
        self.finished = True
        self.record.on_end(response.finish_reason, self._usage)
        self._deliver(response)

    def _more(self, texts: list[str], token_ids: Sequence[int], logprobs: common_pb2.Logprobs | None) -> TextOutput:
        """Returns a delta, or a response if more fields are set. texts: one for each token."""
        if self._reader is None:
            parsed, text = None, "".join(texts)
        else:
            parsed = self._reader.push(*texts)
            text = parsed.text
        if logprobs is not None or self._prompt_token_ids is not None or (parsed and not parsed.is_text):
            return self._response(parsed or Parsed(text=text), token_ids, logprobs)
        self._usage.completion_tokens = self._text.num_tokens
        return TextDelta(text, token_ids, self._usage)

    def _last_response(
        self,
        texts: Sequence[str],
        rest: str,
        token_ids: Sequence[int],
        logprobs: common_pb2.Logprobs | None,
        finish_reason: common_pb2.FinishReason,
    ) -> inference_pb2.GenerateResponse:
        """Returns the last response. rest: text after that of the last token with text."""
        parsed = Parsed(text="".join(texts) + rest) if self._reader is None else self._reader.finish(*texts, rest=rest)
        response = self._response(parsed, token_ids, logprobs)
        if finish_reason == STOP and self._reader is not None and self._reader.has_called:
            finish_reason = common_pb2.FINISH_REASON_TOOL_CALLS
        response.finish_reason = finish_reason
        return response

    def _response(
        self, parsed: Parsed, token_ids: Sequence[int], logprobs: common_pb2.Logprobs | None
    ) -> inference_pb2.GenerateResponse:
        self._usage.completion_tokens = self._text.num_tokens
        if self._reader is not None:
            self._usage.reasoning_tokens = self._reader.num_reasoning_tokens
        response = inference_pb2.GenerateResponse(
            text=parsed.text,
            reasoning=parsed.reasoning,
            tool_calls=parsed.tool_calls,
            token_ids=token_ids,
            usage=self._usage,
            prompt_logprobs=self._prompt_logprobs,
            weights_version=self._weights_version,
        )
        self._prompt_logprobs, self._weights_version = None, ""
        if self._prompt_token_ids is not None:
            response.prompt_token_ids.extend(self._prompt_token_ids)
            response.adapter_digest = self._options.adapter_digest
            self._prompt_token_ids = None
        if logprobs is not None:
            response.logprobs.extend(self._token_logprobs(logprobs, len(token_ids)))
        return response

    def _token_logprobs(self, logprobs: common_pb2.Logprobs, num_tokens: int) -> list[inference_pb2.TokenLogprob]:
        """Returns one message per token, with its alternatives, from columns."""
        per_token = logprobs.entries_per_token
        entries = [
            self._token_logprob(token_id, logprob)
            for token_id, logprob in zip(
                logprobs.token_ids[: num_tokens * per_token], logprobs.logprobs[: num_tokens * per_token], strict=True
            )
        ]
        chosen = entries[::per_token]
        offsets = self._text.offsets or []
        for index, (token, offset) in enumerate(zip(chosen, offsets[len(offsets) - num_tokens :], strict=True)):
            token.text_offset = offset
            token.top_logprobs.extend(entries[index * per_token + 1 : (index + 1) * per_token])
        return chosen

    def _token_logprob(self, token_id: int, logprob: float) -> inference_pb2.TokenLogprob:
        data = self._detokenizers.token_bytes(token_id)
        return inference_pb2.TokenLogprob(
            token_id=token_id, logprob=logprob, token=data.decode("utf-8", "replace"), token_bytes=data
        )
