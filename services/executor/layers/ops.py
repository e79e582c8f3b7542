"""The `pagewire::` ops as bound overloads: a call skips torch's overload resolution."""

import torch

import pagewire.kernels.ops  # noqa: F401  (registers the ops)

paged_attention = torch.ops.pagewire.paged_attention.default
store_kv = torch.ops.pagewire.store_kv.default
rotary_store_kv = torch.ops.pagewire.rotary_store_kv.default
add_rms_norm = torch.ops.pagewire.add_rms_norm.default
silu_and_mul = torch.ops.pagewire.silu_and_mul.default
gelu_tanh_and_mul = torch.ops.pagewire.gelu_tanh_and_mul.default
linear = torch.ops.pagewire.linear.default
packed_linear = torch.ops.pagewire.packed_linear.default
packed_embedding = torch.ops.pagewire.packed_embedding.default
step_inputs = torch.ops.pagewire.step_inputs.default
sample_tokens = torch.ops.pagewire.sample_tokens.default
accept_tokens = torch.ops.pagewire.accept_tokens.default
apply_penalties = torch.ops.pagewire.apply_penalties.default
token_logprobs = torch.ops.pagewire.token_logprobs.default
