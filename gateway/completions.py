"""Answers to /v1/completions."""

from collections.abc import Iterable, Sequence

from msgspec import UNSET

from pagewire.gateway.answer import ChunkWriter, Head, UsageTotal, finish_reason, logprob_of, stop_reason
from pagewire.gateway.errors import ApiError
from pagewire.gateway.gateway import Gateway
from pagewire.gateway.reply import ChoiceOutput, PendingChoice
from pagewire.gateway.schema.requests import CompletionRequest
from pagewire.gateway.schema.responses import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
)
from pagewire.gateway.translate import as_list
from pagewire.v1.inference_pb2 import DetokenizeRequest, TokenLogprob


async def prompt_texts(gateway: Gateway, body: CompletionRequest) -> list[str]:
    """Of each prompt; token ids are decoded. Raises grpc.aio.AioRpcError or ApiError."""
    texts = []
    for prompt in as_list(body.prompt):
        if not isinstance(prompt, str):
            request = DetokenizeRequest(
                model=body.model or "", token_ids=prompt, skip_special_tokens=body.skip_special_tokens is not False
            )
            prompt = (await gateway.call(gateway.inference.Detokenize, request)).text
        texts.append(prompt)
    return texts


class CompletionAnswer:
    operation = "text_completion"

    def __init__(self, body: CompletionRequest, head: Head, echoes: Sequence[str] = ()) -> None:
        """echoes: what the choices of each prompt begin with; empty = with what is generated."""
        self._echoes = [echo for echo in echoes for _ in range(body.n or 1)]  # by choice
        self._logprobs = body.logprobs is not None
        self._return_token_ids = bool(body.return_token_ids)
        self._head = head
        # Characters of the text that earlier logprobs covered, by choice.
        self._offsets: dict[int, int] = {}
        # Choices whose prompt token ids were sent.
        self._prompts_sent: set[int] = set()
        self._writer = ChunkWriter(
            CompletionChunk(id=head.id, created=head.created, model=head.model, choices=[]), body.stream_options
        )
        # Filled anew for each token, as making it takes half as long as encoding it.
        self._delta_choice = CompletionChunkChoice(index=0, text="")

    def start(self, out: list[bytes], generations: Sequence[PendingChoice], usage: UsageTotal) -> None:
        """The prompts, if they are wanted; else the first text is the first event."""
        for generation, echo in zip(generations, self._echoes, strict=False):
            self._writer.chunk(out, CompletionChunkChoice(index=generation.index, text=echo), usage)

    def delta(self, out: list[bytes], generation: PendingChoice, output: ChoiceOutput, usage: UsageTotal) -> None:
        if output.text or output.logprobs or (self._return_token_ids and output.token_ids):
            choice = self._delta_choice
            choice.index, choice.text = generation.index, output.text
            if self._logprobs:
                choice.logprobs = self._logprobs_of(generation.index, output.logprobs)
            if self._return_token_ids:
                choice.token_ids = list(output.token_ids)
                is_first = generation.index not in self._prompts_sent
                choice.prompt_token_ids = generation.prompt_token_ids if is_first else UNSET
                self._prompts_sent.add(generation.index)
            self._writer.chunk(out, choice, usage)
        if output.finish_reason:
            choice = CompletionChunkChoice(
                index=generation.index, text="", finish_reason=finish_reason(output), stop_reason=stop_reason(output)
            )
            self._writer.chunk(out, choice, usage)

    def end(self, out: list[bytes], usage: UsageTotal) -> None:
        self._writer.end(out, usage)

    def error(self, out: list[bytes], error: ApiError) -> None:
        self._writer.error(out, error)

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: UsageTotal
    ) -> Completion:
        return Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            choices=[self._choice(generation, output) for generation, output in zip(generations, outputs, strict=True)],
            usage=usage.info(),
        )

    def _choice(self, generation: PendingChoice, output: ChoiceOutput) -> CompletionChoice:
        return CompletionChoice(
            index=generation.index,
            text=self._echoes[generation.index] + output.text if self._echoes else output.text,
            logprobs=self._logprobs_of(generation.index, output.logprobs) if self._logprobs else None,
            finish_reason=finish_reason(output),
            stop_reason=stop_reason(output),
            prompt_token_ids=generation.prompt_token_ids if self._return_token_ids else UNSET,
            token_ids=list(output.token_ids) if self._return_token_ids else UNSET,
        )

    def _logprobs_of(self, index: int, tokens: Iterable[TokenLogprob]) -> CompletionLogprobs:
        logprobs = CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])
        for token in tokens:
            offset = self._offsets.get(index, 0)
            logprobs.tokens.append(token.token)
            logprobs.token_logprobs.append(logprob_of(token))
            logprobs.top_logprobs.append({other.token: logprob_of(other) for other in (token, *token.top_logprobs)})
            logprobs.text_offset.append(offset)
            self._offsets[index] = offset + len(token.token)
        return logprobs
