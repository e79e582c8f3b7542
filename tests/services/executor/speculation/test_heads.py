"""EAGLE-3 heads of random weights: what they draft is what the formulas say, whatever was computed when."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from pagewire.config import ExecutorConfig
from pagewire.config.speculation import Speculation
from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.graphs.cuda_graphs import CudaGraphs, Steps
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.models.pooling import LAST_STATE
from pagewire.services.executor.parallel.group import ALONE_GROUP
from pagewire.services.executor.speculation.build import make_proposer
from pagewire.services.executor.speculation.draft_steps import Target
from pagewire.services.executor.speculation.drafters import load_drafter
from pagewire.services.executor.speculation.heads import HeadProposer
from pagewire.services.executor.speculation.load_head import load_head
from tests.services.executor.helpers.stepping import (
    BLOCK_SIZE,
    CPU,
    GREEDY,
    LIMITS,
    SEEDED,
    VOCAB_SIZE,
    Driver,
    alone,
    make_driver,
    prompt,
    tiny_llama,
)
from tests.services.executor.speculation.recording import NUM_DRAFTS, Recording

SIZE, HEADS, HEAD_DIM, DRAFT_VOCAB = 32, 4, 8, 60
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "vocab_size": VOCAB_SIZE,
    "draft_vocab_size": DRAFT_VOCAB,
    "hidden_size": SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 96,
    "rms_norm_eps": 1e-5,
}


def head_tensors(layer: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * shape[-1] ** -0.5

    return {
        "fc.weight": random(SIZE, 3 * SIZE),
        f"{layer}.input_layernorm.weight": 1 + 0.1 * random(SIZE),
        f"{layer}.hidden_norm.weight": 1 + 0.1 * random(SIZE),
        f"{layer}.post_attention_layernorm.weight": 1 + 0.1 * random(SIZE),
        f"{layer}.self_attn.q_proj.weight": 3 * random(HEADS * HEAD_DIM, 2 * SIZE),
        f"{layer}.self_attn.k_proj.weight": 3 * random(2 * HEAD_DIM, 2 * SIZE),
        f"{layer}.self_attn.v_proj.weight": random(2 * HEAD_DIM, 2 * SIZE),
        f"{layer}.self_attn.o_proj.weight": random(SIZE, HEADS * HEAD_DIM),
        f"{layer}.mlp.gate_proj.weight": random(48, SIZE),
        f"{layer}.mlp.up_proj.weight": random(48, SIZE),
        f"{layer}.mlp.down_proj.weight": random(SIZE, 48),
        "norm.weight": 1 + 0.1 * random(SIZE),
        "lm_head.weight": random(DRAFT_VOCAB, SIZE),
        "d2t": 2 * torch.arange(DRAFT_VOCAB),  # its token i is the target's 3 i
        "t2d": torch.arange(VOCAB_SIZE) % 3 == 0,
    }


def write_head(directory: Path, layer: str = "midlayer", **changes: Any) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(CONFIG | changes))
    save_file(head_tensors(layer), directory / "model.safetensors")
    return directory


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return tiny_llama(tmp_path_factory.mktemp("target"), num_hidden_layers=6)


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    """Copies the weights: a model belongs to one runner at a time."""
    return tiny_llama(tmp_path_factory.mktemp("twin"), num_hidden_layers=6)


def recorded() -> Steps:
    from pagewire.services.executor.graphs.recorded_steps import RecordedSteps

    return RecordedSteps(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens)


def drafting_driver(
    model: DecoderModel, path: Path, steps: Callable[[], Steps] = CudaGraphs
) -> tuple[Driver, Recording]:
    """Returns a driver. steps: how they are launched; by default eagerly."""
    head = load_head(path, model, LIMITS.max_model_len, CPU)
    proposer = Recording(Target(model, LIMITS, 64, CPU, steps=steps), head, NUM_DRAFTS, LIMITS.max_model_len)
    driver = make_driver(model, proposer=proposer)
    driver.runner.use_graphs(steps())
    return driver, proposer


def expected_drafts(twin: DecoderModel, tokens: list[int]) -> list[int]:
    """Behind the tokens of which the target has computed all but the last, by plain torch."""
    streams: dict[int, Tensor] = {}

    class Spy:
        def see(self, layer_idx: int, stream: Callable[[], Tensor], context: object) -> None:
            streams[layer_idx] = stream()

        def end(self, hidden: Tensor, context: object) -> None: ...

    driver = make_driver(twin)
    twin.observer = Spy()
    driver.add(0, tokens[:-1])
    driver.step({0: len(tokens) - 1})
    w = {name: tensor.float() for name, tensor in head_tensors("midlayer").items()}
    features = torch.cat([streams[index] for index in (2, 3, 3)], dim=1) @ w["fc.weight"].T
    next_ids, drafts = tokens[1:], list[int]()
    for _ in range(NUM_DRAFTS):
        embedded = norm(twin.embed(torch.tensor(next_ids)), w["midlayer.input_layernorm.weight"])
        both = torch.cat((embedded, norm(features, w["midlayer.hidden_norm.weight"])), dim=1)
        stream = through_layer(both, features, w, "midlayer")
        logits = norm(stream[-1:], w["norm.weight"]) @ w["lm_head.weight"].T
        drafts.append(3 * int(logits.argmax()))
        features, next_ids = torch.cat((features, stream[-1:])), [*next_ids, drafts[-1]]
    return drafts


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, (SIZE,), weight, 1e-5)


def rotated(x: Tensor) -> Tensor:
    """x [tokens, heads, HEAD_DIM]"""
    angles = torch.outer(torch.arange(len(x)), 10000 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = x.chunk(2, dim=2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=2)


def through_layer(attending: Tensor, stream: Tensor, w: dict[str, Tensor], layer: str) -> Tensor:
    """Returns the stream behind Llama's layer, with attention to `attending` [tokens, any]."""
    q, k, v = ((attending @ w[f"{layer}.self_attn.{n}_proj.weight"].T).unflatten(1, (-1, HEAD_DIM)) for n in "qkv")
    q, k, v = rotated(q), rotated(k).repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1).flatten(1)
    stream = stream + attended @ w[f"{layer}.self_attn.o_proj.weight"].T
    normed = norm(stream, w[f"{layer}.post_attention_layernorm.weight"])
    gate, up = (normed @ w[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return stream + (F.silu(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T


@pytest.mark.parametrize(
    ("layer", "steps"),
    [
        pytest.param("midlayer", CudaGraphs, id="eager"),
        pytest.param(
            "layers.0",
            recorded,
            id="recorded",
            marks=pytest.mark.skipif(cpu_backend() != "cpp", reason="there is no C++ compiler: steps are not recorded"),
        ),
    ],
)
def test_drafts_are_those_of_the_formulas(
    model: DecoderModel, twin: DecoderModel, tmp_path: Path, layer: str, steps: Callable[[], Steps]
) -> None:
    """Behind a prompt in chunks, behind steps in which all drafts were wrong, and after steps without any."""
    driver, proposer = drafting_driver(model, write_head(tmp_path, layer), steps)
    driver.add(0, prompt(37, 1))
    driver.step({0: 13})
    driver.step({0: 24})
    for plain_steps in (0, 0, 3, 0):
        for _ in range(plain_steps):
            driver.step({0: 1})
        known = prompt(37, 1) + driver.tokens[0]
        driver.step({0: 1 + NUM_DRAFTS}, {0: NUM_DRAFTS})
        assert proposer.drafts[0] == expected_drafts(twin, known)
    assert driver.tokens[0] == alone(twin, prompt(37, 1), len(driver.tokens[0]))


def test_a_head_drafts_for_a_model_in_bf16(tmp_path: Path) -> None:
    """The model's own activations may be wider."""
    target = tiny_llama(tmp_path / "target", num_hidden_layers=6, dtype="bfloat16")
    driver, proposer = drafting_driver(target, write_head(tmp_path / "head"))
    driver.add(0, prompt(9, 1))
    driver.step({0: 9})
    driver.step({0: 1 + NUM_DRAFTS}, {0: NUM_DRAFTS})
    assert len(proposer.drafts[0]) == NUM_DRAFTS


def test_blocks_of_others_have_features_too(model: DecoderModel, twin: DecoderModel, tmp_path: Path) -> None:
    driver, proposer = drafting_driver(model, write_head(tmp_path))
    first = prompt(2 * BLOCK_SIZE + 1, 2)
    driver.add(0, first)
    driver.step({0: len(first)})
    driver.add(1, [*first, 7, 8], SEEDED, shared_blocks=driver.blocks(0)[:2])
    driver.add(2, prompt(5, 4))
    driver.step({1: 3, 2: 5})
    known = prompt(5, 4) + driver.tokens[2]
    driver.step({1: 1 + NUM_DRAFTS, 2: 1 + NUM_DRAFTS}, {1: NUM_DRAFTS, 2: NUM_DRAFTS})
    assert proposer.drafts[2] == expected_drafts(twin, known)
    for _ in range(4):
        driver.step({2: 1 + NUM_DRAFTS, 1: 2}, {2: NUM_DRAFTS, 1: 1})
    assert driver.tokens[1] == alone(model, [*first, 7, 8], len(driver.tokens[1]), SEEDED)
    assert driver.tokens[2] == alone(model, prompt(5, 4), len(driver.tokens[2]), GREEDY)


def test_a_head_of_another_model_is_refused(model: DecoderModel, tmp_path: Path) -> None:
    path = write_head(tmp_path / "deep", eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 9, 16]})
    with pytest.raises(ModelLoadError, match="before its layers 2, 9, 16, the model has 6: use the head of this"):
        load_head(path, model, LIMITS.max_model_len, CPU)
    with pytest.raises(ModelLoadError, match="hidden_size is 64, that of the model it is to draft for 32"):
        load_head(write_head(tmp_path, hidden_size=64), model, LIMITS.max_model_len, CPU)


def test_a_configuration_names_it(model: DecoderModel, tmp_path: Path) -> None:
    speculation = Speculation("eagle3", model=str(write_head(tmp_path)))
    head = load_drafter(speculation, ExecutorConfig(model="the target"), model, LIMITS, CPU, ALONE_GROUP)
    proposer = make_proposer(speculation, LAST_STATE, ALONE_GROUP, Target(model, LIMITS, 64, CPU), head)
    assert isinstance(proposer, HeadProposer)
    assert proposer.max_draft_tokens == 5
