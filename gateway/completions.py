"""Answers to /v1/completions."""

from collections.abc import Iterable, Sequence
from typing import Any

from pagewire.gateway.answer import Head, UsageTotal, finish_reason, logprob_of, stop_reason
from pagewire.gateway.reply import ChoiceOutput, PendingChoice
from pagewire.gateway.schema import CompletionRequest
from pagewire.gateway.sse import ChunkWriter, dumps
from pagewire.v1.inference_pb2 import TokenLogprob


class CompletionAnswer:
    operation = "text_completion"

    def __init__(self, body: CompletionRequest, head: Head) -> None:
        self._logprobs = body.logprobs is not None
        self._return_token_ids = bool(body.return_token_ids)
        self._head = head
        # Characters of the text that earlier logprobs covered, by choice.
        self._offsets: dict[int, int] = {}
        # Choices whose prompt token ids were sent.
        self._prompts_sent: set[int] = set()
        options = body.stream_options
        self._writer = ChunkWriter(
            head.members("text_completion"),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        )

    def start(self, generations: Sequence[PendingChoice], usage: UsageTotal) -> str:
        return ""

    def delta(self, generation: PendingChoice, news: ChoiceOutput, usage: UsageTotal) -> str:
        index = generation.index
        events = ""
        if news.text or news.logprobs or (self._return_token_ids and news.token_ids):
            logprobs = dumps(self._logprobs_of(index, news.logprobs)) if self._logprobs else "null"
            token_ids = self._token_ids(generation, news) if self._return_token_ids else ""
            events = self._writer.chunk(
                f'{{"index":{index},"text":{dumps(news.text)},"logprobs":{logprobs},"finish_reason":null{token_ids}}}',
                usage,
            )
        if news.finish_reason:
            events += self._writer.chunk(
                f'{{"index":{index},"text":"","logprobs":null,"finish_reason":"{finish_reason(news)}"'
                f',"stop_reason":{dumps(stop_reason(news))}}}',
                usage,
            )
        return events

    def _token_ids(self, generation: PendingChoice, news: ChoiceOutput) -> str:
        token_ids = f',"token_ids":{list(news.token_ids)}'
        if generation.index in self._prompts_sent:
            return token_ids
        self._prompts_sent.add(generation.index)
        return f',"prompt_token_ids":{generation.prompt_token_ids}{token_ids}'

    def end(self, usage: UsageTotal) -> str:
        return self._writer.end(usage)

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: UsageTotal
    ) -> dict[str, Any]:
        answer = self._head.members("text_completion")
        answer["choices"] = [
            self._choice(generation, output) for generation, output in zip(generations, outputs, strict=True)
        ]
        answer["usage"] = usage.members()
        return answer

    def _choice(self, generation: PendingChoice, output: ChoiceOutput) -> dict[str, Any]:
        choice = {
            "index": generation.index,
            "text": output.text,
            "logprobs": self._logprobs_of(generation.index, output.logprobs) if self._logprobs else None,
            "finish_reason": finish_reason(output),
            "stop_reason": stop_reason(output),
        }
        if self._return_token_ids:
            choice["prompt_token_ids"] = generation.prompt_token_ids
            choice["token_ids"] = list(output.token_ids)
        return choice

    def _logprobs_of(self, index: int, tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
        """OpenAI's legacy columns. top_logprobs holds the chosen token as well, whatever its rank."""
        logprobs: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token in tokens:
            offset = self._offsets.get(index, 0)
            logprobs["tokens"].append(token.token)
            logprobs["token_logprobs"].append(logprob_of(token))
            logprobs["top_logprobs"].append({other.token: logprob_of(other) for other in (token, *token.top_logprobs)})
            logprobs["text_offset"].append(offset)
            self._offsets[index] = offset + len(token.token)
        return logprobs
