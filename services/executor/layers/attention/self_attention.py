"""Self-attention: fused QKV projection; q/k norm, rotary embedding and KV write; paged attention; output projection."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.config.model_config import DecoderConfig
from pagewire.services.executor.layers.attention.heads import Heads, heads_of
from pagewire.services.executor.layers.attention.paged_attention import PagedAttention
from pagewire.services.executor.layers.attention.sinks import Sinks
from pagewire.services.executor.layers.kv_spec import KVSpec
from pagewire.services.executor.layers.linear import Linear, Split, StreamUpdate
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.layers.row_order import rotary_pairs_apart
from pagewire.services.executor.step.step_context import StepContext


class HeadAttention:
    """The steps between the projections: heads are normalized and rotated if the model does so, then attend."""

    __slots__ = ("attention", "head_dim", "norms", "num_heads", "rotary", "sinks")

    def __init__(
        self,
        layer_idx: int,
        num_heads: int,
        spec: KVSpec,
        rotary: RotaryEmbedding | None,
        *,
        scale: float | None = None,
        soft_cap: float = 0.0,
        norms: tuple[RMSNorm, RMSNorm] | None = None,
        sinks: Sinks | None = None,
    ) -> None:
        """rotary: shared by layers; None: heads are not rotated.

        scale: factor of scores, 1 / sqrt(head_dim) if None. soft_cap: cap of scores; 0 = off. norms: norms of query
        and key heads, for rotated heads only.
        """
        scale = spec.head_dim**-0.5 if scale is None else scale
        self.attention = PagedAttention(layer_idx, spec, scale, soft_cap, sinks)
        self.head_dim = spec.head_dim
        self.num_heads = num_heads
        self.rotary = rotary
        self.norms = norms
        self.sinks = sinks

    def __call__(self, qkv: Tensor, context: StepContext) -> Tensor:
        """qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] -> [num_tokens, num_heads * head_dim]"""
        num_tokens = qkv.shape[0]
        heads = qkv.view(num_tokens, -1, self.head_dim)  # q, k and v side by side
        query = heads.narrow(1, 0, self.num_heads)
        attention = self.attention
        if self.rotary is None:
            key, value = heads.narrow(1, self.num_heads, heads.shape[1] - self.num_heads).chunk(2, dim=1)
            return attention(query, key, value, context).view(num_tokens, -1)
        q_norm, k_norm = self.norms or (None, None)
        ops.rotary_store_kv(
            context.positions,
            heads,
            self.rotary.cos_sin_cache if context.rope_table is None else context.rope_table,
            attention.kv_cache,
            attention.slots(context),
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            0.0 if q_norm is None else q_norm.eps,
            attention.cache_scales,
        )
        return attention.attend(query, context).view(num_tokens, -1)

    def leaves(self) -> Iterator[RMSNorm | Sinks | PagedAttention]:
        if self.norms is not None:
            yield from self.norms
        if self.sinks is not None:
            yield self.sinks
        yield self.attention


class SelfAttention:
    """One layer's attention."""

    __slots__ = ("heads", "o", "qkv")

    def __init__(self, qkv: Linear, heads: HeadAttention, o: Linear) -> None:
        self.qkv = qkv
        self.heads = heads
        self.o = o

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        """hidden [num_tokens, hidden_size], same shape out"""
        return self.o(self.heads(self.qkv(hidden), context))

    @property
    def takes_norm(self) -> bool:
        return self.qkv.takes_norm

    def after_norm(self, norm: RMSNorm, hidden: Tensor, stream: StreamUpdate, context: StepContext) -> Tensor:
        """Computes the block behind `norm.add(hidden, stream.residual)`; the sum becomes `stream.updated`."""
        return self.o(self.heads(self.qkv.after_norm(norm, hidden, stream), context))

    def leaves(self) -> Iterator[Linear | RMSNorm | Sinks | PagedAttention]:
        yield self.qkv
        yield from self.heads.leaves()
        yield self.o


def llama_attention(
    config: DecoderConfig,
    layer_idx: int,
    rotary: RotaryEmbedding | None,
    placement: Placement,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    norm: type[RMSNorm] = RMSNorm,
    sinks: Sinks | None = None,
    rotates_neighbours: bool = False,
    output: str = "o_proj",
) -> SelfAttention:
    """Returns attention as in Llama: three projections by its names, which most other models have adopted.

    scale, soft_cap, sinks: see `HeadAttention`. norm: norm of query and key heads, if the config has one.
    rotates_neighbours: elements (0, 1), (2, 3), ... of a head are rotated in place of those half a head apart. output:
    the name of the last projection.
    """
    out_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    heads = heads_of(config, placement)
    rows: dict[str, Tensor | range] = {}
    if not heads.is_whole:
        rows = {"q_proj": heads.query_rows, "k_proj": heads.key_rows, "v_proj": heads.key_rows}
    if rotates_neighbours:
        rotary_dim = config.rope.rotary_dim(config.head_dim)
        for name, own, count in (
            ("q_proj", heads.query_rows, config.num_heads),
            ("k_proj", heads.key_rows, config.num_kv_heads),
        ):
            rows[name] = rotary_pairs_apart(count, config.head_dim, rotary_dim)[own.start : own.stop]
    shards = {"q_proj": out_size, "k_proj": kv_size, "v_proj": kv_size}
    norms = None
    if config.qk_norm:
        q_norm = norm("q_norm", config.head_dim, config.rms_norm_eps, placement)
        k_norm = norm("k_norm", config.head_dim, config.rms_norm_eps, placement)
        norms = (q_norm, k_norm)
    return SelfAttention(
        Linear(config.hidden_size, shards, placement, bias=config.qkv_bias, rows=rows),
        head_attention(config, layer_idx, rotary, heads, scale=scale, soft_cap=soft_cap, norms=norms, sinks=sinks),
        Linear(
            out_size, {output: config.hidden_size}, placement, bias=config.attention_output_bias, split=Split.INPUTS
        ),
    )


def head_attention(
    config: DecoderConfig,
    layer_idx: int,
    rotary: RotaryEmbedding | None,
    heads: Heads,
    *,
    scale: float | None = None,
    soft_cap: float = 0.0,
    norms: tuple[RMSNorm, RMSNorm] | None = None,
    sinks: Sinks | None = None,
) -> HeadAttention:
    """Returns attention with the config's window. heads: the rank's. For the others see `HeadAttention`."""
    spec = KVSpec(len(heads.keys), config.head_dim, config.dtype, config.sliding_windows[layer_idx])
    attention = HeadAttention(
        layer_idx, len(heads.queries), spec, rotary, scale=scale, soft_cap=soft_cap, norms=norms, sinks=sinks
    )
    attention.attention.stored_heads = (heads.keys, heads.num_kv_heads)
    return attention
