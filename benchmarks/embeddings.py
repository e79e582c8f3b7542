"""Texts per second: `python -m benchmarks.embeddings --model MODEL [--peers-python PATH] [--peers NAMES]`.

One corpus of texts of mixed lengths, through

- "executor": the texts' tokens and the executor's steps in this process, one after the other;
- "services": Embed calls over gRPC to `pagewire serve`, a few at a time;
- peers: sentence-transformers, infinity (the engine of the embedding server of this name, on torch) and fastembed (on
  onnxruntime; needs --onnx), each in a process of its own that --peers-python runs.

"vs" is the speed relative to sentence-transformers; "differs" is the greatest difference of a number in any of the
vectors from sentence-transformers'. Each runs once to warm up, then --rounds times, and the fastest round counts.
"""

import asyncio
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

import pagewire
from benchmarks.serving import server
from pagewire import flags
from pagewire.client import Client
from pagewire.config import ExecutorConfig, ServeConfig
from pagewire.config.fields import POSITIVE, flag
from pagewire.config.sampling_params import with_defaults
from pagewire.files.models import resolve_model
from pagewire.process.process import usable_cores
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.start.startup import start_runner
from pagewire.services.executor.step.step import NewRequest, Step
from pagewire.services.tokenizer.pool.codec import Codec, CodecSource
from pagewire.services.tokenizer.pool.input_encoding import Cuts, EncodedInput
from pagewire.v1.common_pb2 import SamplingParams

WORDS = (Path(pagewire.__file__).parent / "bench" / "words.txt").read_text().split()
NO_SAMPLING = with_defaults(SamplingParams(temperature=0))
PEER_SCRIPT = Path(__file__).parent / "peers" / "embedders.py"


@dataclass(frozen=True, kw_only=True)
class EmbeddingsConfig(ServeConfig):
    """The stack, the corpus, and whom to compare with."""

    texts: int = flag(1000, "texts of the corpus", group="load", valid=POSITIVE)
    rounds: int = flag(2, "how often all are embedded", group="load", valid=POSITIVE)
    batch: int = flag(32, "texts of a call", group="load", valid=POSITIVE)
    concurrency: int = flag(8, "calls in flight", group="load", valid=POSITIVE)
    peers_python: str | None = flag(None, "Python that has the peers", group="load")
    peers: tuple[str, ...] = flag(("sentence-transformers",), "peers, of benchmarks/peers/embedders.py", group="load")
    onnx: str | None = flag(None, "directory with model.onnx and the tokenizer, for fastembed", group="load")


@dataclass(frozen=True)
class Run:
    name: str
    seconds: float
    vectors: np.ndarray


def corpus(num_texts: int, seed: int = 0) -> list[str]:
    """From a word to some hundred, most texts short: a log-normal distribution with a median of 25 words."""
    choose = random.Random(seed)
    lengths = [max(1, min(240, round(choose.lognormvariate(3.2, 1.0)))) for _ in range(num_texts)]
    return [" ".join(choose.choices(WORDS, k=length)) for length in lengths]


def main() -> None:
    config = flags.parse(
        EmbeddingsConfig, sys.argv[1:], prog="python -m benchmarks.embeddings", description="Texts per second."
    )
    texts = corpus(config.texts)
    runs = [run for peer in config.peers if config.peers_python for run in [measure_peer(config, peer, texts)]]
    runs += [measure_executor(config, texts), measure_services(config, texts)]
    first = runs[0]
    print(f"{'':<24}{'texts/s':>10}{'vs':>8}{'differs':>12}")
    for run in runs:
        differs = np.abs(run.vectors - first.vectors).max()
        rate = len(texts) / run.seconds
        print(f"{run.name:<24}{rate:>10.1f}{first.seconds / run.seconds:>8.2f}{differs:>12.1e}")


def fastest(name: str, rounds: int, embed: Callable[[], np.ndarray]) -> Run:
    embed()
    best, vectors = float("inf"), np.empty(0)
    for _ in range(rounds):
        start = time.perf_counter()
        vectors = embed()
        best = min(best, time.perf_counter() - start)
    return Run(name, best, vectors)


# -- in this process ---------------------------------------------------------------------------------------------------


def measure_executor(config: EmbeddingsConfig, texts: Sequence[str]) -> Run:
    executor = config.part(ExecutorConfig, model=str(resolve_model(config.model)))
    runner, info = start_runner(executor, executor.model, lambda fraction, text: None)
    codec = Codec(CodecSource(executor.model))
    pairs = [(text, None) for text in texts]

    def embed() -> np.ndarray:
        encoded = codec.encode_inputs(pairs, add_special_tokens=True, cuts=Cuts(info.max_model_len))
        runner.reset()
        found = [runner.execute(step).wait().vectors for step in steps(runner, encoded)]
        return np.concatenate([part for part in found if part is not None])

    return fastest(f"executor, {info.dtype}", config.rounds, embed)


def steps(runner: ModelRunner, encoded: Sequence[EncodedInput]) -> Iterator[Step]:
    """As many texts in each as it takes, in order; each frees the rows of the one before."""
    limits = runner.limits
    step_id, taken, num_tokens = 1, list[int](), 0
    last: list[int] = []
    for index, (token_ids, _) in enumerate(encoded):
        if len(taken) == limits.max_num_seqs or num_tokens + len(token_ids) > limits.max_num_batched_tokens:
            yield step_of(runner, step_id, encoded, taken, last)
            step_id, last, taken, num_tokens = step_id + 1, taken, [], 0
        taken.append(index)
        num_tokens += len(token_ids)
    yield step_of(runner, step_id, encoded, taken, last)


def step_of(
    runner: ModelRunner, step_id: int, encoded: Sequence[EncodedInput], taken: list[int], last: list[int]
) -> Step:
    lengths = np.array([len(encoded[index][0]) for index in taken], dtype=np.int64)
    return Step(
        step_id=step_id,
        request_ids=taken,
        num_scheduled_tokens=lengths,
        num_new_blocks=np.zeros((len(taken), 0), dtype=np.int64),
        new_block_ids=np.empty(0, dtype=np.int32),
        finished_request_ids=last,
        new_requests=[
            NewRequest(
                request_id=index,
                token_ids=np.array(encoded[index][0], dtype=np.int32),
                num_prompt_tokens=len(encoded[index][0]),
                num_computed_tokens=0,
                blocks=[],
                sampling=NO_SAMPLING,
                yields_vector=True,
            )
            for index in taken
        ],
    )


# -- over gRPC ---------------------------------------------------------------------------------------------------------


def measure_services(config: EmbeddingsConfig, texts: Sequence[str]) -> Run:
    with server(config.part(ServeConfig, log_level="warning")) as (process, _):
        arguments = process.cmdline()
        (flag_given,) = (part for part in arguments if part.startswith("--grpc-port="))
        address = f"127.0.0.1:{flag_given.removeprefix('--grpc-port=')}"
        return fastest("services", config.rounds, lambda: asyncio.run(embed_all(address, config, texts)))


async def embed_all(address: str, config: EmbeddingsConfig, texts: Sequence[str]) -> np.ndarray:
    calls = asyncio.Semaphore(config.concurrency)

    async def call(client: Client, start: int) -> list[list[float]]:
        async with calls:
            return await client.embed(texts[start : start + config.batch], truncate_prompt_tokens=-1)

    async with Client(address) as client:
        parts = await asyncio.gather(*(call(client, start) for start in range(0, len(texts), config.batch)))
    return np.array([vector for part in parts for vector in part], dtype=np.float32)


# -- peers -------------------------------------------------------------------------------------------------------------


def measure_peer(config: EmbeddingsConfig, name: str, texts: Sequence[str]) -> Run:
    with tempfile.TemporaryDirectory() as directory:
        job = {
            "name": name,
            "model": config.onnx if name == "fastembed" else str(resolve_model(config.model)),
            "texts": texts,
            "rounds": config.rounds,
            "batch": config.batch,
            "threads": config.num_threads or usable_cores(),
            "vectors": f"{directory}/vectors.npy",
        }
        command = [str(config.peers_python), str(PEER_SCRIPT)]
        result = subprocess.run(command, input=json.dumps(job), stdout=subprocess.PIPE, text=True, check=True)
        seconds = float(result.stdout.splitlines()[-1])
        return Run(name, seconds, np.load(f"{directory}/vectors.npy"))


if __name__ == "__main__":
    main()
