"""Every route of the gateway: bodies that are almost right, and bytes that are hardly HTTP."""

import asyncio
import contextlib
import json
import re
from typing import Any

import httpx

from tests.chaos.fuzz.line import CASE_TIMEOUT_S, Finding, FuzzLine
from tests.chaos.fuzz.mutation import Mutator

_MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
_TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
_SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^[a-z]+$"}}, "required": ["a"]}
_CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
# route -> valid bodies
BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        {"messages": _MESSAGES, "max_tokens": 4, "stop": ["."], "logprobs": True, "top_logprobs": 2, "n": 2},
        {"messages": _MESSAGES, "max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}},
        {
            "messages": [*_MESSAGES, {"role": "assistant", "tool_calls": [_CALL]},
                         {"role": "tool", "tool_call_id": "c", "content": "4"}],
            "tools": [_TOOL], "tool_choice": "auto", "max_tokens": 4,
        },
        {
            "messages": _MESSAGES, "max_completion_tokens": 4, "logit_bias": {"5": -100}, "seed": 3, "user": "u",
            "response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": _SCHEMA, "strict": True}},
        },
        {"messages": _MESSAGES, "chat_template": "{% for m in messages %}{{ m.role }}{% endfor %}", "max_tokens": 2},
    ],
    "/v1/completions": [
        {"prompt": "Once", "max_tokens": 4, "logprobs": 2, "echo": True, "temperature": 0.5, "top_p": 0.5},
        {"prompt": ["a", "b"], "max_tokens": 4, "n": 2, "best_of": 3, "stop": ["x"], "stream": False},
        {"prompt": [1, 2, 3], "max_tokens": 4, "stream": True, "min_tokens": 2, "presence_penalty": 1},
        {"prompt": "p", "max_tokens": 4, "structured_outputs": {"regex": "[a-z]{3}"}, "prompt_logprobs": 1},
        {"prompt": "p", "max_tokens": 4, "use_beam_search": True, "n": 2, "length_penalty": 1.5},
    ],
    "/v1/responses": [
        {"input": "Hi", "max_output_tokens": 4, "store": True, "instructions": "Be brief."},
        {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}], "stream": True},
        {"input": "Hi", "tools": [{"type": "function", "name": "f", "parameters": {}}], "previous_response_id": "r"},
    ],
    "/v1/responses/input_tokens": [{"input": "Hi"}],
    "/v1/messages": [
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "system": "Be brief."},
        {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4, "stream": True},
    ],
    "/v1/messages/count_tokens": [{"model": "m", "messages": [{"role": "user", "content": "Hi"}]}],
    "/generate": [{"text": "Hi", "sampling_params": {"max_new_tokens": 4, "stop": "."}, "return_logprob": True}],
    "/tokenize": [{"prompt": "Hi", "return_token_strs": True}, {"messages": _MESSAGES}],
    "/detokenize": [{"tokens": [1, 2, 3]}],
    "/v1/embeddings": [{"input": ["a", "b"], "encoding_format": "base64", "dimensions": 4}],
    "/v2/embed": [{"texts": ["a"], "embedding_types": ["float"]}],
    "/pooling": [{"input": "a", "task": "embed"}],
    "/classify": [{"input": ["a"]}],
    "/score": [{"text_1": "a", "text_2": ["b"]}],
    "/rerank": [{"query": "a", "documents": ["b"]}],
    "/abort_requests": [{"request_ids": ["r"]}],
    "/v1/batches": [{"input_file_id": "f", "endpoint": "/v1/chat/completions", "completion_window": "24h"}],
}  # fmt: skip
_PATHS = (
    "/v1/models",
    "/v1/models/m",
    "/v1/files?limit=3&after=x",
    "/v1/files/f",
    "/v1/files/f/content",
    "/v1/batches",
    "/v1/responses/r?stream=true&starting_after=1",
    "/v1/responses/r/input_items?limit=2",
    "/version",
    "/docs",
    "/metrics",
    "/v1/status",
    "/load",
    "/page/app.js",
    "/openapi.json",
    "/v1/responses/r",
    "/server_info",
)
# A 501 says that a route is not served.
_ALLOWED = (501,)
_STATUS = re.compile(rb"^HTTP/1\.[01] (\d{3}) ", re.MULTILINE)


async def fuzz(line: FuzzLine, seed: int) -> None:
    """One case. Raises Finding."""
    mutator = Mutator(seed)
    try:
        async with asyncio.timeout(CASE_TIMEOUT_S):
            await mutator.random.choice((fuzz_body, fuzz_body, fuzz_body, _fuzz_bytes))(line.http, mutator)
    except TimeoutError as error:
        raise Finding("no answer, or no end of it") from error


async def fuzz_body(http: httpx.AsyncClient, mutator: Mutator) -> None:
    """One request with a body. Raises Finding."""
    path = mutator.random.choice([*BODIES])
    body = mutator.json(mutator.random.choice(BODIES[path]))
    content = json.dumps(body, ensure_ascii=mutator.is_so(0.5)).encode("utf-8", "surrogatepass")
    if mutator.is_so(0.1):
        content = mutator.bytes(content)
    headers = {"content-type": "application/json"} | _more_headers(mutator)
    try:
        response = await http.post(path, content=content, headers=headers)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise Finding(f"POST {path} {content!r:.2000}: {type(error).__name__}: {error}") from error
    if response.status_code >= 500 and response.status_code not in _ALLOWED:
        raise Finding(f"POST {path} {content!r:.2000} {headers}: {response.status_code} {response.text}")
    for problem in _server_errors(response):
        raise Finding(f"POST {path} {content!r:.2000}: {problem}")


def _more_headers(mutator: Mutator) -> dict[str, str]:
    """Each of them now and then."""
    names = (
        "idempotency-key",
        "last-event-id",
        "x-request-id",
        "x-request-timeout",
        "traceparent",
        "anthropic-version",
    )
    text = mutator.text().encode("ascii", "ignore").decode().translate(dict.fromkeys(range(32)))
    return {name: text[:200].strip() for name in names if mutator.is_so(0.05)}


def _server_errors(response: httpx.Response) -> list[str]:
    """What a stream says of errors that are the server's."""
    if "text/event-stream" not in response.headers.get("content-type", ""):
        if "json" in response.headers.get("content-type", ""):
            response.json()
        return []
    events = [line[6:] for line in response.text.splitlines() if line.startswith("data: {")]
    errors = [error for event in events if isinstance(error := json.loads(event).get("error"), dict)]
    return [str(error) for error in errors if error.get("code") in (500, "500") or error.get("type") == "api_error"]


async def _fuzz_bytes(http: httpx.AsyncClient, mutator: Mutator) -> None:
    """Some requests on one connection, with errors; the client then says no more."""
    requests = b"".join(_request(mutator) for _ in range(mutator.random.choice((1, 1, 2, 3))))
    data = mutator.bytes(requests)
    reader, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
    answer = b""
    try:
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
            writer.write_eof()
            answer = await reader.read()
    finally:
        writer.close()
    statuses = [int(status) for status in _STATUS.findall(answer)]
    if wrong := [status for status in statuses if status >= 500 and status not in (*_ALLOWED, 505)]:
        raise Finding(f"{data!r}: {wrong}")


def _request(mutator: Mutator) -> bytes:
    if mutator.is_so(0.4):
        path = mutator.random.choice(_PATHS)
        method = mutator.random.choice(("GET", "GET", "HEAD", "DELETE", "OPTIONS", "PUT", "FUZZ"))
        return f"{method} {path} HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n".encode()
    path = mutator.random.choice([*BODIES])
    body = json.dumps(mutator.random.choice(BODIES[path])).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    if mutator.is_so(0.3):
        return f"{head}Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
