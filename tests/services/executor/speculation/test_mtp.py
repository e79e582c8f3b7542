"""MTP layers of random weights: what they draft is what the formulas say, by transformers' own layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from pagewire.config import ExecutorConfig
from pagewire.config.speculation import Speculation
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.models.drafting.mtp import FORMS, MtpHead
from pagewire.services.executor.parallel.group import ALONE_GROUP
from pagewire.services.executor.speculation.draft_steps import Target
from pagewire.services.executor.speculation.drafters import load_drafter
from tests.services.executor.helpers.stepping import CPU, LIMITS, SEEDED, VOCAB_SIZE, alone, make_driver, prompt
from tests.services.executor.models.tiny import assert_same_logits, load, save_tiny
from tests.services.executor.speculation.recording import NUM_DRAFTS, Recording

SIZE, LAYERS = 48, 2
SIZES: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 96, "num_hidden_layers": LAYERS + 1}
EXPERTS: dict[str, Any] = {
    "num_key_value_heads": 6,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = EXPERTS | {
    "kv_lora_rank": 24,
    "q_lora_rank": 20,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
# class in config.json -> (the family of transformers that provides the MTP layer by its last one, its config)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepseekV3ForCausalLM": ("DeepseekV3", LATENT),
    "Glm4MoeForCausalLM": (
        "Glm4Moe",
        EXPERTS | {"num_key_value_heads": 2, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
    ),
    "MiMoForCausalLM": ("Qwen2", {}),
}


def extra_tensors(architecture: str) -> dict[str, Tensor]:
    """Returns values by the field of the form."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    norms = {name: 1 + 0.3 * random(SIZE) for name in ("embedding_norm", "hidden_norm", "output_norm")}
    return norms | {"projection": random(SIZE, 2 * SIZE) * SIZE**-0.5}


def save_with_head(path: Path, architecture: str) -> PreTrainedModel:
    """Writes a checkpoint with the head as the last layer. What is returned has them all alike."""
    family, config = FAMILIES[architecture]
    whole, form = save_tiny(path, family, **(SIZES | config)), FORMS[architecture]
    name = form.layer.format(LAYERS)
    stored = load_file(path / "model.safetensors")
    tensors = {key.replace(f"model.layers.{LAYERS}.", f"{name}."): tensor for key, tensor in stored.items()}
    tensors |= {
        f"{name}.{getattr(form, field)}.weight": tensor for field, tensor in extra_tensors(architecture).items()
    }
    tensors[f"{name}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    keys = json.loads((path / "config.json").read_text())
    keys.pop("layer_types", None)
    keys |= {"architectures": [architecture], "num_hidden_layers": LAYERS, "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(keys))
    return whole


@torch.inference_mode()
def expected_drafts(whole: PreTrainedModel, architecture: str, tokens: list[int]) -> list[int]:
    """Behind the tokens of which the target has computed all but the last."""
    form, w = FORMS[architecture], extra_tensors(architecture)
    body, eps = whole.model, whole.config.rms_norm_eps
    last, body.layers = body.layers[LAYERS], body.layers[:LAYERS]
    body.config.num_hidden_layers = LAYERS
    hidden, next_ids, drafts = body(torch.tensor([tokens[:-1]])).last_hidden_state, tokens[1:], list[int]()
    body.layers.append(last)
    for _ in range(NUM_DRAFTS):
        halves = [
            F.rms_norm(body.embed_tokens(torch.tensor([next_ids])), (SIZE,), w["embedding_norm"], eps),
            F.rms_norm(hidden, (SIZE,), w["hidden_norm"], eps),
        ]
        stream = torch.cat(halves[::-1] if form.hidden_first else halves, dim=2) @ w["projection"].T
        positions, length = torch.arange(len(next_ids))[None], len(next_ids)
        mask = torch.full((length, length), -torch.inf).triu(1)[None, None]
        rotary = body.rotary_emb(stream, positions)
        output = last(stream, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
        stream = output[0] if isinstance(output, tuple) else output
        normed = F.rms_norm(stream, (SIZE,), w["output_norm"], eps)
        drafts.append(int(whole.lm_head(normed[:, -1]).argmax()))
        passed = normed if form.passes_normed else stream
        hidden, next_ids = torch.cat((hidden, passed[:, -1:]), dim=1), [*next_ids, drafts[-1]]
    return drafts


def load_head(path: Path, target: Any) -> MtpHead:
    config = ExecutorConfig(model=str(path))
    head = load_drafter(Speculation("mtp"), config, target, LIMITS, CPU, ALONE_GROUP)
    assert isinstance(head, MtpHead)
    return head


@pytest.mark.parametrize("architecture", FAMILIES)
def test_drafts_are_those_of_the_formulas(tmp_path: Path, architecture: str) -> None:
    """Behind a prompt in chunks, behind steps in which all drafts were wrong, and after steps without any."""
    whole = save_with_head(tmp_path, architecture)
    model, twin = load(tmp_path), load(tmp_path)
    proposer = Recording(Target(model, LIMITS, 64, CPU), load_head(tmp_path, model), NUM_DRAFTS, LIMITS.max_model_len)
    driver = make_driver(model, proposer=proposer)
    driver.add(0, prompt(37, 1))
    driver.add(1, prompt(5, 2), SEEDED)
    driver.step({0: 13})
    driver.step({0: 24, 1: 5})
    for plain_steps in (0, 3, 0):
        for _ in range(plain_steps):
            driver.step({0: 1, 1: 1})
        known = prompt(37, 1) + driver.tokens[0]
        driver.step({1: 1 + NUM_DRAFTS, 0: 1 + NUM_DRAFTS}, {0: NUM_DRAFTS, 1: NUM_DRAFTS})
        assert proposer.drafts[0] == expected_drafts(whole, architecture, known)
    assert driver.tokens[0] == alone(twin, prompt(37, 1), len(driver.tokens[0]))
    assert driver.tokens[1] == alone(twin, prompt(5, 2), len(driver.tokens[1]), SEEDED)


@pytest.mark.architecture("MiMoForCausalLM", "Glm4MoeForCausalLM")
@pytest.mark.parametrize("architecture", ["MiMoForCausalLM", "Glm4MoeForCausalLM"])
def test_the_model_itself_does_without(tmp_path: Path, architecture: str) -> None:
    expected = save_with_head(tmp_path, architecture)
    expected.model.layers = expected.model.layers[:LAYERS]
    expected.config.num_hidden_layers = LAYERS
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    save_with_head(tmp_path / "one", "MiMoForCausalLM")
    model = load(tmp_path / "one")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if "mtp_layers" not in name}
    save_file(kept, tmp_path / "one" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=r"the checkpoint has no MTP layer \(model.mtp_layers.0\); use another"):
        load_head(tmp_path / "one", model)
    save_tiny(tmp_path / "two", "Llama")
    with pytest.raises(ModelLoadError, match="LlamaForCausalLM has no MTP layer that is known here"):
        load_head(tmp_path / "two", load(tmp_path / "two"))
