"""Images count where memory is set aside: the largest are part of the profile, their kept embeddings of the budget."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from pagewire.config import ExecutorConfig
from pagewire.services.executor.batch.images import image_inputs
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.loading import served_model
from pagewire.services.executor.models.vision.vision_language import VisionLanguageModel
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.memory_profile import profile_run
from pagewire.services.executor.start.phases import Phases
from pagewire.services.executor.start.runner_setup import Setup, cuda_cache_bytes
from pagewire.services.executor.start.startup import start_runner
from pagewire.services.executor.step.limits import Limits
from tests.services.executor.helpers.fake_meter import FakeMeter
from tests.services.executor.helpers.stepping import CPU
from tests.services.executor.models.test_vision_language import vision_model
from tests.services.executor.models.tiny_vision import (
    idefics3_config,
    llava_config,
    qwen2_5_vl_config,
    save_tiny_vision,
)

LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=20, max_model_len=96, block_size=8)


class Tower:
    """Notes how many embeddings each image has that a model encodes."""

    def __init__(self, model: VisionLanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.encoded: list[int] = []
        embed = model.embed_image

        def noted(tensors: Any) -> torch.Tensor:
            embeddings = embed(tensors)
            self.encoded.append(len(embeddings))
            return embeddings

        monkeypatch.setattr(model, "embed_image", noted)


@pytest.mark.parametrize(
    ("config", "max_bytes", "largest"),
    [
        # 95 tokens are what a prompt may have; 20 of them are computed in a step.
        (llava_config(), 1 << 20, [4] * 5),
        (idefics3_config(), 1 << 20, [92]),  # 23 tiles of 4 tokens
        (idefics3_config(), 3 * 28 * 28 * 4 * 3, [12, 12]),
        (qwen2_5_vl_config(), 1 << 20, [90]),  # 9 x 10, as near to a square as can be
        (qwen2_5_vl_config(), 96 * 4 * 4 * 16, [16, 16]),
    ],
)
def test_the_largest_images_are_profiled(
    config: Any, max_bytes: int, largest: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_vision(tmp_path, config)
    monkeypatch.setattr(image_inputs, "MAX_IMAGE_BYTES", max_bytes)
    model = vision_model(tmp_path)
    tower = Tower(model, monkeypatch)
    profile_run(assemble(model, LIMITS, 1, CPU))
    assert tower.encoded == largest


def test_a_model_too_short_for_an_image_is_profiled_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_tiny_vision(tmp_path, llava_config())
    model = vision_model(tmp_path)
    tower = Tower(model, monkeypatch)
    profile_run(assemble(model, Limits(4, 20, 4, 8), 1, CPU))
    assert not tower.encoded


def test_embeddings_that_are_kept_are_not_the_kv_caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    save_tiny_vision(tmp_path, llava_config())
    config = ExecutorConfig(device="cpu", gpu_memory_utilization=0.8, mm_encoder_cache_bytes=1000)
    setup = Setup(config, vision_model(tmp_path), LIMITS, (), CPU)
    num_bytes = cuda_cache_bytes(setup, tmp_path, FakeMeter(lambda: 0), Phases(), lambda fraction, text: None)
    assert num_bytes == 8000 - 600 - 500 - 1000


def test_a_config_that_the_tower_contradicts_is_refused_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_tiny_vision(tmp_path, llava_config())
    config = ExecutorConfig(device="cpu", dtype="float32", num_threads=1, max_num_seqs=2)
    start_runner(config, str(tmp_path), lambda fraction, text: None)
    load = served_model.load_model

    def with_another_tower(*args: Any, **kwargs: Any) -> Any:
        model: Any = load(*args, **kwargs)
        embed = model.embed_image
        monkeypatch.setattr(model, "embed_image", lambda tensors: embed(tensors)[1:])
        return model

    monkeypatch.setattr(served_model, "load_model", with_another_tower)
    with pytest.raises(ModelLoadError, match=r"3 embeddings for 4 placeholder tokens: config\.json and the model's"):
        start_runner(config, str(tmp_path), lambda fraction, text: None)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llava"
