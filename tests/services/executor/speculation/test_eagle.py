"""Heads of the first EAGLE, as torch saves them, and EAGLE-3 heads of models with norms at the ends of layers."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from pagewire.config import ExecutorConfig
from pagewire.config.speculation import Speculation
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.dense.gemma2 import GemmaModel
from pagewire.services.executor.models.drafting.eagle import EagleHead
from pagewire.services.executor.parallel.group import ALONE_GROUP
from pagewire.services.executor.speculation.drafters import load_drafter
from pagewire.services.executor.speculation.load_head import load_head
from tests.services.executor.helpers.stepping import CPU, LIMITS, VOCAB_SIZE, alone, make_driver, prompt, tiny_llama
from tests.services.executor.models.tiny import save_tiny
from tests.services.executor.speculation.recording import NUM_DRAFTS
from tests.services.executor.speculation.test_heads import (
    CONFIG,
    SIZE,
    drafting_driver,
    head_tensors,
    through_layer,
    write_head,
)


def eagle_tensors() -> dict[str, Tensor]:
    tensors, generator = head_tensors("layers.0"), torch.Generator().manual_seed(4)
    left_out = ("hidden_norm", "input_layernorm", "d2t", "t2d", "lm_head")
    kept = {
        # Attention reads half as much.
        name: tensor[:, :SIZE].contiguous() if tensor.shape[-1] == 2 * SIZE else tensor
        for name, tensor in tensors.items()
        if not any(part in name for part in left_out) and name not in ("norm.weight", "fc.weight")
    }
    fc = torch.randn(SIZE, 2 * SIZE, generator=generator) * SIZE**-0.5
    return kept | {"fc.weight": fc, "fc.bias": torch.randn(SIZE, generator=generator)}


def write_eagle(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LlamaForCausalLM"]}))
    torch.save(eagle_tensors(), directory / "pytorch_model.bin")
    return directory


def expected_drafts(twin: DecoderModel, tokens: list[int]) -> list[int]:
    """Returns what `test_heads` does."""
    outputs: list[Tensor] = []

    class Spy:
        def see(self, layer_idx: int, stream: Callable[[], Tensor], context: object) -> None: ...

        def end(self, hidden: Tensor, context: object) -> None:
            outputs.append(hidden.clone())

    driver = make_driver(twin)
    twin.observer = Spy()
    driver.add(0, tokens[:-1])
    driver.step({0: len(tokens) - 1})
    w, features = eagle_tensors(), outputs[0]
    next_ids, drafts = tokens[1:], list[int]()
    for _ in range(NUM_DRAFTS):
        both = torch.cat((twin.embed(torch.tensor(next_ids)), features), dim=1)
        stream = both @ w["fc.weight"].T + w["fc.bias"]
        stream = through_layer(stream, stream, w, "layers.0")
        drafts.append(int(twin.compute_logits(stream[-1:]).argmax()))
        features, next_ids = torch.cat((features, stream[-1:])), [*next_ids, drafts[-1]]
    return drafts


def test_drafts_of_the_first_eagle_are_those_of_the_formulas(tmp_path: Path) -> None:
    model, twin = tiny_llama(tmp_path / "one"), tiny_llama(tmp_path / "two")
    driver, proposer = drafting_driver(model, write_eagle(tmp_path / "head"))
    driver.add(0, prompt(21, 1))
    driver.step({0: 13})
    driver.step({0: 8})
    for plain_steps in (0, 2):
        for _ in range(plain_steps):
            driver.step({0: 1})
        known = prompt(21, 1) + driver.tokens[0]
        driver.step({0: 1 + NUM_DRAFTS}, {0: NUM_DRAFTS})
        assert proposer.drafts[0] == expected_drafts(twin, known)
    assert driver.tokens[0] == alone(twin, prompt(21, 1), len(driver.tokens[0]))


def test_a_gemma_is_drafted_for(tmp_path: Path) -> None:
    """A head reads the stream alone there: a layer adds what it has normalised, at its end."""
    sizes = {"hidden_size": SIZE, "num_attention_heads": 4, "head_dim": 8, "query_pre_attn_scalar": 8}
    keys = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 96, "num_hidden_layers": 6}
    reference = save_tiny(tmp_path, "Gemma2", **sizes, **keys)
    one, two = (load_model(tmp_path, dtype="float32", device=CPU) for _ in range(2))
    assert isinstance(one, GemmaModel)
    streams: dict[int, Tensor] = {}

    class Spy:
        def see(self, layer_idx: int, stream: Callable[[], Tensor], context: object) -> None:
            streams[layer_idx] = stream()

        def end(self, hidden: Tensor, context: object) -> None: ...

    one.observer = Spy()
    alone(one, prompt(9, 1), 1)
    with torch.inference_mode():
        expected = reference(torch.tensor([prompt(9, 1)]), output_hidden_states=True).hidden_states
    for index in (2, 3):
        torch.testing.assert_close(streams[index], expected[index][0], atol=2e-4, rtol=1e-4)

    driver, _ = drafting_driver(one, write_head(tmp_path / "head"))  # type: ignore[arg-type]
    driver.add(0, prompt(9, 1))
    driver.step({0: 9})
    for _ in range(4):
        driver.step({0: 1 + NUM_DRAFTS}, {0: NUM_DRAFTS})
    assert driver.tokens[0] == alone(two, prompt(9, 1), len(driver.tokens[0]))


def test_a_configuration_names_it(tmp_path: Path) -> None:
    model, path = tiny_llama(tmp_path / "model"), write_eagle(tmp_path / "head")
    speculation = Speculation("eagle3", model=str(path))
    head = load_drafter(speculation, ExecutorConfig(model="the target"), model, LIMITS, CPU, ALONE_GROUP)
    assert isinstance(head, EagleHead)


def test_a_file_with_more_than_tensors_is_refused(tmp_path: Path) -> None:
    model = tiny_llama(tmp_path / "model")
    path = write_eagle(tmp_path / "head")
    (path / "pytorch_model.bin").write_bytes(pickle.dumps(print))
    with pytest.raises(ModelLoadError, match="not a file of tensors alone"):
        load_head(path, model, LIMITS.max_model_len, CPU)
    torch.save([torch.zeros(2)], path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="something else than tensors by name"):
        load_head(path, model, LIMITS.max_model_len, CPU)
