"""Mixed traffic of many clients at once: some disconnect, and some send wrong requests."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import httpx

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
_SENTENCES = (
    "The harbour was quiet before dawn, and the boats lay side by side.",
    "A train left for the mountains every second hour, full of skis and soup.",
    "Nobody remembered who had planted the pear tree behind the school.",
    "The recipe asks for more salt than anybody would believe.",
)
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["name", "ok"],
    "additionalProperties": False,
}

Send = Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]


class Unexpected(Exception):
    """An answer that the request does not deserve."""


async def _post(
    http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int = 200, key: str | None = None
) -> Any:
    """key: of idempotency."""
    headers = {} if key is None else {"Idempotency-Key": key}
    response = await http.post(path, json=body, headers=headers)
    if response.status_code != status:
        raise Unexpected(f"{path} answers {response.status_code} to {str(body)[:200]}: {response.text[:300]}")
    return response.json()


def _prompt(rng: random.Random, num_sentences: int) -> str:
    return f"Note {rng.randrange(10**9)}. " + " ".join(rng.choices(_SENTENCES, k=num_sentences))


def _messages(rng: random.Random, num_sentences: int = 2) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": "You are a helpful assistant. " + " ".join(_SENTENCES)},
        {"role": "user", "content": _prompt(rng, num_sentences)},
    ]


def _length(rng: random.Random) -> dict[str, Any]:
    return {"max_tokens": rng.randrange(1, 48), "seed": rng.randrange(2**31)}


async def chat(http: httpx.AsyncClient, rng: random.Random) -> None:
    await _post(http, CHAT, {"messages": _messages(rng)} | _length(rng))


async def stopped(http: httpx.AsyncClient, rng: random.Random) -> None:
    await _post(http, TEXT, {"prompt": _prompt(rng, 1), "stop": [".", "\n\n", "the end"]} | _length(rng))


async def several(http: httpx.AsyncClient, rng: random.Random) -> None:
    body = {"prompt": _prompt(rng, 1), "n": 2, "logprobs": 3, "temperature": 0.9} | _length(rng)
    answer = await _post(http, TEXT, body)
    if len(answer["choices"]) != 2:
        raise Unexpected(f"{len(answer['choices'])} choices of 2")


async def long_prompt(http: httpx.AsyncClient, rng: random.Random) -> None:
    await _post(http, TEXT, {"prompt": _prompt(rng, rng.choice((40, 80))), "max_tokens": 8})


async def grammar(http: httpx.AsyncClient, rng: random.Random) -> None:
    """Asks for JSON of many schemas, so that some are compiled anew and some are cached."""
    schema = _SCHEMA | {"title": f"t{rng.randrange(200)}"}
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    await _post(http, CHAT, {"messages": _messages(rng, 1), "response_format": form} | _length(rng))


async def stream(http: httpx.AsyncClient, rng: random.Random) -> None:
    await _stream(http, {"messages": _messages(rng)} | _length(rng), None)


async def leave(http: httpx.AsyncClient, rng: random.Random) -> None:
    """Disconnects in the middle of a stream."""
    await _stream(http, {"messages": _messages(rng), "max_tokens": 200, "ignore_eos": True}, rng.randrange(1, 20))


async def _stream(http: httpx.AsyncClient, body: dict[str, Any], leave_after: int | None) -> None:
    async with http.stream("POST", CHAT, json=body | {"stream": True}) as response:
        if response.status_code != 200:
            raise Unexpected(f"a stream begins with {response.status_code}: {(await response.aread())[:300]!r}")
        num_events = 0
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                return
            if line.startswith("data: ") and "error" in (event := json.loads(line[6:])):
                raise Unexpected(f"an error in a stream: {event}")
            num_events += bool(line)
            if leave_after is not None and num_events > leave_after:
                return
    if leave_after is None:
        raise Unexpected("a stream ends without its end")


async def give_up(http: httpx.AsyncClient, rng: random.Random) -> None:
    """Disconnects before a whole answer comes."""
    task = asyncio.create_task(_post(http, TEXT, {"prompt": _prompt(rng, 2), "max_tokens": 300, "ignore_eos": True}))
    await asyncio.sleep(rng.random())
    task.cancel()
    await asyncio.wait([task])


async def wrong(http: httpx.AsyncClient, rng: random.Random) -> None:
    body = rng.choice(({"prompt": 5}, {"prompt": "p", "temperature": -1}, {"prompt": "p", "nonsense": 1}, {}))
    await _post(http, TEXT, body, 400)


async def tokenize(http: httpx.AsyncClient, rng: random.Random) -> None:
    tokens = (await _post(http, "/tokenize", {"prompt": _prompt(rng, 10)}))["tokens"]
    await _post(http, "/detokenize", {"tokens": tokens})


async def kept(http: httpx.AsyncClient, rng: random.Random) -> None:
    key, body = f"k{rng.randrange(10**9)}", {"prompt": _prompt(rng, 1), "max_tokens": 8}
    first = await _post(http, TEXT, body, key=key)
    if (again := await _post(http, TEXT, body, key=key))["choices"] != first["choices"]:
        raise Unexpected(f"two answers for one key: {first} and {again}")


# How often each, of the sum.
MIX: dict[Send, int] = {
    chat: 4, stream: 4, stopped: 2, several: 2, long_prompt: 2, grammar: 2, leave: 3, give_up: 2, wrong: 1, tokenize: 1,
    kept: 1,
}  # fmt: skip


class Traffic:
    """Runs clients, each with one request at a time. `counts` and `problems` are by kind."""

    def __init__(self, num_clients: int, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self._clients = [random.Random(seed * 1000 + number) for number in range(num_clients)]

    async def run(self, url: httpx.URL, seconds: float) -> None:
        """Begins nothing after so many seconds, and waits for what is on its way. No connection is left open."""
        deadline = asyncio.get_running_loop().time() + seconds
        async with httpx.AsyncClient(base_url=url, timeout=120, limits=httpx.Limits(max_connections=None)) as http:
            await asyncio.gather(*(self._client(http, rng, deadline) for rng in self._clients))

    async def _client(self, http: httpx.AsyncClient, rng: random.Random, deadline: float) -> None:
        kinds, weights = list(MIX), list(MIX.values())
        while asyncio.get_running_loop().time() < deadline:
            (send,) = rng.choices(kinds, weights)
            self.counts[send.__name__] += 1
            try:
                await send(http, rng)
            except (Unexpected, httpx.HTTPError) as error:
                self.problems.append(f"{send.__name__}: {type(error).__name__}: {error}")
