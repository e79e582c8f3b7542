"""Mamba-2: its logits and tokens are transformers', however its requests are cut into steps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.startup import start_runner
from tests.services.executor.helpers.paged_batch import PagedBatch
from tests.services.executor.helpers.stepping import (
    BLOCK_SIZE,
    CPU,
    LIMITS,
    VOCAB_SIZE,
    Driver,
    alone,
    check_random_steps,
    graph_steps,
    make_driver,
    prompt,
)
from tests.services.executor.loading.quantization.checkpoints import assert_loads_as
from tests.services.executor.models.tiny import assert_same_logits, load, save_tiny

SIZES = {"num_heads": 12, "head_dim": 8, "state_size": 16, "n_groups": 1, "initializer_range": 0.3}
CASES: dict[str, dict[str, Any]] = {
    "one group": {},
    "groups": {"n_groups": 3},
    "tied": {"tie_word_embeddings": True},
    "biased": {"use_bias": True, "use_conv_bias": False},
    "bounded steps": {"time_step_limit": (0.01, 0.6), "conv_kernel": 3},
}


@pytest.mark.architecture("Mamba2ForCausalLM")
@pytest.mark.parametrize("case", CASES)
def test_logits(tmp_path: Path, case: str) -> None:
    expected = save_tiny(tmp_path, "Mamba2", **(SIZES | CASES[case]))
    assert_same_logits(load(tmp_path, model_impl="pagewire"), expected)


@torch.inference_mode()
@pytest.mark.parametrize("in_fp32", [True, False])
def test_the_stream_is_in_fp32_if_the_config_says_so(tmp_path: Path, in_fp32: bool) -> None:
    """Compares in bf16: we are as far from the exact logits as transformers in bf16. What layers add is little beside
    the embeddings, so the other stream would be more than one and a half times, or less than two thirds, as far."""
    sizes = SIZES | {"initializer_range": 0.05, "num_hidden_layers": 16}
    exact = save_tiny(tmp_path, "Mamba2", **sizes, residual_in_fp32=in_fp32)
    exact.state_dict()["backbone.embeddings.weight"].mul_(100)
    exact.save_pretrained(tmp_path)
    rounded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    token_ids = list(range(40))
    expected, theirs = (model(torch.tensor([token_ids])).logits[0].float() for model in (exact, rounded))
    ours = PagedBatch(load(tmp_path, dtype="bfloat16"), num_requests=1, max_len=40).step({0: token_ids})[0]
    assert 0.8 < (ours - expected).norm() / (theirs - expected).norm() < 1.25


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    path = tmp_path_factory.mktemp("mamba2")
    return path, save_tiny(path, "Mamba2", **SIZES, vocab_size=VOCAB_SIZE, max_position_embeddings=96)


@pytest.fixture(scope="module")
def model(reference: tuple[Path, PreTrainedModel]) -> Model:
    return load(reference[0])


@torch.inference_mode()
def greedy(expected: PreTrainedModel, token_ids: list[int], num_tokens: int) -> list[int]:
    token_ids = list(token_ids)
    for _ in range(num_tokens):
        token_ids.append(int(expected.forward(torch.tensor([token_ids])).logits[0, -1].argmax()))
    return token_ids[-num_tokens:]


def make_states_nan(runner: ModelRunner) -> None:
    """Reading what was never written shows."""
    for cache in runner.kv_caches:
        cache.fill_(torch.nan)


def test_tokens_of_prompts_in_chunks_beside_requests_that_decode(
    reference: tuple[Path, PreTrainedModel], model: Model
) -> None:
    """Chunks end before, at and behind the ends of blocks of states, and some go over several."""
    driver = make_driver(model)
    make_states_nan(driver.runner)
    lengths = {0: 41, 1: 3, 2: 16}
    for request_id, length in lengths.items():
        driver.add(request_id, prompt(length, seed=request_id))
    for step in ({0: 7, 1: 3}, {0: 1, 1: 1, 2: 16}, {1: 1, 0: 29, 2: 1}, {0: 4, 2: 1, 1: 1}):
        driver.step(step)
    while len(driver.tokens[0]) < 12:
        driver.step({2: 1, 0: 1, 1: 1})
    for request_id, length in lengths.items():
        tokens = driver.tokens[request_id]
        assert tokens == greedy(reference[1], prompt(length, seed=request_id), len(tokens))


def test_requests_come_and_go_and_each_has_the_tokens_it_has_alone(model: Model) -> None:
    driver = make_driver(model)
    make_states_nan(driver.runner)
    check_random_steps(model, driver, seed=3)


@pytest.mark.skipif(cpu_backend() != "cpp", reason="there is no C++ compiler: steps are not recorded")
def test_steps_are_recorded_and_change_no_token(model: Model) -> None:
    from pagewire.services.executor.graphs.recorded_steps import RecordedSteps

    runner = assemble(model, LIMITS, 64, CPU, graphs=RecordedSteps(LIMITS.max_num_seqs, 64, requests=(2, 5)))
    make_states_nan(runner)
    while runner.record_missing():
        pass
    before = graph_steps("replayed")
    check_random_steps(model, Driver(runner, 64), seed=4)
    assert graph_steps("replayed") > before


def test_a_request_goes_on_from_the_state_of_another(model: Model) -> None:
    driver = make_driver(model)
    make_states_nan(driver.runner)
    driver.add(0, prompt(20))
    first = driver.generate(0, 3, first=20)
    driver.add(1, prompt(20), shared_blocks=driver.blocks(0)[: 16 // BLOCK_SIZE])
    assert driver.generate(1, 3, first=4) == first == alone(model, prompt(20), 3)
    assert driver.generate(0, 8, first=1) == alone(model, prompt(20), 8), "its own state is as it was"


def quantized(path: Path, **sizes: Any) -> PreTrainedModel:
    """Saves a model quantized to int8 by rows, as LLM.int8() of bitsandbytes stores it."""
    from safetensors.torch import load_file, save_file

    model = save_tiny(path, "Mamba2", **(SIZES | sizes))
    tensors, parameters = load_file(path / "model.safetensors"), dict(model.named_parameters())
    for name in [name for name in tensors if name.endswith(("in_proj.weight", "out_proj.weight"))]:
        weight = tensors[name]
        scale = weight.abs().amax(1)
        codes = (weight * (127 / scale[:, None])).round().to(torch.int8)
        tensors |= {name: codes, name.replace(".weight", ".SCB"): scale}
        parameters[name].data.copy_(codes.float() * (scale[:, None] / 127))
    save_file(tensors, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    config = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (path / "config.json").write_text(json.dumps(raw | {"quantization_config": config}))
    return model


def start(path: Path, **settings: Any) -> tuple[ModelRunner, Any]:
    config = ExecutorConfig(
        model="tiny", device="cpu", dtype="float32", num_threads=1, max_num_seqs=4, max_num_batched_tokens=64
    )
    return start_runner(replace(config, **settings), str(path), lambda fraction, text: None)


STATE_BYTES = 3 * (3 * (96 + 32) + 96 * 16) * 4  # layers, the convolution's last inputs and the states, bytes


def test_the_executor_says_what_a_block_of_states_is_for(reference: tuple[Path, PreTrainedModel]) -> None:
    runner, info = start(reference[0], state_block_size=32)
    (group,) = info.kv_groups
    # Of four requests the state before a step and after it, and those of 64 tokens; as many again for prefix hits.
    assert (group.num_blocks, group.window, group.state_tokens) == (min(2 * (4 * 2 + 2), 4 * 96 // 32), 0, 32)
    assert info.kv_cache_bytes == group.num_blocks * STATE_BYTES and info.max_model_len == 96
    driver = Driver(runner, group.num_blocks)
    driver.add(0, prompt(12))
    assert len(driver.generate(0, 3, first=12)) == 3
    _, info = start(reference[0], max_model_len=50_000, kv_cache_memory_bytes=6 * STATE_BYTES + 7, state_block_size=64)
    assert info.kv_groups[0].num_blocks == 6 and info.max_model_len == 50_000, "a state takes in any number of tokens"


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "fp8": ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8: the model stores a latent or a state"),
    "int8": ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: the model stores a latent or a state"),
    "block sizes": ({"state_block_size": 8}, "--state-block-size 8 is not a multiple of --block-size 16"),
    "memory": ({"kv_cache_memory_bytes": 100}, "raise --kv-cache-memory-bytes"),
    "transformers": ({"model_impl": "transformers"}, "recurrent state"),
    "drafts": ({"spec_method": "ngram"}, "Mamba2ForCausalLM: .* serve it without speculative decoding"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_states_cannot_do_is_refused(reference: tuple[Path, PreTrainedModel], case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(StartupError, match=message):
        start(reference[0], **settings)


def test_what_is_only_wanted_where_possible_is_left_out(reference: tuple[Path, PreTrainedModel]) -> None:
    """Options of --profile cost are wanted only where possible."""
    assert start(reference[0], spec_method="auto", kv_cache_dtype="smallest")[1].max_draft_tokens == 0


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"state_size": 24}, "state_size: expected a power of two from 16 to 256, found 24"),
    ({"hidden_act": "gelu"}, "hidden_act: 'gelu' is not silu"),
    ({"time_step_limit": [1.0]}, "time_step_limit: expected two rising numbers"),
    ({"conv_kernel": 9}, "conv_kernel: expected 2 to 8, found 9"),
    ({"expand": 3}, r"num_heads \* head_dim is 96, expand \* hidden_size 144"),
]


@pytest.mark.parametrize(("keys", "message"), WRONG)
def test_wrong_values_are_named(
    reference: tuple[Path, PreTrainedModel], tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    raw = json.loads((reference[0] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | keys))
    with pytest.raises(ModelLoadError, match=message):
        load(tmp_path, load_format="dummy")


def test_its_projections_can_be_quantized(tmp_path: Path) -> None:
    assert_loads_as(tmp_path, quantized(tmp_path))


def test_it_comes_from_the_weights_cache_as_from_the_checkpoint(tmp_path: Path) -> None:
    expected = save_tiny(tmp_path, "Mamba2", **SIZES)
    for _ in range(2):
        assert_same_logits(load(tmp_path, weights_cache=str(tmp_path / "kept")), expected)
    assert len(list((tmp_path / "kept").iterdir())) == 1
