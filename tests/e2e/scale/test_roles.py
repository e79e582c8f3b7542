"""Prompts computed on one executor go on at another, with the tokens of a single one, whichever process is killed."""

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import QUICK_EXECUTOR_FLAGS, SCHEDULER_FLAGS, short_directory
from tests.e2e.line import Line, http_client
from tests.e2e.role_line import ROLES, RoleLine, running

LONG = "The sea is wide and the ships are small. " * 30
FLAGS = [*QUICK_EXECUTOR_FLAGS, "--max-num-batched-tokens", "64"]
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 20}}, "required": ["a"]}
KINDS: list[dict[str, Any]] = [
    {"max_tokens": 30},
    {"max_tokens": 30, "temperature": 1.0, "seed": 5, "n": 2},
    {"max_tokens": 12, "logprobs": 2, "prompt_logprobs": 1},
    {"max_tokens": 60, "structured_outputs": {"json": SCHEMA}},
    {"max_tokens": 1},
    {"max_tokens": 25, "presence_penalty": 0.5, "bad_words": ["the"], "cache_salt": "mine"},
]


@pytest.fixture(scope="module")
def roles(quick_model: Path, smollm2_gguf: Path) -> Iterator[RoleLine]:
    flags = {"executor": FLAGS, "scheduler": SCHEDULER_FLAGS, "tokenizer": ["--tokenizer", str(smollm2_gguf)]}
    with short_directory() as name, running(Path(name), str(quick_model), **flags) as line:
        yield line


async def complete(line: Line, prompt: str, **options: Any) -> list[Any]:
    """Returns what clients see of the choices."""
    async with http_client(base_url=line.base_url, timeout=120) as http:
        body = {"prompt": prompt, "temperature": 0, "ignore_eos": "structured_outputs" not in options, **options}
        answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    choices = answer.json()["choices"]
    return [(one["text"], one["finish_reason"], (one["logprobs"] or {}).get("tokens")) for one in choices]


@pytest.mark.parametrize("options", KINDS, ids=lambda options: "-".join(options))
async def test_tokens_are_those_of_one_executor(roles: RoleLine, quick_line: Line, options: dict[str, Any]) -> None:
    prompt = f"{sorted(options)} {LONG}"
    assert await complete(roles, prompt, **options) == await complete(quick_line, prompt, **options)
    await roles.wait_idle()


async def test_blocks_are_sent_and_not_computed_again(roles: RoleLine) -> None:
    before = await roles.metrics()
    await complete(roles, f"Sent. {LONG}", max_tokens=8)
    after = await roles.metrics()

    def grown(metric: str, service: str, more: str = "") -> float:
        name = f'pagewire:{metric}{{address="unix:{service}.sock",service="executor"{more}}}'
        return after[name] - before.get(name, 0.0)

    num_prompt = grown("executor_step_tokens_sum", "executor")
    assert num_prompt > 300 and grown("executor_step_tokens_sum", "executor2") <= 15 + 1 + 7
    assert grown("kv_tier_hit_blocks_total", "executor2", ',tier="host"') == num_prompt // 16


async def test_whichever_executor_is_killed_streams_go_on(roles: RoleLine) -> None:
    """Deaths come at moments from a seed, while prompts and outputs of all stages are under way."""
    prompts = [f"{number}. {LONG}" for number in range(6)]
    undisturbed = [await complete(roles, prompt, max_tokens=60) for prompt in prompts]
    chance = random.Random(11)
    with roles.slow_steps(0.01):
        for service in (*ROLES, *ROLES):
            asked = [asyncio.create_task(complete(roles, f"{prompt}", max_tokens=60)) for prompt in prompts]
            await asyncio.sleep(chance.uniform(0.02, 0.4))
            roles.restart(service)
            assert await asyncio.gather(*asked) == undisturbed
            await roles.wait_ready(service)
            await roles.wait_executors(2)
