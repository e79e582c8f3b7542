"""Logits of our models over paged, ragged, mixed batches against transformers on each request alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from pagewire.kernels import reference
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.config.rope_config import RopeConfig
from pagewire.services.executor.layers.attention.paged_attention import PagedAttention
from pagewire.services.executor.layers.rotary import RotaryEmbedding
from tests.services.executor.helpers.paged_batch import PagedBatch
from tests.services.executor.models.tiny import CPU, ROPE, TINY, assert_same_logits, load, save_tiny


@pytest.mark.architecture("LlamaForCausalLM")
@pytest.mark.parametrize("rope", ROPE)
def test_llama_with_each_rope_variant(tmp_path: Path, rope: str) -> None:
    expected = save_tiny(tmp_path, "Llama", rope_parameters=dict(ROPE[rope]))
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


OWN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama head_dim": ("Llama", {"head_dim": 16}),
    "llama gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "mistral window": ("Mistral", {"sliding_window": 5}),
    "mistral no window": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
    "qwen2 window": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "qwen3 biased tied": ("Qwen3", {"head_dim": 8, "attention_bias": True, "tie_word_embeddings": True}),
    "qwen3 window": (
        "Qwen3",
        {
            "head_dim": 16,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
}


@pytest.mark.architecture("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
@pytest.mark.parametrize("case", OWN)
def test_own_architectures(tmp_path: Path, case: str) -> None:
    family, overrides = OWN[case]
    expected = save_tiny(tmp_path, family, **overrides)
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


@torch.inference_mode()
def test_dynamic_rope_beyond_the_trained_length(tmp_path: Path) -> None:
    """A request of the longest served length sees the frequencies that transformers uses for that length."""
    expected = save_tiny(tmp_path, "Llama", rope_parameters=dict(ROPE["dynamic"]), max_position_embeddings=16)
    model = load(tmp_path, max_model_len=29)
    ids = torch.randint(67, (29,)).tolist()
    logits = PagedBatch(model, num_requests=1, max_len=29).step({0: ids})[0]
    torch.testing.assert_close(logits, expected(torch.tensor([ids])).logits[0], atol=2e-4, rtol=1e-4)


def test_partial_rotary_leaves_the_rest_of_a_head_alone() -> None:
    table = RotaryEmbedding(RopeConfig(partial_rotary_factor=0.5), 16, 32, CPU).cos_sin_cache
    assert torch.equal(table, RotaryEmbedding(RopeConfig(), 8, 32, CPU).cos_sin_cache)
    positions, query, key = torch.tensor([3, 31]), torch.randn(2, 2, 16), torch.randn(2, 1, 16)
    rotated_query, rotated_key = query.clone(), key.clone()
    reference.rotary_embedding(positions, rotated_query, rotated_key, table)
    for rotated, original in ((rotated_query, query), (rotated_key, key)):
        assert torch.equal(rotated[..., 8:], original[..., 8:])
        assert not torch.allclose(rotated[..., :8], original[..., :8])


FOREIGN: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2 (learned positions)": ("GPT2", {"n_inner": 80, "scale_attn_by_inverse_layer_idx": True}),
    "gpt_neox (partial rotary)": ("GPTNeoX", {}),
    "gemma2 (soft cap, windows)": (
        "Gemma2",
        {
            "head_dim": 16,
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 20,
        },
    ),
    "phi3 (fused projections)": ("Phi3", {"sliding_window": 6}),
    "olmo2 (post-norm)": ("Olmo2", {}),
    "granite (scaled logits)": ("Granite", {"logits_scaling": 3.0, "attention_multiplier": 0.2}),
    "mixtral (experts)": ("Mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "llama": ("Llama", {}),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_architectures_through_transformers(tmp_path: Path, case: str) -> None:
    family, overrides = FOREIGN[case]
    expected = save_tiny(tmp_path, family, **overrides)
    model = load(tmp_path, model_impl="transformers")
    assert_same_logits(model, expected)
    assert model.weight_bytes == 4 * expected.num_parameters()
    assert len(model.attention_layers) == 3


@pytest.mark.parametrize("family", ["GPTNeoX", "Phi", "Llama"])
def test_transformers_queries_are_as_the_gpus_kernels_take_them(
    tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU's kernels take any strides. Where only a part of each head is rotated, they differ from the others'."""
    expected = save_tiny(tmp_path, family, partial_rotary_factor=0.5)
    strides = []
    attend = PagedAttention.__call__

    def call(layer: PagedAttention, query: torch.Tensor, *args: Any) -> torch.Tensor:
        strides.append((query.stride(1), query.stride(2)))
        return attend(layer, query, *args)

    monkeypatch.setattr(PagedAttention, "__call__", call)
    assert_same_logits(load(tmp_path, model_impl="transformers"), expected)
    assert set(strides) == {(48 // 6, 1)}


def test_transformers_model_reports_its_windows(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Gemma2", head_dim=16, sliding_window=5)
    specs = [layer.kv_spec() for layer in load(tmp_path).attention_layers]
    assert [spec.window for spec in specs] == [5, 0, 5]


def test_own_implementation_is_the_default_where_there_is_one(tmp_path: Path) -> None:
    save_tiny(tmp_path / "own", "Llama")
    save_tiny(tmp_path / "foreign", "StableLm")
    assert type(load(tmp_path / "own")).__name__ == "DecoderModel"
    assert type(load(tmp_path / "foreign")).__name__ == "TransformersModel"
    with pytest.raises(ModelLoadError, match=r"StableLmForCausalLM is not among .*--model-impl transformers"):
        load(tmp_path / "foreign", model_impl="pagewire")


UNSERVABLE: dict[str, tuple[str, dict[str, Any], str]] = {
    "state space": ("Mamba", {"state_size": 4}, "recurrent state"),
    "head that asks for more": (
        "OPT",
        {"word_embed_proj_dim": 48, "ffn_dim": 80},
        "OPTForCausalLM cannot run over paged attention: its head cannot run apart from its decoder",
    ),
    "alibi": ("Mpt", {"d_model": 48, "n_heads": 6, "n_layers": 2}, "MptForCausalLM cannot run over paged attention"),
    "latent attention": (
        "DeepseekV3",
        {
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
            "kv_lora_rank": 8,
            "q_lora_rank": None,
            "first_k_dense_replace": 3,
            "num_key_value_heads": 6,
        },
        "differ in size",
    ),
    "sinks": (
        "GptOss",
        {"head_dim": 8, "num_local_experts": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
        "s_aux",
    ),
}


@pytest.mark.parametrize("case", UNSERVABLE)
def test_architectures_that_cannot_work_say_why(tmp_path: Path, case: str) -> None:
    family, overrides, message = UNSERVABLE[case]
    config = getattr(transformers, f"{family}Config")(**(TINY | overrides))
    config.architectures = [f"{family}ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, load_format="dummy", model_impl="transformers")


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    config = transformers.T5Config(d_model=16, num_layers=1, architectures=["T5ForConditionalGeneration"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match="encoder-decoder"):
        load(tmp_path, load_format="dummy")


def test_rope_that_depends_on_the_batch_is_refused_beyond_its_unscaled_length(tmp_path: Path) -> None:
    factors = [1.0] * 4
    scaling = {"rope_type": "longrope", "short_factor": factors, "long_factor": [2.0] * 4, "rope_theta": 10000.0}
    save_tiny(tmp_path, "Phi3", rope_parameters=scaling, original_max_position_embeddings=32)
    with pytest.raises(ModelLoadError, match=r"--max-model-len 64 exceeds 32 .*longrope"):
        load(tmp_path, model_impl="transformers")
    assert load(tmp_path, model_impl="transformers", max_model_len=32).config.max_position_embeddings == 64


def test_our_kernels_package_is_not_taken_for_hugging_faces() -> None:
    from transformers.utils.import_utils import is_kernels_available

    from pagewire import kernels

    assert Path(next(iter(kernels.__path__))).resolve() == Path(__file__).parents[4] / "kernels"
    assert not is_kernels_available()
