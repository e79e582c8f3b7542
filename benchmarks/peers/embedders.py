"""One library that embeds texts, timed: run by `benchmarks.embeddings` with a Python that has the library.

Reads a job as JSON from stdin, writes the vectors to a file and, as the last line, the seconds of the fastest round.
"""

import asyncio
import json
import os
import sys
import time
from pathlib import Path

import numpy as np


def sentence_transformers(job):
    import torch
    from sentence_transformers import SentenceTransformer

    torch.set_num_threads(job["threads"])
    model = SentenceTransformer(job["model"], device="cpu")
    return lambda: model.encode(job["texts"], batch_size=job["batch"])


def infinity(job):
    import torch
    from infinity_emb import AsyncEmbeddingEngine, EngineArgs

    torch.set_num_threads(job["threads"])
    arguments = EngineArgs(
        model_name_or_path=job["model"],
        engine="torch",
        device="cpu",
        dtype="float32",
        batch_size=job["batch"],
        model_warmup=False,
        bettertransformer=False,
    )
    loop = asyncio.new_event_loop()
    engine = AsyncEmbeddingEngine.from_args(arguments)
    loop.run_until_complete(engine.astart())

    def embed():
        vectors, _ = loop.run_until_complete(engine.embed(job["texts"]))
        return np.stack(vectors)

    return embed


def fastembed(job):
    from fastembed import TextEmbedding
    from fastembed.common.model_description import ModelSource, PoolingType

    TextEmbedding.add_custom_model(
        model="local",
        pooling=PoolingType.MEAN,
        normalization=True,
        sources=ModelSource(url="http://localhost/none"),
        dim=json.loads(Path(job["model"], "config.json").read_text())["hidden_size"],
        model_file="model.onnx",
    )
    model = TextEmbedding("local", specific_model_path=job["model"], threads=job["threads"])
    return lambda: np.stack(list(model.embed(job["texts"], batch_size=job["batch"])))


LIBRARIES = {"sentence-transformers": sentence_transformers, "infinity": infinity, "fastembed": fastembed}


def main():
    job = json.load(sys.stdin)
    embed = LIBRARIES[job["name"]](job)
    embed()
    seconds = []
    for _ in range(job["rounds"]):
        start = time.perf_counter()
        vectors = embed()
        seconds.append(time.perf_counter() - start)
    np.save(job["vectors"], vectors)
    print(min(seconds), flush=True)
    os._exit(0)  # threads of infinity would not end


if __name__ == "__main__":
    main()
