"""OpenAI request bodies to GenerateRequests. Only what the client gave is set: defaults are applied upstream."""

import json
import secrets
from collections.abc import Sequence

from pagewire.config.sampling_params import BY_NAME, seed_of_choice
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.generation.grammar import grammar_of
from pagewire.gateway.generation.searches import is_search
from pagewire.gateway.generation.tools import choose_tools, output_parsing, wire_call, wire_tools
from pagewire.gateway.schema.chat_messages import ChatPromptParameters, ImagePart, Message, TextPart
from pagewire.gateway.schema.requests import (
    ChatCompletionRequest,
    CompletionRequest,
    GenerationParameters,
    TokenizeRequest,
)
from pagewire.v1 import common_pb2, inference_pb2

COMPLETION_MAX_TOKENS = 16
# Prompts times choices of one HTTP request; more would be a batch job in the way of everybody else.
MAX_GENERATIONS = 1024
# Of all choices: each carries the prompt, images included.
MAX_CHOICES_BYTES = 128 * 1024 * 1024


def chat_requests(body: ChatCompletionRequest) -> list[inference_pb2.GenerateRequest]:
    """One request per choice."""
    max_tokens = body.max_tokens
    if body.max_completion_tokens is not None:
        if max_tokens not in (None, body.max_completion_tokens):
            raise ApiError(
                400, "max_tokens and max_completion_tokens differ: give one of them", param="max_completion_tokens"
            )
        max_tokens = body.max_completion_tokens
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    request = _request(body, max_tokens, logprobs)
    choose_tools(body)
    request.chat.CopyFrom(chat_prompt(body.messages, body))
    if body.tool_choice == "none":
        del request.chat.tools[:]  # a model that does not see them calls none
    request.output_parsing.CopyFrom(output_parsing(body))
    if body.add_special_tokens is not None:
        request.add_special_tokens = body.add_special_tokens
    return _choices(request, body)


def completion_requests(body: CompletionRequest) -> list[inference_pb2.GenerateRequest]:
    """One request per prompt and choice: the choices of the first prompt, then those of the second, ..."""
    # One token is always generated.
    max_tokens = COMPLETION_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    requests = []
    prompts = as_list(body.prompt)
    count, factor = (body.n or 1, "n") if body.best_of is None else (body.best_of, "best_of")
    if (total := len(prompts) * count) > MAX_GENERATIONS:
        message = (
            f"the request asks for {total} completions (prompts times {factor}); at most {MAX_GENERATIONS} are possible"
        )
        raise ApiError(400, message, param="prompt")
    for prompt in prompts:
        request = _request(body, max_tokens, body.logprobs)
        if body.echo and body.logprobs is not None:
            params = request.sampling_params
            params.prompt_logprobs = max(body.logprobs, params.prompt_logprobs)
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        if body.add_special_tokens is not None:
            request.add_special_tokens = body.add_special_tokens
        if body.best_of is not None and body.best_of > (body.n or 1):
            request.best_of = body.best_of
        requests.extend(_choices(request, body))
    return requests


def as_list(prompts: str | list[int] | list[str] | list[list[int]]) -> Sequence[str | list[int]]:
    """One prompt or several, each as text or token ids."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts[0], int):
        return [prompts]  # type: ignore[list-item]
    return prompts  # type: ignore[return-value]


def tokenize_requests(body: TokenizeRequest) -> list[inference_pb2.TokenizeRequest]:
    """One for each text."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError(400, "give either prompt or messages", param="prompt")
    request = inference_pb2.TokenizeRequest(model=body.model or "", return_token_strs=bool(body.return_token_strs))
    if body.messages is not None:
        request.chat.CopyFrom(chat_prompt(body.messages, body))
    if body.add_special_tokens is not None:
        request.add_special_tokens = body.add_special_tokens
    requests = []
    for text in [body.prompt] if body.prompt is None or isinstance(body.prompt, str) else body.prompt:
        one = inference_pb2.TokenizeRequest()
        one.CopyFrom(request)
        if text is not None:
            one.text = text
        requests.append(one)
    return requests


def chat_prompt(messages: Sequence[Message], body: ChatPromptParameters) -> inference_pb2.ChatPrompt:
    prompt = inference_pb2.ChatPrompt(messages=map(_message, messages))
    if body.continue_final_message:
        if body.add_generation_prompt:
            raise ApiError(400, "continue_final_message excludes add_generation_prompt", param="continue_final_message")
        prompt.continue_final_message = True
        prompt.add_generation_prompt = False
    elif body.add_generation_prompt is not None:
        prompt.add_generation_prompt = body.add_generation_prompt
    prompt.chat_template = body.chat_template or ""
    kwargs = {"verbosity": body.verbosity} if body.verbosity is not None else {}
    if kwargs := kwargs | (body.chat_template_kwargs or {}):
        prompt.chat_template_kwargs_json = json.dumps(kwargs)
    prompt.tools.extend(wire_tools(body.tools or ()))
    prompt.documents_json.extend(map(json.dumps, body.documents or ()))
    if body.reasoning_effort is not None:
        prompt.reasoning_effort = body.reasoning_effort
    return prompt


def _message(message: Message) -> inference_pb2.ChatMessage:
    result = inference_pb2.ChatMessage(role=message.role)
    if message.name is not None:
        result.name = message.name
    if isinstance(message.content, str):
        result.content = message.content
    else:
        result.parts.extend(map(_part, message.content or ()))
    result.tool_calls.extend(map(wire_call, message.tool_calls or ()))
    if message.tool_call_id is not None:
        result.tool_call_id = message.tool_call_id
    if (reasoning := message.reasoning or message.reasoning_content) is not None:
        result.reasoning = reasoning
    return result


def _part(part: TextPart | ImagePart) -> inference_pb2.ContentPart:
    if isinstance(part, TextPart):
        return inference_pb2.ContentPart(text=part.text)
    return inference_pb2.ContentPart(image=inference_pb2.ImageSource(url=part.image_url.url))


def _request(body: GenerationParameters, max_tokens: int | None, logprobs: int | None) -> inference_pb2.GenerateRequest:
    """Everything but the prompt and the seed."""
    if max_tokens is not None and (body.min_tokens or 0) > max_tokens:
        raise ApiError(400, f"min_tokens {body.min_tokens} is greater than max_tokens {max_tokens}", param="min_tokens")
    values = {name: getattr(body, name) for name in BY_NAME} | {"max_tokens": max_tokens, "logprobs": logprobs}
    request = inference_pb2.GenerateRequest(
        model=body.model or "",
        stop=[body.stop] if isinstance(body.stop, str) else body.stop,
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        cache_salt=body.cache_salt,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        truncate_end=body.truncation_side == "right",
        sampling_params=common_pb2.SamplingParams(
            **values,
            stop_token_ids=body.stop_token_ids,
            allowed_token_ids=body.allowed_token_ids,
            grammar=grammar_of(body),
        ),
        bad_words=body.bad_words,
        thinking_token_budget=None if body.thinking_token_budget == -1 else body.thinking_token_budget,
    )
    for token_id, bias in (body.logit_bias or {}).items():
        request.sampling_params.logit_bias_ids.append(int(token_id))
        request.sampling_params.logit_bias_values.append(bias)
    if body.skip_special_tokens is not None:
        request.skip_special_tokens = body.skip_special_tokens
    if body.use_beam_search:
        search = inference_pb2.BeamSearch(length_penalty=body.length_penalty, early_stopping=bool(body.early_stopping))
        request.beam_search.CopyFrom(search)
    return request


def _choices(request: inference_pb2.GenerateRequest, body: GenerationParameters) -> list[inference_pb2.GenerateRequest]:
    """n requests that differ in their seeds, or n times the same one that searches for them.

    A seed is drawn here when the client gives none, so that a request that has to be submitted a second time goes on
    with the same random stream.
    """
    if (size := request.ByteSize() * (body.n or 1)) > MAX_CHOICES_BYTES:
        message = f"{body.n} choices of this request are {size} bytes; at most {MAX_CHOICES_BYTES} are possible"
        raise ApiError(400, message, param="n")
    seed = secrets.randbits(63) if body.seed is None else body.seed
    if is_search(request):
        request.n = body.n or 1
        request.sampling_params.seed = seed
        return [request] * request.n
    requests = []
    for choice in range(body.n or 1):
        one = inference_pb2.GenerateRequest()
        one.CopyFrom(request)
        if choice and not body.stream:  # the first one is told for all
            one.sampling_params.ClearField("prompt_logprobs")
        one.sampling_params.seed = seed_of_choice(seed, choice)
        requests.append(one)
    return requests
