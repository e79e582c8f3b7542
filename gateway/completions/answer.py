"""Answers to /v1/completions."""

from collections.abc import Sequence

from msgspec import UNSET

from pagewire.gateway.completions.bodies import (
    Completion,
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionLogprobs,
    CompletionRequest,
)
from pagewire.gateway.completions.logprobs import completion_logprobs, echoed_logprobs
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.outputs import ChoiceOutput
from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.generation.answer import fingerprint, finish_reason, stop_reason, version_of
from pagewire.gateway.generation.chunks import ChunkWriter
from pagewire.gateway.generation.head import Head
from pagewire.gateway.generation.lines import Lines
from pagewire.gateway.generation.logprobs import logprobs_of_prompt, prompt_logprobs
from pagewire.gateway.generation.usage import UsageTotal
from pagewire.gateway.schema.parameters import as_list
from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import DetokenizeRequest, GenerateResponse


async def prompt_texts(lines: Lines, body: CompletionRequest) -> list[str]:
    """Returns the text of each prompt; token ids are decoded. Raises grpc.aio.AioRpcError or ApiError."""
    texts = []
    tokenizer = await lines.client(body.model)
    for prompt in as_list(body.prompt):
        if not isinstance(prompt, str):
            request = DetokenizeRequest(
                model=body.model or "", token_ids=prompt, skip_special_tokens=body.skip_special_tokens is not False
            )
            prompt = (await tokenizer.call(tokenizer.inference.Detokenize, request)).text
        texts.append(prompt)
    return texts


class CompletionAnswer:
    operation = "text_completion"

    def __init__(self, body: CompletionRequest, head: Head, echoes: Sequence[str] = ()) -> None:
        """echoes: the text that the choices of each prompt begin with; empty: none, or one with log probabilities."""
        self._echoes = [echo for echo in echoes for _ in range(body.n or 1)]  # by choice
        self._num_top = body.logprobs  # None: no log probabilities
        self._num_prompt_top = body.prompt_logprobs
        self._echoes_logprobs = bool(body.echo) and body.logprobs is not None
        self._has_output = body.max_tokens != 0
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._return_token_ids = bool(body.return_token_ids)
        self._head, self.id = head, head.id
        # Choice -> characters of its prompt, once they were sent with log probabilities.
        self._echo_sizes: dict[int, int] = {}
        # The choices that have sent the token ids of their prompt.
        self._prompts_sent: set[int] = set()
        self._writer = ChunkWriter(
            CompletionChunk(id=head.id, created=head.created, model=head.model, choices=[]),
            body.stream_options,
            head.style,
        )
        # Reused for each token: making it takes half as long as encoding it.
        self._delta_choice = CompletionChunkChoice(index=0, text="")

    def start(self, out: list[bytes], generations: Sequence[PendingChoice], usage: UsageTotal) -> None:
        """Writes the prompts, if they are echoed."""
        for generation, echo in zip(generations, self._echoes, strict=False):
            self._writer.chunk(
                out, CompletionChunkChoice(index=generation.index, text=echo), usage, version=version_of(generation)
            )

    def delta(self, out: list[bytes], generation: PendingChoice, output: ChoiceOutput, usage: UsageTotal) -> None:
        if self._echoes_logprobs and generation.index not in self._echo_sizes:
            text, logprobs = self._echo(generation, (generation,))
            self._echo_sizes[generation.index] = len(text)
            choice = CompletionChunkChoice(generation.index, text, logprobs)
            self._writer.chunk(out, choice, usage, version=version_of(generation))
        if not self._has_output:
            output = _end_of(output)
        if output.text or output.logprobs or (self._return_token_ids and output.token_ids):
            choice = self._delta_choice
            choice.index, choice.text = generation.index, output.text
            if self._num_top is not None:
                offset = self._echo_sizes.get(generation.index, 0)
                choice.logprobs = completion_logprobs(output.logprobs, self._as_ids, offset)
            if self._return_token_ids:
                choice.token_ids = list(output.token_ids)
                is_first = generation.index not in self._prompts_sent
                choice.prompt_token_ids = generation.prompt_token_ids if is_first else UNSET
                self._prompts_sent.add(generation.index)
            self._writer.chunk(out, choice, usage, version=version_of(generation))
        if output.finish_reason:
            choice = CompletionChunkChoice(
                index=generation.index, text="", finish_reason=finish_reason(output), stop_reason=stop_reason(output)
            )
            self._writer.chunk(out, choice, usage, version=version_of(generation))

    def end(self, out: list[bytes], usage: UsageTotal) -> None:
        self._writer.end(out, usage, metrics=self._head.metrics)

    def error(self, out: list[bytes], error: ApiError) -> None:
        self._writer.error(out, error)

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: UsageTotal
    ) -> Completion:
        return Completion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.style.fingerprint(fingerprint(generations)),
            choices=[
                self._choice(generation, generations, output if self._has_output else _end_of(output))
                for generation, output in zip(generations, outputs, strict=True)
            ],
            usage=usage.info(),
            metrics=self._head.metrics,
        )

    def _choice(
        self, generation: PendingChoice, generations: Sequence[PendingChoice], output: ChoiceOutput
    ) -> CompletionChoice:
        echo, logprobs = self._echoes[generation.index] if self._echoes else "", None
        if self._echoes_logprobs:
            echo, logprobs = self._echo(generation, generations)
        if self._num_top is not None:
            logprobs = completion_logprobs(output.logprobs, self._as_ids, len(echo), logprobs)
        return CompletionChoice(
            index=generation.index,
            text=echo + output.text,
            logprobs=logprobs,
            finish_reason=finish_reason(output),
            stop_reason=stop_reason(output),
            prompt_token_ids=generation.prompt_token_ids if self._return_token_ids else UNSET,
            token_ids=list(output.token_ids) if self._return_token_ids else UNSET,
            prompt_logprobs=UNSET
            if self._num_prompt_top is None
            else prompt_logprobs(logprobs_of_prompt(generation, generations), self._num_prompt_top),
        )

    def _echo(self, generation: PendingChoice, generations: Sequence[PendingChoice]) -> tuple[str, CompletionLogprobs]:
        """Returns the prompt with its log probabilities, which at least one of these generations has."""
        found = logprobs_of_prompt(generation, generations)
        logprobs = echoed_logprobs(found, generation.prompt_token_ids, self._num_top or 0, self._as_ids)
        return found.text if found is not None else "", logprobs


def _end_of(output: ChoiceOutput) -> ChoiceOutput:
    """Returns an output without the one token that is always generated."""
    is_last = output.finish_reason
    return GenerateResponse(finish_reason=common_pb2.FINISH_REASON_LENGTH if is_last else None)
