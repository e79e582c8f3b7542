"""Every form in which a Triton kernel is compiled for the models and batches that we serve."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from benchmarks.kernels.compiler import Specialization
from benchmarks.kernels.forms.adapter_forms import adapter_forms
from benchmarks.kernels.forms.expert_forms import expert_forms
from benchmarks.kernels.forms.grouped_products import grouped_products
from benchmarks.kernels.forms.scaled_products import scaled_products
from benchmarks.kernels.forms.skinny_forms import skinny_forms
from pagewire.kernels import tuning
from pagewire.kernels.triton import collectives
from pagewire.kernels.triton import inputs as step_inputs
from pagewire.kernels.triton.attention import decode_attention, kv_cache, prefill_attention, rotary, split_plan
from pagewire.kernels.triton.common import launch
from pagewire.kernels.triton.drafts import accept_tokens as drafts
from pagewire.kernels.triton.drafts import look_up_drafts as lookup
from pagewire.kernels.triton.elementwise import activation, layer_norm, norm
from pagewire.kernels.triton.encoder import encoder_attention, rotate
from pagewire.kernels.triton.latent import latent_attention
from pagewire.kernels.triton.latent import rotary_store_latent as latent
from pagewire.kernels.triton.sampling import logprobs, penalties, sampling, token_groups, token_masks
from pagewire.kernels.triton.state_space import conv, gated_norm, scan

# Head sizes between those that the tables list, and pages of other sizes than 16.
OTHER_HEAD_DIMS = (80, 96, 192)
OTHER_BLOCK_SIZES = (32, 64)
# (query heads per KV head, tokens of a query) with rows that fill tiles of 16, 32 and 64
DECODE_ROWS = ((1, 1), (7, 4), (8, 8))
LONG_QUERY = 2048
# The same where drafts are verified, 2 to 16 tokens: one of each configuration and tile that these come to.
VERIFIED_ROWS = ((1, 2), (1, 8), (2, 9), (16, 2))
VERIFIED_HEAD_DIMS = (64, 80, 96, 128, 192, 256)
VERIFIED_FEATURE_ROWS = ((4, 8), (4, 16))
_INDEX_ARITHMETIC = ("GROUP", "BLOCK_Q", "BLOCK_SIZE", "REQS")
CACHE_DTYPES = {1: torch.float8_e4m3fn, 2: torch.bfloat16, 4: torch.float32}
# What a model may ask of attention besides.
FEATURES: tuple[dict[str, Any], ...] = (
    {"sliding_window": 4096},
    {"soft_cap": 30.0},
    {"sinks": True, "sliding_window": 128},
)
# (heads, KV heads, head_dim, hidden size, intermediate size, vocabulary) of Llama 3.1 8B and Qwen2.5 0.5B
MODELS = ((32, 8, 128, 4096, 14336, 128256), (14, 2, 64, 896, 4864, 151936))
# (heads, KV heads, head_dim, hidden size) of Gemma 3 270M and Gemma 2 9B, with weights of norms in fp32
GEMMA = ((4, 1, 256, 640), (16, 8, 256, 3584))
# Local layers of Gemma 3, local and global ones of Gemma 2.
GEMMA_FEATURES: tuple[dict[str, Any], ...] = (
    {"sliding_window": 512},
    {"sliding_window": 4096, "soft_cap": 50.0},
    {"soft_cap": 50.0},
)

# (heads, latent part, rotary part, query's size of a head) of DeepSeek-V2-Lite and DeepSeek-V3
LATENT_MODELS = ((16, 512, 64, 192), (128, 512, 64, 192))
# (heads, head_dim, window on either side) of MiniLM, BERT and local layers of ModernBERT, with rotated heads
ENCODERS = ((12, 32, 0), (12, 64, 0), (12, 64, 64))
# (hidden size, heads, groups, head_dim, state size, width of the convolution) of Mamba-2 2.7B and of Mamba-Codestral 7B
STATE_MODELS = ((2560, 80, 1, 64, 128, 4), (4096, 128, 8, 64, 128, 4))


def all_forms(capability: int) -> dict[tuple[str, str], Specialization]:
    """Returns (kernel's name, variant) -> form, each once."""
    forms = (
        *attention(capability),
        *latent_forms(capability),
        *encoder_forms(),
        *state_forms(),
        *elementwise(capability),
        *sampling_forms(),
        *scaled_products(capability),
        *grouped_products(capability),
        *skinny_forms(capability),
        *expert_forms(capability),
        *adapter_forms(),
        *(Specialization(*collectives.specialization("bf16", size)) for size in (2, 8)),
    )
    return {(form.name, form.variant): form for form in forms}


def attention(capability: int) -> Iterator[Specialization]:
    """Both attention kernels, in every configuration that their tables can choose.

    Of entries that differ only in what is index arithmetic one is taken.
    """
    seen = set()
    for is_needed, forms in (
        (False, _listed(capability)),
        (True, _of_models(capability)),
        (False, _verified(capability)),
        (True, _of_int8_caches(capability)),
    ):
        for form in forms:
            key = attention_key(form)
            if is_needed or key not in seen:
                yield form
            seen.add(key)


def attention_key(form: Specialization) -> tuple[Any, ...]:
    """Equal where forms differ only in what is index arithmetic."""
    essence = {name: value for name, value in form.constants.items() if name not in _INDEX_ARITHMETIC}
    return (form.name, *form.types.values(), *essence.values(), form.num_warps, form.num_stages)


def _listed(capability: int) -> Iterator[Specialization]:
    for kernel in ("decode_attention", "prefill_attention"):
        for entry in tuning.load_table(kernel, tuning.table_architecture(kernel, capability)):
            yield attention_form(kernel, capability, entry.shape)


_MODEL = {"block_size": 16, "kv_bytes": 2, "batch": 1}


def _of_models(capability: int) -> Iterator[Specialization]:
    for head_dim, kv_bytes in itertools.product(OTHER_HEAD_DIMS, (1, 2)):
        shape = _MODEL | {"head_dim": head_dim, "kv_bytes": kv_bytes}
        for group, query_len in DECODE_ROWS:
            yield attention_form("decode_attention", capability, shape | {"group": group, "query_len": query_len})
        yield attention_form("prefill_attention", capability, shape | {"group": 7, "query_len": LONG_QUERY})
    for kernel, query_len in (("decode_attention", 1), ("prefill_attention", LONG_QUERY)):
        shape = _MODEL | {"head_dim": 128, "group": 4, "query_len": query_len}
        for block_size in OTHER_BLOCK_SIZES:
            yield attention_form(kernel, capability, shape | {"block_size": block_size})
        for features in FEATURES:
            yield attention_form(kernel, capability, shape, **features)
        for features in GEMMA_FEATURES:
            yield attention_form(kernel, capability, shape | {"head_dim": 256}, **features)
    for head_dim, soft_cap in ((128, 30.0), (256, 50.0)):  # by descriptors of pages
        shape = _MODEL | {"head_dim": head_dim, "group": 4, "query_len": LONG_QUERY, "block_size": 64}
        yield attention_form("prefill_attention", capability, shape, soft_cap=soft_cap)


def _verified(capability: int) -> Iterator[Specialization]:
    for head_dim, kv_bytes, (group, query_len) in itertools.product(VERIFIED_HEAD_DIMS, (1, 2), VERIFIED_ROWS):
        shape = _MODEL | {"head_dim": head_dim, "kv_bytes": kv_bytes, "group": group, "query_len": query_len}
        yield attention_form("decode_attention", capability, shape)
    for group, query_len in VERIFIED_FEATURE_ROWS:
        shape = _MODEL | {"head_dim": 128, "group": group, "query_len": query_len}
        for features in FEATURES:
            yield attention_form("decode_attention", capability, shape, **features)
        for features in GEMMA_FEATURES:
            yield attention_form("decode_attention", capability, shape | {"head_dim": 256}, **features)


def _of_int8_caches(capability: int) -> Iterator[Specialization]:
    for head_dim in (64, 128, 256):
        shape = _MODEL | {"head_dim": head_dim, "kv_bytes": 1}
        for group, query_len in DECODE_ROWS:
            rows = shape | {"group": group, "query_len": query_len}
            yield attention_form("decode_attention", capability, rows, cache_dtype=torch.int8)
        rows = shape | {"group": 7, "query_len": LONG_QUERY}
        for features in ({}, {"sliding_window": 512}):
            yield attention_form("prefill_attention", capability, rows, cache_dtype=torch.int8, **features)


def attention_form(
    kernel: str,
    capability: int,
    shape: Mapping[str, int],
    *,
    cache_dtype: torch.dtype | None = None,
    **features: Any,
) -> Specialization:
    """`shape` as for `tuning.lookup`, of any context by default. The query is bf16, or fp32 as its cache. cache_dtype:
    by default that of CACHE_DTYPES."""
    cache_dtype = cache_dtype or CACHE_DTYPES[shape["kv_bytes"]]
    if kernel == "decode_attention":
        shape = {"context": 4096, **shape}
        config = tuning.lookup(kernel, capability, **shape)
    else:
        config = prefill_attention.configuration(capability, shape, cache_dtype, features.get("sliding_window", 0))
    query_dtype = torch.float32 if cache_dtype == torch.float32 else torch.bfloat16
    model = (shape["head_dim"], shape["group"], shape["block_size"], query_dtype, cache_dtype)
    options: dict[str, Any] = {"capability": capability, **features}
    if kernel == "decode_attention":
        form = decode_attention.specialization(*model, config, query_len=shape["query_len"], **options)
    else:
        form = prefill_attention.specialization(*model, config, num_reqs=shape["batch"], **options)
    return Specialization(*form)


def latent_forms(capability: int) -> Iterator[Specialization]:
    for num_heads, latent_dim, rotary_dim, q_dim in LATENT_MODELS:
        for form in latent_attention.specializations(
            num_heads, latent_dim, rotary_dim, 16, torch.bfloat16, capability=capability
        ):
            yield Specialization(*form)
        yield Specialization(*latent.specialization("bf16", num_heads, q_dim, latent_dim, rotary_dim))


def state_forms() -> Iterator[Specialization]:
    for hidden_size, num_heads, groups, head_dim, size, width in STATE_MODELS:
        inner = num_heads * head_dim
        for decodes in (False, True):
            yield Specialization(*norm.specialization("bf16", hidden_size, not decodes, residual_dtype="fp32"))
            yield Specialization(*conv.specialization("bf16", inner + 2 * groups * size, width, decodes))
            yield Specialization(*gated_norm.specialization("bf16", inner // groups, groups, many_rows=not decodes))
            yield Specialization(*scan.specialization("bf16", num_heads, groups, head_dim, size, tiled=not decodes))


def encoder_forms() -> Iterator[Specialization]:
    for dtype in (torch.bfloat16, torch.float32):
        for _, head_dim, window in ENCODERS:
            yield Specialization(*encoder_attention.specialization(head_dim, 1, dtype, window))
        num_heads, head_dim, _ = ENCODERS[-1]
        yield Specialization(*rotate.specialization(dtype, 2 * num_heads, head_dim))  # queries and keys


def elementwise(capability: int) -> Iterator[Specialization]:
    for num_heads, num_kv_heads, head_dim, hidden_size, intermediate_size, _ in MODELS:
        for many in (False, True):
            heads = (num_heads, num_kv_heads, head_dim, head_dim)
            yield Specialization(*norm.specialization("bf16", hidden_size, many))
            yield Specialization(*norm.in_place_specialization("bf16", hidden_size, many))
            for residual, bias in itertools.product((False, True), (False, True)):
                yield Specialization(*layer_norm.specialization("bf16", hidden_size, many, residual, bias))
            yield Specialization(*rotary.specialization("bf16", *heads, many_tokens=many))
            yield Specialization(*rotary.specialization("bf16", *heads, many_tokens=many, norm="bf16"))
            for cache, norms in (("fp8", None), ("int8", None), ("int8", "bf16")):
                native = cache == "fp8" and capability >= 90
                options: dict[str, Any] = {"many_tokens": many, "cache": cache, "native_fp8": native, "norm": norms}
                yield Specialization(*rotary.specialization("bf16", *heads, **options))
            for cache in ("", "int8"):
                options = {"many_tokens": many, "cache": cache}
                yield Specialization(*kv_cache.specialization("bf16", num_kv_heads, head_dim, **options))
        for gelu in (False, True):
            yield Specialization(*activation.specialization("bf16", intermediate_size, gelu))
            yield Specialization(*activation.plain_specialization("bf16", intermediate_size, tanh=gelu))
    for num_heads, num_kv_heads, head_dim, hidden_size in GEMMA:
        for many in (False, True):
            heads = (num_heads, num_kv_heads, head_dim, head_dim)
            for norms_x in (False, True):
                yield Specialization(
                    *norm.specialization("bf16", hidden_size, many, weight_dtype="fp32", norms_x=norms_x)
                )
            yield Specialization(*rotary.specialization("bf16", *heads, many_tokens=many, norm="fp32"))
    yield Specialization(*activation.clamped_specialization("bf16", 2880))  # of GPT-OSS
    yield Specialization(*step_inputs.specialization(16))
    for block_q, window, is_fixed in ((1, 0, False), (4, 4096, False), (4, 0, True)):
        yield Specialization(*split_plan.specialization(block_q, 64, 16, window, is_fixed))
    if capability >= 90:
        yield Specialization(launch.settled_kernel, {}, {}, num_warps=1)


def sampling_forms() -> Iterator[Specialization]:
    for vocab_size in (model[-1] for model in MODELS):
        for dtype in (torch.bfloat16, torch.float32):
            for has_drafts in (False, True):
                yield Specialization(*sampling.specialization(dtype, vocab_size, has_drafts))
            yield Specialization(*logprobs.specialization(dtype, vocab_size))
            groups = token_groups.num_groups(vocab_size)
            for num_rows, has_rows in itertools.product((1, 256), (False, True)):
                tile = token_groups.statistics_tile(num_rows, groups)
                yield Specialization(*token_groups.statistics_specialization(dtype, tile=tile, has_rows=has_rows))
    for kernel in (penalties.count_tokens_kernel, penalties.apply_penalties_kernel):
        for has_drafts in (False, True):
            yield Specialization(*penalties.specialization(kernel, has_drafts))
    yield Specialization(*drafts.specialization())
    yield Specialization(*lookup.specialization())
    yield Specialization(*token_masks.specialization())
