"""Measures the perplexity of checkpoints on a text: `python -m benchmarks.perplexity MODEL --text FILE`.

Every model is loaded as it is stored and, with --dequantized, again as dense weights of the same numbers; with each of
--kv-cache-dtypes, as the executor's --kv-cache-dtype has them ("KV" is the cache's bytes per token). The text is
cut into windows that are scored separately. "prefill" computes a window in one step; "decode" computes --rows windows
side by side, token by token, because kernels differ by the number of tokens of a step.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from pagewire.files.models import resolve_model
from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.executor.batch import kv_cache
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.step.step_context import StepContext

BLOCK_SIZE = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=4096, help="of the text, at most")
    parser.add_argument("--window", type=int, default=256)
    parser.add_argument("--rows", type=int, default=4, help="windows decoded side by side")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dequantized", action="store_true")
    parser.add_argument("--kv-cache-dtypes", nargs="+", default=["auto"])
    args = parser.parse_args()
    print(f"{'model':44} {'weights':>10} {'KV':>7} {'prefill':>10} {'decode':>10}", flush=True)
    for name in args.models:
        path = resolve_model(name)
        windows = text_windows(str(path), args.text, args.tokens, args.window).to(args.device)
        forms = (None, "none") if args.dequantized else (None,)
        for quantization, cache in itertools.product(forms, args.kv_cache_dtypes):
            model = load_model(
                path,
                dtype=args.dtype,
                device=torch.device(args.device),
                max_model_len=args.window,
                quantization=quantization,
                kv_cache_dtype=cache,
            )
            label = f"{Path(path).name[:24]}{', dequantized' if quantization else ''}"
            label += f", {cache} cache" if cache != "auto" else ""
            weights = f"{model.weight_bytes / 2**20:.1f} MiB"
            per_token = sum(layer.kv_spec().page_bytes(BLOCK_SIZE) for layer in model.caching_layers) / BLOCK_SIZE
            print(f"{label:44} {weights:>10} {per_token:7.0f}", end="", flush=True)
            for rows, step in ((1, args.window), (args.rows, 1)):
                print(f" {perplexity(model, windows, rows, step):10.4f}", end="", flush=True)
            print(flush=True)


def text_windows(model: str, text: Path, num_tokens: int, window: int) -> Tensor:
    """Returns the tokens of a text, int64 [num_windows, window]."""
    ids = load_tokenizer(model).encode(text.read_text(), add_special_tokens=False)[:num_tokens]
    num_windows = len(ids) // window
    if num_windows == 0:
        raise SystemExit(f"{text}: {len(ids)} tokens, fewer than one window of {window}")
    return torch.tensor(ids[: num_windows * window]).view(num_windows, window)


@torch.inference_mode()
def perplexity(model: Model, windows: Tensor, rows: int, step: int) -> float:
    """Returns exp of the mean negative log-likelihood of every token of a window but its first.

    rows: windows computed side by side; step: tokens of each that a step computes.
    """
    log_likelihoods = [window_log_likelihood(model, batch, step) for batch in windows.split(rows)]
    return math.exp(-sum(log_likelihoods) / (windows.shape[0] * (windows.shape[1] - 1)))


def window_log_likelihood(model: Model, windows: Tensor, step: int) -> float:
    total = 0.0
    for start, scores in window_scores(model, windows, step):
        targets = windows[:, start + 1 : start + scores.shape[1] + 1]
        total += scores[:, : targets.shape[1]].gather(2, targets[:, :, None]).sum().item()
    return total


def window_scores(model: Model, windows: Tensor, step: int) -> Iterator[tuple[int, Tensor]]:
    """Computes windows int64 [num_windows, length] side by side, `step` tokens of each at a time.

    Yields the first position of a step, and the log probabilities fp32 [num_windows, step, vocab_size] of what follows.
    """
    num_rows, length = windows.shape
    device, blocks_per_row = windows.device, -(-length // BLOCK_SIZE)
    groups = len(kv_cache.groups(model))
    kv_cache.allocate(model, [num_rows * blocks_per_row] * groups, BLOCK_SIZE, device)
    table = torch.arange(num_rows * blocks_per_row, dtype=torch.int32, device=device).view(num_rows, blocks_per_row)
    for start in range(0, length, step):
        positions = torch.arange(start, min(start + step, length), device=device)
        count = len(positions)
        slots = table[:, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
        context = StepContext(
            positions=positions.repeat(num_rows),
            rows=torch.arange(num_rows, dtype=torch.int32, device=device),
            query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=device) * count,
            seq_lens=torch.full((num_rows,), start + count, dtype=torch.int32, device=device),
            block_tables=(table,) * groups,
            slot_mappings=(slots.flatten(),) * groups,
            max_query_len=count,
        )
        hidden = model.forward(windows[:, start : start + count].flatten(), context)
        yield start, model.compute_logits(hidden).float().log_softmax(-1).view(num_rows, count, -1)


if __name__ == "__main__":
    main()
