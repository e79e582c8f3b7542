"""Answers to /v1/chat/completions."""

from collections.abc import Iterable, Sequence
from typing import Any

from pagewire.gateway.answer import Head, UsageTotal, finish_reason, logprob_of, stop_reason
from pagewire.gateway.reply import ChoiceOutput, PendingChoice
from pagewire.gateway.schema import ChatCompletionRequest
from pagewire.gateway.sse import ChunkWriter, dumps
from pagewire.v1.inference_pb2 import TokenLogprob


class ChatAnswer:
    operation = "chat"

    def __init__(self, body: ChatCompletionRequest, head: Head) -> None:
        self._logprobs = bool(body.logprobs)
        self._return_token_ids = bool(body.return_token_ids)
        self._head = head
        options = body.stream_options
        self._writer = ChunkWriter(
            head.members("chat.completion.chunk"),
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.include_usage and options.continuous_usage_stats),
        )

    def start(self, generations: Sequence[PendingChoice], usage: UsageTotal) -> str:
        # All choices have one prompt; it came with the first output of any of them.
        prompt = next((g.prompt_token_ids for g in generations if g.prompt_token_ids), [])
        extra = f'"prompt_token_ids":{prompt},' if self._return_token_ids else ""
        role = '{"role":"assistant","content":""}'
        return "".join(
            self._writer.chunk(
                f'{{"index":{generation.index},"delta":{role},"logprobs":null,"finish_reason":null}}', usage, extra
            )
            for generation in generations
        )

    def delta(self, generation: PendingChoice, news: ChoiceOutput, usage: UsageTotal) -> str:
        index = generation.index
        events = ""
        if news.text or news.logprobs or (self._return_token_ids and news.token_ids):
            logprobs = dumps(_logprobs(news.logprobs)) if self._logprobs else "null"
            token_ids = f',"token_ids":{list(news.token_ids)}' if self._return_token_ids else ""
            events = self._writer.chunk(
                f'{{"index":{index},"delta":{{"content":{dumps(news.text)}}},"logprobs":{logprobs}'
                f',"finish_reason":null{token_ids}}}',
                usage,
            )
        if news.finish_reason:
            events += self._writer.chunk(
                f'{{"index":{index},"delta":{{}},"logprobs":null,"finish_reason":"{finish_reason(news)}"'
                f',"stop_reason":{dumps(stop_reason(news))}}}',
                usage,
            )
        return events

    def end(self, usage: UsageTotal) -> str:
        return self._writer.end(usage)

    def whole(
        self, generations: Sequence[PendingChoice], outputs: Sequence[ChoiceOutput], usage: UsageTotal
    ) -> dict[str, Any]:
        answer = self._head.members("chat.completion")
        answer["choices"] = [self._choice(index, output) for index, output in enumerate(outputs)]
        answer["usage"] = usage.members()
        if self._return_token_ids:
            answer["prompt_token_ids"] = generations[0].prompt_token_ids
        return answer

    def _choice(self, index: int, output: ChoiceOutput) -> dict[str, Any]:
        choice = {
            "index": index,
            "message": {"role": "assistant", "content": output.text, "refusal": None},
            "logprobs": _logprobs(output.logprobs) if self._logprobs else None,
            "finish_reason": finish_reason(output),
            "stop_reason": stop_reason(output),
        }
        if self._return_token_ids:
            choice["token_ids"] = list(output.token_ids)
        return choice


def _logprobs(tokens: Iterable[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {**_logprob(token), "top_logprobs": [_logprob(other) for other in token.top_logprobs]} for token in tokens
        ]
    }


def _logprob(token: TokenLogprob) -> dict[str, Any]:
    return {"token": token.token, "logprob": logprob_of(token), "bytes": list(token.token_bytes)}
