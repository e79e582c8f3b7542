"""Measures what types of KV cache cost and save on a CPU: `python -m benchmarks.curves.kv_cache [MODEL ...]`.

For every model and --kv-cache-dtypes: the cache's bytes per token, the perplexity of a text (see
`benchmarks.perplexity`), and tokens/s of the replayed decode step by requests and context. The types take turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from benchmarks.executor_step import Step, bind_cache, blocks_of
from benchmarks.perplexity import BLOCK_SIZE, perplexity, text_windows
from pagewire.config import DEFAULT_MODEL
from pagewire.files.models import resolve_model
from pagewire.quantize.model import texts
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.protocol import Model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=[DEFAULT_MODEL, "gemma-3-270m"])
    parser.add_argument("--kv-cache-dtypes", nargs="+", default=["auto", "fp8", "int8"])
    parser.add_argument("--dtype", default="bfloat16", help="of the model, and of the cache with auto")
    parser.add_argument("--accept-license", help="as of `pagewire serve`")
    parser.add_argument("--text", type=Path, default=Path(texts.__file__).with_name("evaluation.txt"))
    parser.add_argument("--tokens", type=int, default=2048, help="of the text, at most; 0: no perplexity")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 4096], help="tokens")
    parser.add_argument("--rounds", type=int, default=9, help="steps, of which the fastest counts")
    args = parser.parse_args()
    shapes = [(requests, context) for context in args.contexts for requests in args.requests]
    print(f"{'model':26}{'cache':>6}{'B/token':>9}{'prefill':>9}{'decode':>9}", end="")
    print("".join(f"{f'{requests} x {context}':>11}" for requests, context in shapes), flush=True)
    for name in args.models:
        path = resolve_model(name, accepted_license=args.accept_license)
        models = {cache: load(path, args.dtype, cache) for cache in args.kv_cache_dtypes}
        quality = {cache: perplexities(str(path), model, args) for cache, model in models.items()}
        speeds: dict[str, list[float]] = {cache: [] for cache in models}
        for requests, context in shapes:
            for cache, model in models.items():
                speeds[cache].append(requests / decode_seconds(model, requests, context, args.rounds))
        for cache, model in models.items():
            size = sum(layer.kv_spec().page_bytes(BLOCK_SIZE) for layer in model.caching_layers) / BLOCK_SIZE
            print(f"{Path(path).name[:25]:26}{cache:>6}{size:>9.0f}{quality[cache]}", end="")
            print("".join(f"{speed:>11.1f}" for speed in speeds[cache]), flush=True)


def load(path: Path, dtype: str, cache: str) -> Model:
    return load_model(path, dtype=dtype, device=torch.device("cpu"), kv_cache_dtype=cache)


def perplexities(path: str, model: Model, args: argparse.Namespace) -> str:
    """Returns those of windows that are computed in one step, and token by token."""
    if not args.tokens:
        return f"{'-':>9}" * 2
    windows = text_windows(path, args.text, args.tokens, args.window)
    steps = ((1, args.window), (4, 1))
    return "".join(f"{perplexity(model, windows, rows, step):>9.3f}" for rows, step in steps)


def decode_seconds(model: Model, requests: int, context: int, rounds: int) -> float:
    bind_cache(model, requests * blocks_of(context + 1))
    return Step.decode(model, requests, context).replayed(rounds)


if __name__ == "__main__":
    main()
