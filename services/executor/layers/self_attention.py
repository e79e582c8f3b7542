"""The self-attention block: fused QKV projection; q/k norm, rotary embedding and KV write; paged attention; output."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from pagewire.kernels import ops
from pagewire.services.executor.layers.kv_spec import KVSpec
from pagewire.services.executor.layers.linear import Linear
from pagewire.services.executor.layers.norm import RMSNorm
from pagewire.services.executor.layers.paged_attention import PagedAttention
from pagewire.services.executor.layers.placement import Placement
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from pagewire.services.executor.model_config import DecoderConfig
from pagewire.services.executor.step_context import StepContext


class SelfAttention:
    """One layer's attention. `rotary` is shared by all layers."""

    __slots__ = ("attention", "eps", "head_dim", "k_norm", "num_heads", "o", "out_size", "q_norm", "qkv", "rotary")

    def __init__(self, config: DecoderConfig, layer_idx: int, rotary: RotaryEmbedding, placement: Placement) -> None:
        heads, kv_heads, head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        out_size, kv_size = heads * head_dim, kv_heads * head_dim
        shards = {"q_proj": out_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv = Linear(config.hidden_size, shards, placement, bias=config.qkv_bias)
        self.o = Linear(out_size, {"o_proj": config.hidden_size}, placement, bias=config.attention_output_bias)
        self.q_norm = RMSNorm("q_norm", head_dim, config.rms_norm_eps, placement) if config.qk_norm else None
        self.k_norm = RMSNorm("k_norm", head_dim, config.rms_norm_eps, placement) if config.qk_norm else None
        self.rotary = rotary
        spec = KVSpec(kv_heads, head_dim, config.dtype, config.sliding_windows[layer_idx])
        self.attention = PagedAttention(layer_idx, spec, head_dim**-0.5)
        self.eps = config.rms_norm_eps
        self.num_heads = heads
        self.head_dim = head_dim
        self.out_size = out_size

    def __call__(self, hidden: Tensor, context: StepContext) -> Tensor:
        """hidden [num_tokens, hidden_size], same shape out"""
        num_tokens = hidden.shape[0]
        qkv = self.qkv(hidden).view(num_tokens, -1, self.head_dim)  # heads of q, k and v side by side
        attention = self.attention
        ops.rotary_store_kv(
            context.positions,
            qkv,
            self.rotary.cos_sin_cache,
            attention.kv_cache,
            context.slot_mapping,
            None if self.q_norm is None else self.q_norm.weight,
            None if self.k_norm is None else self.k_norm.weight,
            self.eps,
            attention.kv_scales,
        )
        output = attention.attend(qkv.narrow(1, 0, self.num_heads), context)
        return self.o(output.view(num_tokens, self.out_size))

    def leaves(self) -> Iterator[Linear | RMSNorm | PagedAttention]:
        yield self.qkv
        if self.q_norm is not None and self.k_norm is not None:
            yield from (self.q_norm, self.k_norm)
        yield self.attention
        yield self.o
