"""Measures many models on demand with room for few: `python -m benchmarks.scheduling.on_demand`.

Makes tiny random models, serves them with `pagewire serve --models FILE --max-loaded-models N`, and asks for them as
often as Zipf's law has it, while processes of the stack are killed. Every answer is compared with what transformers
makes of the same model (greedy, fp32). Reported: how many answers were right, other, or failed, and the time to the
first token by the state of the model when it was asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import tempfile
import time
from collections import Counter, defaultdict
from itertools import accumulate
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from benchmarks.scheduling.together import stack

PROMPT_LEN, OUTPUT_LEN = 12, 24
_SHAPE: dict[str, Any] = {
    "vocab_size": 258,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "tie_word_embeddings": False,
}


def save_models(directory: Path, count: int) -> dict[str, list[int]]:
    """Saves models model-000, model-001, ..., each in its folder; returns what each generates after prompt()."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "<s>", "</s>"])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")
    expected = {}
    for number in range(count):
        torch.manual_seed(number)
        model = LlamaForCausalLM(LlamaConfig(**_SHAPE)).eval()
        name = f"model-{number:03}"
        model.save_pretrained(directory / name)
        tokenizer.save_pretrained(directory / name)
        ids = torch.tensor([prompt()])
        with torch.inference_mode():
            model.generation_config.eos_token_id = None  # it is a token like others, as with ignore_eos
            made = model.generate(ids, max_new_tokens=OUTPUT_LEN, do_sample=False)
        expected[name] = made[0, PROMPT_LEN:].tolist()
    return expected


def prompt() -> list[int]:
    return [(7 * i + 3) % 250 for i in range(PROMPT_LEN)]


class Asking:
    """The requests, and what became of them."""

    def __init__(self, client: httpx.AsyncClient, url: str, expected: dict[str, list[int]]) -> None:
        self._client, self._url, self._expected = client, url, expected
        self.outcomes = Counter[str]()
        self.first_tokens = defaultdict[str, list[float]](list)  # by state, seconds

    async def state(self, model: str) -> str:
        answer = (await self._client.get(f"{self._url}/v1/models")).json()
        return next(str(one["state"]) for one in answer["data"] if one["id"] == model)

    async def ask(self, model: str) -> None:
        state, start = await self.state(model), time.monotonic()
        content = {"model": model, "prompt": prompt(), "max_tokens": OUTPUT_LEN, "temperature": 0, "stream": True}
        content |= {"ignore_eos": True, "return_token_ids": True}
        ids: list[int] = []
        try:
            async with self._client.stream("POST", f"{self._url}/v1/completions", json=content) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode()
                    self.outcomes[f"HTTP {answer.status_code}: {text[:200]}"] += 1
                    return
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        self.outcomes[f"error: {event['error']['message'][:200]}"] += 1
                        return
                    new = event["choices"][0].get("token_ids") if event.get("choices") else None
                    if new and not ids:
                        self.first_tokens[state].append(time.monotonic() - start)
                    ids += new or []
        except httpx.HTTPError as error:  # of a gateway that was killed
            self.outcomes[f"connection: {type(error).__name__}"] += 1
            return
        self.outcomes[self._outcome(model, ids)] += 1

    def _outcome(self, model: str, ids: list[int]) -> str:
        expected = self._expected[model]
        if ids == expected:
            return "right"
        if ids == expected[: len(ids)]:
            return f"cut off after {len(ids)} of {len(expected)} tokens, without an error"
        owner = next((name for name, other in self._expected.items() if ids == other), "")
        return f"that of {owner}" if owner else f"wrong: {model} {ids} instead of {expected}"


def services_of(stack_process: psutil.Process) -> list[psutil.Process]:
    """Returns the processes of the stack's services that may be killed: all but gateways, which hold connections."""
    services = []
    for process in stack_process.children():
        try:
            command = process.cmdline()
        except psutil.NoSuchProcess:
            continue
        if command[-1:] and "gateway" not in command:
            services.append(process)
    return services


async def kill_now_and_then(stack_process: psutil.Process, every: float, chance: random.Random) -> None:
    """Kills a process of the stack in each interval of about `every` seconds."""
    while True:
        await asyncio.sleep(chance.uniform(0.5, 1.5) * every)
        if services := services_of(stack_process):
            try:
                chance.choice(services).send_signal(signal.SIGKILL)
            except psutil.NoSuchProcess:
                continue


async def measure(process: psutil.Process, port: int, expected: dict[str, list[int]], args: argparse.Namespace) -> None:
    chance = random.Random(args.seed)
    names = sorted(expected)
    chance.shuffle(names)  # the popular ones
    weights = list(accumulate(1 / rank for rank in range(1, len(names) + 1)))
    models = iter(chance.choices(names, cum_weights=weights, k=args.requests))
    async with httpx.AsyncClient(timeout=600) as client:
        asking = Asking(client, f"http://127.0.0.1:{port}", expected)

        async def user() -> None:
            for model in models:
                await asking.ask(model)

        killing = asyncio.create_task(kill_now_and_then(process, args.kill_every, chance)) if args.kill_every else None
        start = time.monotonic()
        await asyncio.gather(*(user() for _ in range(args.users)))
        seconds = time.monotonic() - start
        if killing is not None:
            killing.cancel()
    print(f"{args.requests} requests for {args.models} models in {seconds:.0f} s")
    for outcome, count in asking.outcomes.most_common():
        print(f"{count:>6}  {outcome}")
    print(f"{'state':>10}{'requests':>10}{'p50, s':>10}{'p90, s':>10}{'most, s':>10}")
    for state, times in sorted(asking.first_tokens.items()):
        times.sort()
        p50, p90 = times[len(times) // 2], times[int(0.9 * len(times))]
        print(f"{state:>10}{len(times):>10}{p50:>10.2f}{p90:>10.2f}{times[-1]:>10.2f}")


def main(args: argparse.Namespace) -> None:
    """Measures and prints."""
    with tempfile.TemporaryDirectory() as directory:
        expected = save_models(Path(directory), args.models)
        file = Path(directory) / "models.yaml"
        entries = [{"name": name, "model": str(Path(directory) / name)} for name in expected]
        file.write_text(yaml.safe_dump({"models": entries}))
        options = [f"--models={file}", f"--max-loaded-models={args.room}", "--dtype=float32"]
        options += ["--kv-cache-memory-bytes=16MiB", "--max-num-seqs=8", "--spec-method=none"]
        with stack((), options) as (process, port):
            asyncio.run(measure(process, port, expected, args))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=int, default=100)
    parser.add_argument("--room", type=int, default=3, help="models in memory at once")
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--users", type=int, default=3)
    parser.add_argument("--kill-every", type=float, default=0.0, help="seconds between two deaths; 0: none")
    parser.add_argument("--seed", type=int, default=1)
    main(parser.parse_args())
