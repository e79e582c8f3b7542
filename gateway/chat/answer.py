"""Answers to /v1/chat/completions."""

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Literal

from msgspec import UNSET, UnsetType

from pagewire.gateway.chat.bodies import (
    AssistantMessage,
    ChatChoice,
    ChatChunkChoice,
    ChatCompletion,
    ChatCompletionChunk,
    ChatCompletionRequest,
    ChatDelta,
    ChatFinishReason,
    FunctionCall,
    FunctionCallChunk,
    ToolCall,
    ToolCallChunk,
)
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.outputs import ChoiceOutput
from pagewire.gateway.core.reply import PendingChoice
from pagewire.gateway.generation.answer import fingerprint, finish_reason, stop_reason, version_of
from pagewire.gateway.generation.chunks import ChunkWriter
from pagewire.gateway.generation.head import Head
from pagewire.gateway.generation.logprobs import chat_logprobs, logprobs_of_prompt, prompt_logprobs
from pagewire.gateway.generation.tool_calls import whole_calls
from pagewire.gateway.generation.usage import UsageTotal
from pagewire.v1.inference_pb2 import ToolCallDelta


class ChatAnswer:
    operation = "chat"

    def __init__(self, body: ChatCompletionRequest, head: Head) -> None:
        self._logprobs = bool(body.logprobs)
        self._num_prompt_top = body.prompt_logprobs
        self._as_ids = bool(body.return_tokens_as_token_ids)
        self._return_token_ids = bool(body.return_token_ids)
        self._has_token_data = self._logprobs or self._return_token_ids
        self._has_functions = bool(body.functions)
        self._include_reasoning = body.include_reasoning is not False
        self._head, self.id = head, head.id
        # There is one tier. The answer names it if the request names any.
        self._tier: Literal["default"] | UnsetType = UNSET if body.service_tier is None else "default"
        chunk = ChatCompletionChunk(
            id=head.id, created=head.created, model=head.model, choices=[], service_tier=self._tier
        )
        self._writer = ChunkWriter(chunk, body.stream_options, head.style)
        # Reused for each token: making the two objects takes as long as encoding them.
        self._delta_choice = ChatChunkChoice(index=0, delta=ChatDelta(content=""))

    def start(self, out: list[bytes], generations: Sequence[PendingChoice], usage: UsageTotal) -> None:
        extra = {}
        if self._return_token_ids:
            # All choices have the same prompt, which came with the first output of one of them.
            extra["prompt_token_ids"] = next((g.prompt_token_ids for g in generations if g.prompt_token_ids), [])
        delta = ChatDelta(role="assistant", content="")
        for generation in generations:
            self._writer.chunk(
                out, ChatChunkChoice(index=generation.index, delta=delta), usage, extra, version_of(generation)
            )

    def delta(self, out: list[bytes], generation: PendingChoice, output: ChoiceOutput, usage: UsageTotal) -> None:
        if output.reasoning or output.tool_calls:
            self._parsed_delta(out, generation, output, usage)
        elif output.text or output.logprobs or (self._return_token_ids and output.token_ids):
            choice = self._delta_choice
            choice.index, choice.delta.content = generation.index, output.text
            if self._logprobs:
                choice.logprobs = chat_logprobs(output.logprobs, self._as_ids)
            if self._return_token_ids:
                choice.token_ids = list(output.token_ids)
            self._writer.chunk(out, choice, usage, version=version_of(generation))
        if output.finish_reason:
            choice = ChatChunkChoice(
                index=generation.index,
                delta=ChatDelta(),
                finish_reason=self._finish_reason(output),
                stop_reason=stop_reason(output),
            )
            self._writer.chunk(out, choice, usage, version=version_of(generation))

    def _parsed_delta(
        self, out: list[bytes], generation: PendingChoice, output: ChoiceOutput, usage: UsageTotal
    ) -> None:
        """Writes a chunk for reasoning, for text and for each piece of a call; the first has the data of tokens."""
        deltas = []
        if output.reasoning and self._include_reasoning:
            deltas.append(ChatDelta(reasoning=output.reasoning, reasoning_content=output.reasoning))
        if output.text or (self._has_token_data and not deltas and not output.tool_calls):
            deltas.append(ChatDelta(content=output.text))
        deltas += map(self._call_delta, _call_chunks(output.tool_calls))
        for position, delta in enumerate(deltas):
            choice = ChatChunkChoice(index=generation.index, delta=delta)
            if not position and self._logprobs:
                choice.logprobs = chat_logprobs(output.logprobs, self._as_ids)
            if not position and self._return_token_ids:
                choice.token_ids = list(output.token_ids)
            self._writer.chunk(out, choice, usage, version=version_of(generation))

    def _call_delta(self, chunk: ToolCallChunk) -> ChatDelta:
        return ChatDelta(function_call=chunk.function) if self._has_functions else ChatDelta(tool_calls=[chunk])

    def end(self, out: list[bytes], usage: UsageTotal) -> None:
        self._writer.end(out, usage, metrics=self._head.metrics)

    def error(self, out: list[bytes], error: ApiError) -> None:
        self._writer.error(out, error)

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: UsageTotal
    ) -> ChatCompletion:
        return ChatCompletion(
            id=self._head.id,
            created=self._head.created,
            model=self._head.model,
            system_fingerprint=self._head.style.fingerprint(fingerprint(generations)),
            choices=[self._choice(index, output) for index, output in enumerate(outputs)],
            usage=usage.info(),
            metrics=self._head.metrics,
            service_tier=self._tier,
            prompt_token_ids=generations[0].prompt_token_ids if self._return_token_ids else UNSET,
            prompt_logprobs=UNSET
            if self._num_prompt_top is None
            else prompt_logprobs(logprobs_of_prompt(generations[0], generations), self._num_prompt_top),
        )

    def _choice(self, index: int, output: ChoiceOutput) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=self._message(output),
            logprobs=chat_logprobs(output.logprobs, self._as_ids) if self._logprobs else None,
            finish_reason=self._finish_reason(output),
            stop_reason=stop_reason(output),
            token_ids=list(output.token_ids) if self._return_token_ids else UNSET,
        )

    def _message(self, output: ChoiceOutput) -> AssistantMessage:
        message = AssistantMessage(content=output.text)
        if output.reasoning or output.tool_calls:
            message.content = output.text or None
        if output.reasoning and self._include_reasoning:
            message.reasoning = message.reasoning_content = output.reasoning
        if output.tool_calls:
            calls = [
                ToolCall(id=id, function=FunctionCall(name, text)) for id, name, text in whole_calls(output.tool_calls)
            ]
            if self._has_functions:
                message.function_call = calls[0].function
            else:
                message.tool_calls = calls
        return message

    def _finish_reason(self, output: ChoiceOutput) -> ChatFinishReason:
        reason = finish_reason(output)
        return "function_call" if reason == "tool_calls" and self._has_functions else reason


def _call_chunks(deltas: Iterable[ToolCallDelta]) -> list[ToolCallChunk]:
    """As OpenAI streams calls: the name of the function, then the arguments."""
    chunks = []
    for index, group in groupby(deltas, key=lambda delta: delta.index):
        of_call = list(group)
        first = of_call[0]
        if first.id:
            function = FunctionCallChunk(name=first.name, arguments="")
            chunks.append(ToolCallChunk(index=index, id=first.id, type="function", function=function))
        if arguments := "".join([delta.arguments for delta in of_call]):
            chunks.append(ToolCallChunk(index=index, function=FunctionCallChunk(arguments=arguments)))
    return chunks
