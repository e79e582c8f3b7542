"""Measures how far a model's numbers are from its weights': `python -m benchmarks.fidelity MODEL --text FILE`.

The truth is transformers in fp32 on the same weights. Of each token of the text, the log probability is compared:
mean and 99th percentile of the absolute difference, and how often the most likely token is the same. Every step of the
comparison is one of ours in process, "prefill" (a window in one step) and "decode" (--rows windows token by token); and
with --url NAME=URL a server with vLLM's `prompt_logprobs`, with --llamacpp FILE llama.cpp by llama-cpp-python.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.perplexity import text_windows, window_scores
from pagewire.files.models import resolve_model
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.protocol import Model


class Scores(NamedTuple):
    """Holds the scores of each token of each window but the first: [num_windows, length - 1]."""

    log_probs: Tensor  # fp32, of the text's token
    best: Tensor  # int64, the most likely token


class Distance(NamedTuple):
    mean: float  # of the absolute difference of log probabilities
    p99: float
    top1: float  # share of positions with the same most likely token

    def __str__(self) -> str:
        return f"{self.mean:8.4f} {self.p99:8.3f} {self.top1:8.2%}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=3072, help="of the text, at most")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4, help="windows decoded side by side")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--url", action="append", default=[], metavar="NAME=URL", help="server; repeatable")
    parser.add_argument("--llamacpp", action="append", default=[], metavar="FILE", help="GGUF file; repeatable")
    args = parser.parse_args()
    path = resolve_model(args.model)
    windows = text_windows(str(path), args.text, args.tokens, args.window)
    stored, dense = (reference(path, windows, rounded) for rounded in (False, True))
    print(f"{'':40} {'mean':>8} {'p99':>8} {'top-1':>8}", flush=True)
    for quantization, truth in ((None, stored), ("none", dense)):
        model = load(path, args.dtype, args.window, quantization)
        label = "as stored" if quantization is None else f"dense {args.dtype}"
        for way, rows, step in (("prefill", 1, args.window), ("decode", args.rows, 1)):
            print(f"{label + ', ' + way:40} {distance(scores(model, windows, rows, step), truth)}", flush=True)
    for peer in args.url:
        name, _, url = peer.partition("=")
        print(f"{name:40} {distance(served(url, windows), dense)}", flush=True)
    for file in args.llamacpp:
        print(
            f"{'llama.cpp, ' + Path(file).name[:28]:40} {distance(llama_cpp_scores(file, windows), stored)}", flush=True
        )


def load(path: Path, dtype: str, max_model_len: int, quantization: str | None) -> Model:
    return load_model(
        path, dtype=dtype, device=torch.device("cpu"), max_model_len=max_model_len, quantization=quantization
    )


@torch.inference_mode()
def scores(model: Model, windows: Tensor, rows: int, step: int) -> Scores:
    """Computes `rows` windows side by side, `step` tokens at a time."""
    parts = []
    for batch in windows.split(rows):
        steps = [_of_step(log_probs, batch, start) for start, log_probs in window_scores(model, batch, step)]
        parts.append(Scores(*(torch.cat(part, dim=1)[:, :-1] for part in zip(*steps, strict=True))))
    return Scores(*(torch.cat(part) for part in zip(*parts, strict=True)))


def _of_step(log_probs: Tensor, windows: Tensor, start: int) -> tuple[Tensor, Tensor]:
    count = log_probs.shape[1]
    following = torch.nn.functional.pad(windows[:, start + 1 : start + count + 1], (0, 1))[:, :count, None]
    return log_probs.gather(2, following).squeeze(2), log_probs.argmax(2)


@torch.inference_mode()
def reference(path: Path, windows: Tensor, rounded: bool) -> Scores:
    """Computes windows by transformers in fp32. rounded: with matrices rounded to bf16, as a dense model has them."""
    from transformers import AutoModelForCausalLM

    where = (path.parent, {"gguf_file": path.name}) if path.suffix == ".gguf" else (path, {})
    model = AutoModelForCausalLM.from_pretrained(where[0], dtype=torch.float32, **where[1])
    for weight in model.parameters() if rounded else ():
        weight.copy_(weight.bfloat16() if weight.dim() > 1 else weight)
    parts = []
    for window in windows:
        log_probs = model(window[None]).logits.log_softmax(-1)
        parts.append(Scores(log_probs[0, :-1].gather(1, window[1:, None])[:, 0], log_probs[0, :-1].argmax(1)))
    return Scores(*(torch.stack(part) for part in zip(*parts, strict=True)))


def distance(found: Scores, truth: Scores) -> Distance:
    difference = (found.log_probs.double() - truth.log_probs.double()).abs()
    same = (found.best == truth.best).double()
    return Distance(difference.mean().item(), difference.flatten().quantile(0.99).item(), same.mean().item())


def served(url: str, windows: Tensor) -> Scores:
    """Asks a server for the log probabilities of prompts, as vLLM gives them."""
    log_probs, best = [], []
    for window in windows.tolist():
        body = {"prompt": window, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request) as response:
            found = json.load(response)["choices"][0]["prompt_logprobs"][1:]
        log_probs.append([entry[str(token)]["logprob"] for entry, token in zip(found, window[1:], strict=True)])
        best.append([int(next(token for token, value in entry.items() if value["rank"] == 1)) for entry in found])
    return Scores(torch.tensor(log_probs), torch.tensor(best))


def llama_cpp_scores(file: str, windows: Tensor) -> Scores:
    import llama_cpp

    length = windows.shape[1]
    llama = llama_cpp.Llama(file, n_ctx=length, n_batch=length, logits_all=True, verbose=False)
    log_probs, best = [], []
    for window in windows:
        llama.reset()
        llama.eval(window.tolist())
        logits = torch.from_numpy(np.array(llama.scores[:length])).log_softmax(-1)[:-1]
        log_probs.append(logits.gather(1, window[1:, None])[:, 0])
        best.append(logits.argmax(1))
    return Scores(torch.stack(log_probs), torch.stack(best))


if __name__ == "__main__":
    main()
