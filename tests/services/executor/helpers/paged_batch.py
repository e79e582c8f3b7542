"""Runs a model over a paged KV cache as the runner does, with request lengths and blocks chosen by a test."""

from __future__ import annotations

import torch
from torch import Tensor

from pagewire.services.executor.batch.kv_cache import allocate, groups
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.step.step_context import StepContext

BLOCK_SIZE = 4


class PagedBatch:
    """Requests by index; their block ids are interleaved and out of order, block 0 stays unused."""

    def __init__(self, model: Model, num_requests: int, max_len: int) -> None:
        max_blocks = -(-max_len // BLOCK_SIZE)
        num_blocks = num_requests * max_blocks + 1
        self.kv_caches = allocate(model, [num_blocks] * len(groups(model)), BLOCK_SIZE, torch.device("cpu"))
        for cache in self.kv_caches:
            # Wherever nothing was stored, NaN (in int8, as scales): reading past a request's tokens shows.
            cache.fill_(-1 if cache.dtype is torch.int8 else torch.nan)
        order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(1)) + 1
        self.block_table = order.view(num_requests, max_blocks).int()
        self.context_lens = [0] * num_requests
        self.model = model

    @torch.inference_mode()
    def step(self, tokens: dict[int, list[int]]) -> dict[int, Tensor]:
        """request -> its next tokens; returns request -> logits of each of these tokens [query_len, vocab_size]."""
        requests = list(tokens)
        query_lens = [len(tokens[request]) for request in requests]
        positions = torch.cat(
            [torch.arange(query_len) + self.context_lens[r] for r, query_len in zip(requests, query_lens, strict=True)]
        )
        owners = torch.tensor(requests).repeat_interleave(torch.tensor(query_lens))
        blocks = self.block_table[owners, positions // BLOCK_SIZE].long()
        for request, query_len in zip(requests, query_lens, strict=True):
            self.context_lens[request] += query_len
        context = StepContext(
            positions=positions,
            rows=torch.tensor(requests, dtype=torch.int32),
            query_start_loc=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor([self.context_lens[request] for request in requests], dtype=torch.int32),
            block_tables=(self.block_table[requests],) * len(self.kv_caches),
            slot_mappings=(blocks * BLOCK_SIZE + positions % BLOCK_SIZE,) * len(self.kv_caches),
            max_query_len=max(query_lens),
        )
        input_ids = torch.tensor([token for request in requests for token in tokens[request]])
        logits = self.model.compute_logits(self.model.forward(input_ids, context))
        return dict(zip(requests, logits.split(query_lens), strict=True))


def mixed_batch_logits(model: Model, vocab_size: int) -> list[tuple[list[int], Tensor]]:
    """Three requests through steps that mix whole prompts, chunks and decodes: (token ids, logits of each token)."""
    steps = [{0: 6, 1: 7, 2: 1}, {2: 9, 0: 1, 1: 1}, {1: 1, 0: 12, 2: 7}, {0: 1, 1: 1, 2: 1}]
    lengths = [sum(step.get(request, 0) for step in steps) for request in range(3)]
    generator = torch.Generator().manual_seed(2)
    ids = [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in lengths]
    batch = PagedBatch(model, num_requests=3, max_len=max(lengths))
    logits: list[list[Tensor]] = [[], [], []]
    for step in steps:
        chunks = {
            request: ids[request][batch.context_lens[request] :][:query_len] for request, query_len in step.items()
        }
        for request, chunk_logits in batch.step(chunks).items():
            logits[request].append(chunk_logits)
    return [(ids[request], torch.cat(logits[request])) for request in range(3)]
