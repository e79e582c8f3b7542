"""Drafts over real processes: whatever dies or is replaced in mid-stream, clients receive what they receive without."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.line import Line, running_line
from tests.e2e.recovery.test_weights import replace
from tests.services.executor.helpers.constrained import EOS, VOCAB_SIZE, save_constrained
from tests.services.executor.models.tiny import save_tiny
from tests.services.executor.service.test_replacement import save_other

PLAIN = ["--dtype", "float32", "--num-gpu-blocks-override", "200", "--num-threads", "1"]
DRAFTS = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1, "adaptive": false}'
KEYS = ["first_name", "last_name", "favourite_colour"]
PERSON = {
    "type": "object",
    "properties": {key: {"enum": ["one", "two words", "and three of them"]} for key in KEYS},
    "required": KEYS,
    "additionalProperties": False,
}
# Fields of requests.
KINDS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.7, "seed": 1, "logprobs": 2},
    {"temperature": 0.9, "seed": 2, "presence_penalty": 0.5, "logit_bias": {"300": 2}},
    {"temperature": 0.8, "seed": 3, "extra_body": {"min_tokens": 20, "bad_words": ["the"], "stop_token_ids": [7]}},
    {"temperature": 1.0, "seed": 4, "stop": ["a", "e", "i", "o"]},
    {"temperature": 0, "extra_body": {"structured_outputs": {"json": {"type": "array", "items": PERSON}}}},
]


@dataclass(frozen=True)
class Received:
    """A completion as a client received it."""

    version: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[str, ...]  # tokens that have some
    finish_reason: str


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("drafts")
    save_tiny(root / "a", "Llama", vocab_size=VOCAB_SIZE, eos_token_id=EOS, max_position_embeddings=512)
    save_constrained(root / "a")
    save_other(root / "a", root / "b")
    return {name: root / name for name in ("a", "b")}


@pytest.fixture(scope="module")
def small_line(sockets: Path, checkpoints: dict[str, Path]) -> Iterator[Line]:
    with running_line(sockets, str(checkpoints["a"]), executor=PLAIN) as line:
        yield line


async def completion(client: openai.AsyncOpenAI, kind: int) -> Received:
    fields = KINDS[kind] | {"extra_body": {"return_token_ids": True} | KINDS[kind].get("extra_body", {})}
    received = await client.completions.create(
        model="m", prompt=f"One and {kind}, one and", max_tokens=60, stream=True, **fields
    )
    versions, text, token_ids, logprobs, reason = set[str | None](), "", list[int](), list[str](), ""
    async for event in received:
        choice = event.choices[0]
        versions.add(event.system_fingerprint)
        text += choice.text
        token_ids += getattr(choice, "token_ids", None) or []
        logprobs += choice.logprobs.tokens or [] if choice.logprobs else []
        reason = choice.finish_reason or reason
    (version,) = versions
    assert version is not None
    return Received(version, text, tuple(token_ids), tuple(logprobs), reason)


async def undisturbed(line: Line) -> list[Received]:
    async with line.openai() as client:
        return [await completion(client, kind) for kind in range(len(KINDS))]


@asynccontextmanager
async def load(line: Line) -> AsyncIterator[list[tuple[int, Received]]]:
    """Requests of all kinds, again and again; the list grows by (kind, what was received)."""
    done: list[tuple[int, Received]] = []
    leave = asyncio.Event()

    async def one_after_the_other(kind: int) -> None:
        async with line.openai() as client:
            while not leave.is_set():
                done.append((kind, await completion(client, kind)))

    tasks = [asyncio.create_task(one_after_the_other(kind)) for kind in range(len(KINDS))]
    try:
        yield done
    finally:
        leave.set()
        await asyncio.gather(*tasks)


async def test_without_a_flag_what_repeats_takes_fewer_steps(line: Line) -> None:
    async def counts() -> tuple[float, float]:
        metrics = (await line.metrics()).items()
        steps = sum(value for name, value in metrics if name.startswith("pagewire:executor_graph_steps_total"))
        accepted = sum(value for name, value in metrics if "spec_decode_num_accepted_tokens_total" in name)
        return steps, accepted

    before = await counts()
    async with line.openai() as client:
        made = await client.completions.create(
            model="m", prompt="The quick brown fox jumps over the lazy dog. " * 4, max_tokens=40, temperature=0
        )
    steps, accepted = (now - earlier for now, earlier in zip(await counts(), before, strict=True))
    assert "The quick brown fox jumps over the lazy dog." in made.choices[0].text and made.usage is not None
    assert accepted > 5 and steps < made.usage.completion_tokens


@pytest.mark.slow
async def test_clients_receive_the_same_with_and_without_drafts(small_line: Line, checkpoints: dict[str, Path]) -> None:
    line, expected = small_line, {}
    for name in ("a", "b"):
        assert (await replace(line, checkpoints[name], name)).status_code == 200
        expected[name] = await undisturbed(line)
    line.restart("executor", *PLAIN, "--speculative-config", DRAFTS)
    assert {received.finish_reason for received in expected["b"]} == {"stop", "length"}
    async with load(line) as done:

        async def until_more() -> None:
            end = len(done) + 3
            async with asyncio.timeout(60):
                while len(done) < end:  # noqa: ASYNC110 - the requests are the clients'
                    await asyncio.sleep(0.01)

        await until_more()
        for victim in ("executor", "scheduler", "tokenizer"):
            line.restart(victim)
            # A new executor gets "b" from the scheduler: before that one dies, too, however slow the machine is.
            await line.wait_ready()
            await until_more()
        assert (await replace(line, checkpoints["a"], "a")).status_code == 200
        await until_more()
    for kind, received in done:
        assert received == expected[received.version][kind]
    assert {received.version for _, received in done} == {"a", "b"}
    metrics = await line.metrics()
    accepted = sum(value for name, value in metrics.items() if "spec_decode_num_accepted_tokens_total" in name)
    assert accepted > 20, "drafts were gained on the way"
