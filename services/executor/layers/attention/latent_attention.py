"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1), over one cached vector per token.

The model projects a token's latent vector to every head's key and value (`kv_b_proj`, [key; value] of each head). This
code does not: it projects the query into latent space with the keys' part, and the result of attention to the head's
value afterwards. This changes the order of the products, not the result, and the cache holds a few hundred numbers per
token instead of tens of thousands for the keys and values of all heads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels import ops
from pagewire.kernels.quantized import PackedFp8, PackedGrouped, PackedInt8, PackedWeight, unpack
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.attention.heads import Heads, scaled, shared_heads
from pagewire.services.executor.layers.attention.paged_attention import PagedAttention
from pagewire.services.executor.layers.kv_spec import LatentSpec
from pagewire.services.executor.layers.linear import Linear, Split
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.parts import StoredPart, indices
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.layers.weights import Dense, NotLoaded, Shard, stored_parts
from pagewire.services.executor.step.step_context import StepContext

_NORM_EPS = 1e-6  # of the inner norms, regardless of rms_norm_eps


@dataclass(frozen=True, kw_only=True)
class LatentConfig:
    """Sizes of the attention, in elements."""

    num_heads: int
    latent_dim: int  # kv_lora_rank
    rotary_dim: int  # qk_rope_head_dim
    key_dim: int  # qk_nope_head_dim: of a head's key without its rotary part
    value_dim: int  # v_head_dim
    query_rank: int | None  # q_lora_rank; None: queries are projected from the hidden state at once
    scale: float  # of scores
    interleaved: bool  # neighbouring elements are rotated
    bias: bool
    split: bool = False  # the checkpoint has `k_b_proj` and `v_b_proj` for `kv_b_proj`, as llama.cpp writes it

    def __post_init__(self) -> None:
        if self.latent_dim % 8 or self.rotary_dim % 8 or self.width > ops.MAX_LATENT_DIM:
            raise ModelLoadError(
                f"config keys kv_lora_rank ({self.latent_dim}) and qk_rope_head_dim ({self.rotary_dim}) must be "
                f"multiples of 8, together at most {ops.MAX_LATENT_DIM}"
            )
        if self.bias and self.query_rank is None:
            raise ModelLoadError("config key attention_bias: true is only supported with q_lora_rank")

    @property
    def width(self) -> int:
        """Returns the number of cached elements per token."""
        return self.latent_dim + self.rotary_dim


class PagedLatentAttention(PagedAttention):
    """Attention of all heads over the cached latent vectors."""

    __slots__ = ("latent_dim",)

    can_be_8_bits = False
    kv_cache: Tensor  # [num_blocks, block_size, latent_dim + rotary_dim], each block contiguous

    def __init__(self, layer_idx: int, config: LatentConfig, dtype: torch.dtype) -> None:
        super().__init__(layer_idx, LatentSpec(1, config.width, dtype), config.scale)
        self.latent_dim = config.latent_dim

    def attend(self, query: Tensor, context: StepContext) -> Tensor:
        """query [num_tokens, num_heads, latent_dim + rotary_dim] -> [num_tokens, num_heads, latent_dim]"""
        table = context.block_tables[self.group]
        lengths = (context.query_start_loc, context.seq_lens, context.max_query_len, context.min_query_len)
        plan = context.plan(
            (self.group, query.shape[1]),
            lambda: ops.plan_latent_attention(query, self.kv_cache, table, *lengths, context.split_size),
        )
        return ops.latent_attention(
            query,
            self.kv_cache,
            table,
            *lengths,
            self.scale,
            self.latent_dim,
            context.split_size,
            plan,
        )


class LatentProjection:
    """`kv_b_proj` as one weight for each head's key and one for its value; dense for every checkpoint.

    If the checkpoint has it split, it has `k_b_proj` [num_heads, latent_dim, key_dim] and `v_b_proj` [num_heads,
    value_dim, latent_dim].
    """

    __slots__ = ("config", "dtype", "heads", "shards", "weight")

    multiplies = False  # not as a linear layer, which could lay its weight out for its products

    def __init__(self, name: str, config: LatentConfig, heads: Heads, placement: Placement) -> None:
        head_size = config.key_dim + config.value_dim
        format_ = None if config.split else placement.format(name)
        rows = None if heads.is_whole else indices(scaled(heads.queries, head_size))
        shard = Shard(placement.name(name), config.num_heads * head_size, config.latent_dim, format_, rows=rows)
        self.shards: tuple[Shard, ...] = (shard,)
        self.config = config
        self.heads = heads
        self.dtype = placement.dtype
        self.weight: Dense | NotLoaded = (
            Dense(placement.empty(shard.num_outputs, config.latent_dim))
            if shard.format is None
            else NotLoaded(shard.num_outputs, config.latent_dim)
        )

    @property
    def parts(self) -> tuple[PackedWeight, ...]:
        return (self.weight,)

    def install(self, parts: Sequence[PackedWeight]) -> None:
        (part,) = parts
        if isinstance(part, PackedGrouped | PackedInt8 | PackedFp8):
            part = Dense(unpack(part).dequantize().to(self.dtype))
        assert isinstance(part, Dense)
        self.weight = part

    def load_targets(self) -> Iterator[tuple[str, Tensor]]:
        name = self.shards[0].name
        if self.config.split:
            keys, values = self._of_heads().split((self.config.key_dim, self.config.value_dim), dim=1)
            yield f"{name.replace('kv_b_proj', 'k_b_proj')}.weight", keys.transpose(1, 2)
            yield f"{name.replace('kv_b_proj', 'v_b_proj')}.weight", values
        elif isinstance(self.weight, Dense):
            yield f"{name}.weight", self.weight.tensor

    def stored_parts(self) -> Iterator[tuple[str, StoredPart]]:
        if not self.config.split:
            yield from stored_parts(self.shards)
        elif not self.heads.is_whole:
            for name, target in self.load_targets():
                yield name, StoredPart((self.config.num_heads, *target.shape[1:]), (self.heads.queries,))

    def into_latent(self, q: Tensor, query: Tensor) -> None:
        """q [num_tokens, num_heads, key_dim], the queries of keys -> query [num_tokens, num_heads, latent_dim]"""
        ops.head_linear(q, self._of_heads()[:, : self.config.key_dim].transpose(1, 2), query)

    def out_of_latent(self, x: Tensor) -> Tensor:
        """x [num_tokens, num_heads, latent_dim] -> [num_tokens, num_heads * value_dim]"""
        config = self.config
        values = torch.empty((x.shape[0], x.shape[1], config.value_dim), dtype=x.dtype, device=x.device)
        ops.head_linear(x, self._of_heads()[:, config.key_dim :], values)
        return values.view(x.shape[0], -1)

    def _of_heads(self) -> Tensor:
        """[num_heads, key_dim + value_dim, latent_dim]"""
        assert isinstance(self.weight, Dense)
        return self.weight.tensor.view(len(self.heads.queries), -1, self.config.latent_dim)


class LatentAttention:
    """One layer's attention. `rotary` is shared by all layers."""

    __slots__ = ("attention", "config", "down", "kv_norm", "kv_up", "num_heads", "o", "q_norm", "q_up", "rotary")

    def __init__(
        self, config: LatentConfig, hidden_size: int, layer_idx: int, rotary: RotaryEmbedding, placement: Placement
    ) -> None:
        wide, placement = placement, placement.narrowed()
        q_size, rank = config.num_heads * (config.key_dim + config.rotary_dim), config.query_rank
        first = {"q_proj": q_size} if rank is None else {"q_a_proj": rank}
        # All ranks cache the same latent vectors.
        heads = shared_heads(config.num_heads, config.num_heads, config.key_dim + config.rotary_dim, placement)
        rows = None if heads.is_whole else heads.query_rows
        self.down = Linear(
            hidden_size,
            first | {"kv_a_proj_with_mqa": config.width},
            placement,
            bias=config.bias,
            rows={"q_proj": rows} if rank is None else None,
        )
        self.q_norm = None if rank is None else RMSNorm("q_a_layernorm", rank, _NORM_EPS, placement)
        self.q_up = (
            None if rank is None else Linear(rank, {"q_b_proj": q_size}, placement, bias=False, rows={"q_b_proj": rows})
        )
        self.kv_norm = RMSNorm("kv_a_layernorm", config.latent_dim, _NORM_EPS, placement)
        self.kv_up = LatentProjection("kv_b_proj", config, heads, placement)
        self.attention = PagedLatentAttention(layer_idx, config, placement.dtype)
        self.o = Linear(
            config.num_heads * config.value_dim,
            {"o_proj": hidden_size},
            wide,
            bias=config.bias,
            split=Split.INPUTS,
        )
        self.num_heads = len(heads.queries)
        self.rotary = rotary
        self.config = config

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        """hidden [num_tokens, hidden_size], same shape out"""
        config, num_tokens = self.config, hidden.shape[0]
        down = self.down(hidden)
        q, latent = down[:, : -config.width], down[:, -config.width :]
        if self.q_norm is not None and self.q_up is not None:
            self.q_norm.normalize(q)
            q = self.q_up(q.contiguous())
        q = q.view(num_tokens, self.num_heads, -1)
        query = torch.empty((num_tokens, self.num_heads, config.width), dtype=q.dtype, device=q.device)
        self.kv_up.into_latent(q[..., : config.key_dim], query[..., : config.latent_dim])
        ops.rotary_store_latent(
            context.positions,
            q,
            query,
            latent,
            self.rotary.cos_sin_cache,
            self.attention.kv_cache,
            self.attention.slots(context),
            self.kv_norm.weight,
            self.kv_norm.eps,
            config.interleaved,
        )
        return self.o(self.kv_up.out_of_latent(self.attention.attend(query, context)))

    def leaves(self) -> Iterator[Linear | RMSNorm | LatentProjection | PagedAttention]:
        yield self.down
        if self.q_norm is not None and self.q_up is not None:
            yield from (self.q_norm, self.q_up)
        yield from (self.kv_norm, self.kv_up, self.attention, self.o)
