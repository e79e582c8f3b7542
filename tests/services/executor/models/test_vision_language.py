"""Models that read images, through the model runner, against transformers' own generation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pagewire.services.executor.batch.images.embedding_cache import EmbeddingCache
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.graphs.recorded_steps import RecordedSteps
from pagewire.services.executor.models.vision.vision_language import VisionLanguageModel
from pagewire.services.executor.start.assembly import assemble
from tests.services.executor.helpers.stepping import BLOCK_SIZE, CPU, LIMITS, Driver, graph_steps, sampling_params
from tests.services.executor.models.tiny import load
from tests.services.executor.models.tiny_vision import (
    ImagePrompt,
    idefics3_config,
    llava_config,
    qwen2_5_vl_config,
    qwen2_vl_config,
    save_tiny_vision,
    tensors,
)

CONFIGS = {
    "llava-clip": llava_config(),
    "llava-siglip": llava_config("siglip_vision_model", "qwen2"),
    "idefics3": idefics3_config(),
    "smolvlm": idefics3_config("SmolVLM"),
    "qwen2-vl": qwen2_vl_config(),
    "qwen2.5-vl": qwen2_5_vl_config(),
}


def driver_of(path: Path, *, recorded: bool = True, cache_bytes: int = 1 << 20) -> Driver:
    graphs = RecordedSteps(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens) if recorded else None
    runner = assemble(load(path), LIMITS, 64, CPU, graphs=graphs, image_cache_bytes=cache_bytes)
    return Driver(runner, 64)


def vision_model(path: Path) -> VisionLanguageModel:
    model = load(path)
    assert isinstance(model, VisionLanguageModel)
    return model


def prompts_of(config: Any) -> dict[int, ImagePrompt]:
    """One image, two, none, in different sizes where the model has these."""
    one, two, wide = tensors(config, 1), tensors(config, 2, (4, 4)), tensors(config, 3, (2, 10))
    return {
        0: ImagePrompt(config, [5, 6, 7], one, [8, 9]),
        1: ImagePrompt(config, [5], two, [30, 31, 32], wide, [33] * 9),
        2: ImagePrompt(config, [40, 41, 42, 43]),
        3: ImagePrompt(config, [50, 51], one, [52]),
    }


@pytest.mark.architecture(
    "LlavaForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
)
@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Whole prompts and chunks that cut images, beside a request without any, then decoding in recorded steps."""
    config = CONFIGS[name]
    reference = save_tiny_vision(tmp_path, config)
    prompts = prompts_of(config)
    driver = driver_of(tmp_path)
    for request_id, prompt in prompts.items():
        driver.add(request_id, prompt.token_ids, images=prompt.images)
    left = {request_id: len(prompt.token_ids) for request_id, prompt in prompts.items()}
    for chunk in ({0: 100, 1: 3, 2: 2, 3: 5}, {1: 6, 2: 1}, {1: 2, 2: 1, 3: 100}, {0: 1, 1: 100}):
        scheduled = {request_id: min(count, left[request_id]) or 1 for request_id, count in chunk.items()}
        driver.step(scheduled)
        left = {request_id: max(0, count - scheduled.get(request_id, 0)) for request_id, count in left.items()}
    replayed = graph_steps("replayed")
    for _ in range(6):
        driver.step(dict.fromkeys(prompts, 1))
    assert graph_steps("replayed") - replayed == 5
    for request_id, prompt in prompts.items():
        tokens = driver.tokens[request_id]
        assert tokens == prompt.expected(reference, len(tokens)), request_id
    assert driver.tokens[0] != driver.tokens[3]


@pytest.mark.parametrize("name", ["llava-clip", "qwen2.5-vl"])
def test_prompts_with_images_have_log_probabilities(name: str, tmp_path: Path) -> None:
    reference = save_tiny_vision(tmp_path, CONFIGS[name])
    prompt = prompts_of(CONFIGS[name])[1]
    expected = prompt.expected_logprobs(reference).numpy()
    driver = driver_of(tmp_path)
    driver.add(0, prompt.token_ids, sampling_params(temperature=0, prompt_logprobs=0), images=prompt.images)
    driver.step({0: 3})
    host = driver.step({0: len(prompt.token_ids) - 3})
    np.testing.assert_allclose(host.prompt_logprobs[0].logprobs[:, 0], expected, atol=1e-4)


@pytest.mark.parametrize("name", ["llava-clip", "idefics3", "qwen2.5-vl"])
def test_a_head_of_its_own_although_tied(name: str, tmp_path: Path) -> None:
    reference = save_tiny_vision(tmp_path, CONFIGS[name])
    raw = json.loads((tmp_path / "config.json").read_text())
    raw |= {"tie_word_embeddings": True, "text_config": raw["text_config"] | {"tie_word_embeddings": True}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    prompt = prompts_of(CONFIGS[name])[0]
    driver = driver_of(tmp_path)
    driver.add(0, prompt.token_ids, images=prompt.images)
    assert driver.generate(0, 4, first=len(prompt.token_ids)) == prompt.expected(reference, 4)


def test_an_image_is_encoded_once_and_found_by_its_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = CONFIGS["qwen2.5-vl"]
    reference = save_tiny_vision(tmp_path, config)
    driver = driver_of(tmp_path)
    model = driver.runner._model
    assert isinstance(model, VisionLanguageModel)
    encoded: list[Mapping[str, torch.Tensor]] = []
    embed = model.embed_image

    def counted(image: Mapping[str, torch.Tensor]) -> torch.Tensor:
        encoded.append(image)
        return embed(image)

    monkeypatch.setattr(model, "embed_image", counted)
    one, other = tensors(config, 1), tensors(config, 2)
    prompts = [ImagePrompt(config, [5] * 4, image, [8] * 9) for image in (one, other)]
    driver.add(0, prompts[0].token_ids, images=prompts[0].images)
    tokens = driver.generate(0, 4, first=6)  # the image is cut
    while len(driver.tokens[0]) < 4:
        driver.step({0: 1})
    assert len(encoded) == 1
    # The same image in another request, and in one that goes on after its blocks: no tensor is looked at again.
    driver.add(1, prompts[0].token_ids, images=prompts[0].images, shared_blocks=driver.blocks(0)[:1])
    assert driver.generate(1, 4, first=len(prompts[0].token_ids) - BLOCK_SIZE) == tokens
    driver.add(2, prompts[0].token_ids + tokens[:2], images=prompts[0].images, num_prompt_tokens=19)
    assert driver.generate(2, 2, first=21) == tokens[2:]
    assert len(encoded) == 1
    driver.add(3, prompts[1].token_ids, images=prompts[1].images)
    assert driver.generate(3, 4, first=19) == prompts[1].expected(reference, 4) != tokens
    assert len(encoded) == 2


def test_what_is_kept_has_a_bound() -> None:
    cache = EmbeddingCache(max_bytes=2 * 64)
    for name in (b"a", b"b"):
        cache.put(name, torch.zeros(16))
    assert cache.get(b"a") is not None
    cache.put(b"c", torch.zeros(16))  # b is the longest unused
    cache.put(b"d", torch.zeros(1000))  # more than there is room for
    assert [cache.get(name) is not None for name in (b"a", b"b", b"c", b"d")] == [True, False, True, False]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": {"model_type": "gpt2"}}, "text_config.model_type: 'gpt2' is not one of llama"),
        ({"image_token_index": 5000, "image_token_id": 5000}, "5000 is outside the vocabulary of 120"),
        ({"vision_config": {"model_type": "nonsense"}}, "transformers does not take this config"),
    ],
)
def test_a_config_that_cannot_be_served_is_named(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, CONFIGS["llava-clip"])
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    ("name", "prefixes"),
    [
        ("llava-clip", {"vision_tower.": "vision_tower.vision_model."}),
        (
            "llava-clip",
            {
                "language_model.model.": "model.language_model.",
                "language_model.lm_head.": "lm_head.",
                "vision_tower.": "model.vision_tower.",
                "multi_modal_projector.": "model.multi_modal_projector.",
            },
        ),
        ("qwen2.5-vl", {"model.": "model.language_model.", "visual.": "model.visual."}),
    ],
)
def test_checkpoints_of_all_layouts_load(name: str, prefixes: dict[str, str], tmp_path: Path) -> None:
    save_tiny_vision(tmp_path, CONFIGS[name])
    stored = load_file(tmp_path / "model.safetensors")
    expected = vision_model(tmp_path).load_targets()
    renamed = {}
    for tensor_name, tensor in stored.items():
        old = next((old for old in prefixes if tensor_name.startswith(old)), "")
        renamed[prefixes.get(old, "") + tensor_name.removeprefix(old)] = tensor
    save_file(renamed, tmp_path / "model.safetensors")
    loaded = vision_model(tmp_path).load_targets()
    assert loaded.keys() == expected.keys()
    for tensor_name, tensor in loaded.items():
        assert torch.equal(tensor, expected[tensor_name]), tensor_name
