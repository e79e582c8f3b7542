"""The `pagewire::` ops as bound overloads: a layer's call skips torch's overload resolution."""

import torch

import kernels  # noqa: F401  (registers the ops)

paged_attention = torch.ops.pagewire.paged_attention.default
store_kv = torch.ops.pagewire.store_kv.default
rms_norm = torch.ops.pagewire.rms_norm.default
add_rms_norm = torch.ops.pagewire.add_rms_norm.default
rotary_embedding = torch.ops.pagewire.rotary_embedding.default
silu_and_mul = torch.ops.pagewire.silu_and_mul.default
gelu_tanh_and_mul = torch.ops.pagewire.gelu_tanh_and_mul.default
linear = torch.ops.pagewire.linear.default
