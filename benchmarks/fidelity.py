"""Measures how far a model's numbers are from its weights': `python -m benchmarks.fidelity MODEL --text FILE`.

The truth is transformers in fp32 on the same weights. Of each token of the text, the log probability is compared:
mean and 99th percentile of the absolute difference, and how often the most likely token is the same.

Pagewire computes the model in process, as stored and dense: in "prefill" a window in one step, in "decode" --rows
windows token by token. Others are compared with the truth on their own weights: with --server, a server that has vLLM's
`prompt_logprobs`; with --llamacpp, llama.cpp, of the package llama-cpp-python, a window in one call.
"""

from __future__ import annotations

import argparse
import json
import urllib.error
import urllib.request
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from benchmarks.perplexity import text_windows, window_scores
from pagewire.files.models import resolve_model
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.protocol import Model

ANSWER_TIMEOUT_S = 300


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
    parser.add_argument("--rows", type=int, default=4, help="windows decoded side by side; 0: none is decoded")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--server",
        nargs=3,
        action="append",
        default=[],
        metavar=("NAME", "URL", "WEIGHTS"),
        help="a server with the same vocabulary and the checkpoint that it serves; repeatable",
    )
    parser.add_argument("--llamacpp", action="append", default=[], metavar="FILE", help="GGUF file; repeatable")
    args = parser.parse_args()
    path = resolve_model(args.model)
    windows = text_windows(str(path), args.text, args.tokens, args.window)
    truth_of = cache(partial(reference, windows=windows))
    stored, dense = truth_of(path), reference(path, windows, rounded=True)
    print(f"{windows.numel():,} tokens {'':27} {'mean':>8} {'p99':>8} {'top-1':>8}", flush=True)
    for quantization, truth in ((None, stored), ("none", dense)):
        model = load(path, args.dtype, args.window, quantization)
        label = "as stored" if quantization is None else f"dense {args.dtype}"
        report(f"{label}, prefill", scores(model, windows, 1, args.window), truth)
        if args.rows:
            report(f"{label}, decode", scores(model, windows, args.rows, 1), truth)
    for name, url, weights in args.server:
        report(name, served(url, windows), truth_of(resolve_model(weights)))
    for file in args.llamacpp:
        report(f"llama.cpp, {Path(file).name}", llama_cpp_scores(file, windows), truth_of(resolve_model(file)))


def report(name: str, found: Scores, truth: Scores) -> None:
    print(f"{name[:40]:40} {distance(found, truth)}", flush=True)


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
def reference(path: Path, windows: Tensor, *, rounded: bool = False) -> Scores:
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
    model = _answer(f"{url}/v1/models")["data"][0]["id"]
    log_probs, best = [], []
    for window in windows.tolist():
        body = {"model": model, "prompt": window, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 1}
        # Of the most likely token and the text's: values by token id.
        positions = [
            {int(token): value["logprob"] for token, value in entry.items()}
            for entry in _answer(f"{url}/v1/completions", body)["choices"][0]["prompt_logprobs"][1:]
        ]
        log_probs.append([values[token] for values, token in zip(positions, window[1:], strict=True)])
        # Ranks would not do: in vLLM, tokens that share the largest value are all behind rank 1.
        best.append([max(values, key=values.__getitem__) for values in positions])
    return Scores(torch.tensor(log_probs), torch.tensor(best))


def _answer(url: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_TIMEOUT_S) as response:
            return json.load(response)
    except urllib.error.HTTPError as error:
        raise SystemExit(f"{url}: {error}: {error.read().decode(errors='replace')[:500]}") from None
    except OSError as error:
        raise SystemExit(f"{url}: no answer ({error}): is a server running there?") from None


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
