"""The requests of schedules: of every kind that goes through the line, with seeds, so that each has one answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.e2e.prompts import PROMPTS
from tests.e2e.recovery.test_recovery import STRUCTURED, TOOL

MESSAGES = [{"role": "user", "content": "Tell me of the sea."}]
CHOSEN = {"temperature": 0.8, "seed": 7, "ignore_eos": True}
LONG: dict[str, Any] = {**CHOSEN, "max_tokens": 80}
GREEDY = {"temperature": 0}
TOKENS = {"max_output_tokens": 80}
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
WORDS = {"structured_outputs": {"regex": "([a-z]{2,9} ){6,30}end"}}
MANY_TEXTS = [f"{prompt} {number}" for number in range(20) for prompt in PROMPTS[:16]]


@dataclass(frozen=True)
class Request:
    """The body to post; a batch or a background response is then polled until it has ended."""

    path: str
    body: dict[str, Any]
    is_batch: bool = False  # the body is that of one of its lines

    @property
    def begins_again(self) -> bool:
        """Returns whether the gateway makes a call of its own for it, and repeats that if the tokenizer service
        dies."""
        is_search = bool(self.body.get("use_beam_search") or self.body.get("best_of"))
        return is_search or self.path in ("embeddings", "score", "rerank")

    @property
    def is_stream(self) -> bool:
        return bool(self.body.get("stream"))


def _chat(**body: Any) -> Request:
    return Request("chat/completions", {"messages": MESSAGES} | LONG | body)


def _completion(prompt: Any, **body: Any) -> Request:
    return Request("completions", {"prompt": prompt} | LONG | body)


TEXT: dict[str, Request] = {
    "chat": _chat(**STREAM),
    "chat-greedy": _chat(**STREAM, temperature=0),
    "chat-whole": _chat(n=2),
    "chat-n2-logprobs": _chat(**STREAM, n=2, logprobs=True, top_logprobs=2),
    "completion-prompts": _completion(["Once", "The sea"], **STREAM, n=2),
    "completion-logprobs": _completion("One, two,", **STREAM, logprobs=3),
    "completion-echo": _completion(PROMPTS[16], **STREAM, echo=True, logprobs=1),
    "completion-scored": _completion(PROMPTS[16] * 2, max_tokens=0, echo=True, logprobs=0),
    "completion-whole-logprobs": _completion("Red, green,", logprobs=2, n=2),
    "stop-hit": _completion("Twenty little", **STREAM, stop=["qu", "xi", "oo"]),
    "stop-included": _completion("Ten little", **STREAM, stop=["am", "ei"], include_stop_str_in_output=True),
    "stop-never": _completion("Ten little", **STREAM, stop=["never to be seen"]),
    "stop-tokens": _completion("Ten little", **STREAM, stop_token_ids=list(range(1000, 1900))),
    "long-prompt": _completion(PROMPTS[16] * 20, **STREAM, max_tokens=40),
    "long-prompt-whole": _completion(PROMPTS[17] * 8, max_tokens=30),
    "token-ids": _completion([11, 12, 13, 14], **STREAM, return_token_ids=True),
    "penalties": _completion("A, A, A,", **STREAM, bad_words=["the", "and"], frequency_penalty=0.4),
    "best-of": _completion("The best", n=1, best_of=3),
    "beams": _completion("The best", n=2, use_beam_search=True, temperature=0, max_tokens=12),
    "tool": _chat(**STREAM, tools=[TOOL], tool_choice="required", max_tokens=200, ignore_eos=False),
    "tool-whole": _chat(tools=[TOOL], tool_choice="required", max_tokens=200, ignore_eos=False),
    "json": _completion("Steps:", **STREAM, **STRUCTURED),
    "regex": _completion("Words:", **STREAM, **WORDS, ignore_eos=False),
    "message": Request("messages", {"messages": MESSAGES, "max_tokens": 80} | GREEDY | {"stream": True}),
    "response": Request("responses", {"input": "The sea?", "store": False, "stream": True} | GREEDY | TOKENS),
}  # fmt: skip
RARE: dict[str, Request] = {
    "background": Request("responses", {"input": "The sky?", "background": True} | GREEDY | TOKENS),
    "batch": Request("completions", {"model": "m", "prompt": "Batches of", **LONG, "max_tokens": 30}, is_batch=True),
}
VECTORS: dict[str, Request] = {
    "embeddings": Request("embeddings", {"input": PROMPTS[:16]}),
    "embeddings-many": Request("embeddings", {"input": MANY_TEXTS}),
    "embeddings-base64": Request("embeddings", {"input": PROMPTS[4:9], "encoding_format": "base64"}),
    "embeddings-long": Request("embeddings", {"input": [PROMPTS[16] * 16, PROMPTS[17] * 4]}),
    "score": Request("score", {"text_1": "the sea", "text_2": PROMPTS[:12]}),
    "rerank": Request("rerank", {"query": "the sea", "documents": PROMPTS[:12]}),
}
ALL = TEXT | RARE | VECTORS
