"""DeepSeek-V2 and V3: latent attention, shared and routed experts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.experts.routing import Router
from pagewire.services.executor.models.experts.deepseek_v2 import DeepseekModel
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.start.assembly import assemble
from tests.services.executor.helpers.paged_batch import PagedBatch
from tests.services.executor.helpers.stepping import (
    BLOCK_SIZE,
    CPU,
    LIMITS,
    VOCAB_SIZE,
    Driver,
    check_random_steps,
    graph_steps,
    make_driver,
    prompt,
)
from tests.services.executor.models.tiny import assert_same_logits, load, save_tiny

LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "intermediate_size": 80,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 0.7,
    "mscale_all_dim": 0.7,
}


@pytest.mark.architecture("DeepseekV2ForCausalLM")
@pytest.mark.parametrize(
    "keys",
    [
        {"q_lora_rank": None, "n_shared_experts": 1},  # Lite
        {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2, "routed_scaling_factor": 3.0},
        {"rope_parameters": YARN, "first_k_dense_replace": 0},
    ],
    ids=["lite", "groups", "yarn"],
)
def test_v2(tmp_path: Path, keys: dict[str, Any]) -> None:
    expected = save_tiny(tmp_path, "DeepseekV2", **(LATENT | keys))
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


@pytest.mark.architecture("DeepseekV3ForCausalLM")
@pytest.mark.parametrize(
    "keys",
    [{}, {"rope_parameters": YARN, "attention_bias": True}, {"rope_interleave": False, "norm_topk_prob": False}],
    ids=["plain", "yarn, biased", "halves"],
)
def test_v3(tmp_path: Path, keys: dict[str, Any]) -> None:
    expected = save_tiny(tmp_path, "DeepseekV3", **(LATENT | {"n_group": 4, "topk_group": 2} | keys))
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


def with_correction_bias(model: PreTrainedModel, path: Path) -> PreTrainedModel:
    """Saved again with biases that change which experts are chosen."""
    generator = torch.Generator().manual_seed(5)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0.0, 0.3, generator=generator)
    model.save_pretrained(path)
    return model


def test_a_correction_bias_chooses_but_does_not_weigh(tmp_path: Path) -> None:
    saved = save_tiny(tmp_path, "DeepseekV3", **(LATENT | {"n_group": 4, "topk_group": 2}))
    expected = with_correction_bias(saved, tmp_path)
    assert_same_logits(load(tmp_path), expected)


@pytest.mark.parametrize("version", [2, 3])
@torch.inference_mode()
def test_routers_compute_in_fp32(tmp_path: Path, version: int) -> None:
    """Routers do so in a bf16 model, too: rounded logits would choose other experts."""
    keys = {"n_group": 1, "topk_group": 1, "num_hidden_layers": 1, "first_k_dense_replace": 0}
    expected = save_tiny(tmp_path, f"DeepseekV{version}", **(LATENT | keys)).bfloat16()
    expected.save_pretrained(tmp_path)
    model = load(tmp_path, dtype="bfloat16")
    assert isinstance(model, DeepseekModel)
    (router,) = (module for module in model.modules() if isinstance(module, Router))
    hidden = torch.randn(40, 48, generator=torch.Generator().manual_seed(1)).bfloat16()
    logits = expected.model.layers[0].mlp.gate(hidden)[0]
    assert logits.dtype is torch.float32 and not torch.equal(logits, logits.bfloat16().float())
    torch.testing.assert_close(router(hidden), logits, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("quantization", [None, "none"])
def test_a_quantized_router(tmp_path: Path, quantization: str | None) -> None:
    """Checkpoints have such routers if their config excepts no module."""
    expected = save_tiny(tmp_path, "DeepseekV2", **LATENT)
    tensors, parameters = load_file(tmp_path / "model.safetensors"), dict(expected.named_parameters())
    for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
        scale = tensors[name].abs().amax() / 448
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
        parameters[name].data.copy_(tensors[name].float() * scale)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    assert_same_logits(load(tmp_path, quantization=quantization), expected)
    in_bf16 = PagedBatch(load(tmp_path, quantization=quantization, dtype="bfloat16"), num_requests=1, max_len=8)
    assert in_bf16.step({0: [3, 4, 5]})[0].isfinite().all()


def test_fp8_blocks(tmp_path: Path) -> None:
    """The form in which DeepSeek publishes V3: scales per block of 128 x 128, and a layer for several tokens at once at
    the end."""
    sizes = {"hidden_size": 128, "kv_lora_rank": 136, "moe_intermediate_size": 128, "n_group": 1, "topk_group": 1}
    expected = save_tiny(tmp_path, "DeepseekV3", **(LATENT | sizes))
    tensors, parameters = load_file(tmp_path / "model.safetensors"), dict(expected.named_parameters())
    for name in [name for name in tensors if name.endswith("_proj.weight") or "kv_a_proj_with_mqa" in name]:
        weight = tensors[name]
        num_blocks = [-(-size // 128) for size in weight.shape]
        scales = torch.rand(num_blocks, generator=torch.Generator().manual_seed(len(name))) * 0.004 + 0.001
        spread = scales.repeat_interleave(128, 0)[: weight.shape[0]].repeat_interleave(128, 1)[:, : weight.shape[1]]
        stored = (weight / spread).clamp(-448, 448).to(torch.float8_e4m3fn)
        tensors |= {name: stored, f"{name}_scale_inv": scales}
        exact = stored.float() * spread
        if ".experts." not in name:
            parameters[name].data.copy_(exact)
            continue
        prefix, _, rest = name.partition(".experts.")
        expert, projection = int(rest.split(".")[0]), rest.split(".")[1]
        fused = "down_proj" if projection == "down_proj" else "gate_up_proj"
        half = {"down_proj": slice(None), "gate_proj": slice(0, 128), "up_proj": slice(128, 256)}[projection]
        parameters[f"{prefix}.experts.{fused}"].data[expert, half] = exact
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(4, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    quantized = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": quantized}))
    load(tmp_path, weights_cache=str(tmp_path / "kept"))
    from_cache = load(tmp_path, weights_cache=str(tmp_path / "kept"))
    assert len(list((tmp_path / "kept").iterdir())) == 1
    assert_same_logits(from_cache, expected)


@pytest.fixture(scope="module")
def lite(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = tmp_path_factory.mktemp("deepseek")
    keys = {"q_lora_rank": None, "vocab_size": VOCAB_SIZE, "max_position_embeddings": 96}
    save_tiny(path, "DeepseekV2", **(LATENT | keys))
    return load(path)


@pytest.mark.skipif(cpu_backend() != "cpp", reason="there is no C++ compiler: steps are not recorded")
def test_steps_are_recorded_and_change_no_token(lite: Model) -> None:
    from pagewire.services.executor.graphs.recorded_steps import RecordedSteps

    runner = assemble(lite, LIMITS, 64, CPU, graphs=RecordedSteps(LIMITS.max_num_seqs, 64, requests=(2, 5)))
    for layer in lite.attention_layers:
        layer.kv_cache.fill_(float("nan"))
    while runner.record_missing():
        pass
    before = graph_steps("replayed")
    check_random_steps(lite, Driver(runner, 64), seed=3)
    assert graph_steps("replayed") > before


def test_blocks_of_latents_are_shared(lite: Model) -> None:
    """A prefix that another request has computed, and the cache is as small as it should be."""
    driver = make_driver(lite)
    driver.add(0, prompt(20))
    first = driver.generate(0, 3, first=20)
    driver.add(1, prompt(20), shared_blocks=driver.blocks(0)[: 16 // BLOCK_SIZE])
    assert driver.generate(1, 3, first=4) == first
    page_bytes = [layer.kv_spec().page_bytes(BLOCK_SIZE) for layer in lite.attention_layers]
    assert page_bytes == 3 * [BLOCK_SIZE * (24 + 8) * 4]


@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_a_cache_of_8_bits_is_refused(tmp_path: Path, name: str) -> None:
    save_tiny(tmp_path, "DeepseekV3", **LATENT, n_group=1, topk_group=1)
    read: list[str] = []
    with pytest.raises(ModelLoadError, match=f"--kv-cache-dtype {name}: the model stores a latent"):
        load(tmp_path, kv_cache_dtype=name, progress=lambda fraction, text: read.append(text))
    assert not read, "it is known before weights are read"
    loaded = load(tmp_path, kv_cache_dtype="smallest")
    assert all(layer.kv_scales is None for layer in loaded.attention_layers)
