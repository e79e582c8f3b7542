"""Ranks that have whole experts each generate what the whole model does, whichever way they add up what these make."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.kernels.ops import cpu_backend
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.experts import whole_experts
from pagewire.services.executor.layers.experts.experts import ExpertsLinear
from pagewire.services.executor.loading.served_model import load_served
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.parallel.communicator import ALONE, Communicator
from pagewire.services.executor.parallel.shared_memory import SharedMemory
from pagewire.services.executor.start.assembly import assemble
from tests.kernels.cpu.test_collectives import on_ranks as on_threads
from tests.services.executor.graphs.test_recorded_steps import graph_steps
from tests.services.executor.helpers.stepping import CPU, LIMITS, VOCAB_SIZE, Driver, prompt
from tests.services.executor.loading.weights.test_gguf import tiny_model
from tests.services.executor.models.experts.test_experts import write_experts
from tests.services.executor.models.experts.test_quantized_experts import FORMATS, save_quantized
from tests.services.executor.models.tiny import load, save_tiny
from tests.services.executor.parallel.test_quantized_tensor_parallel import _Rank, counted
from tests.services.executor.parallel.test_tensor_parallel import MLA, assert_equal_on_ranks, tokens_of
from tests.services.executor.parallel.threads import on_ranks

MOE = {"num_experts": 6, "moe_intermediate_size": 48, "num_experts_per_tok": 2, "decoder_sparse_step": 1}
HEADS = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
MIXTRAL = HEADS | {"intermediate_size": 80, "num_local_experts": 4}
# family, changes of the tiny config; inner sizes of experts that four ranks could not share
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
    "qwen2 moe": ("Qwen2Moe", {**MOE, "shared_expert_intermediate_size": 64}),
    "qwen3 moe": ("Qwen3Moe", {**MOE, "norm_topk_prob": True, "mlp_only_layers": [1], "intermediate_size": 64}),
    "olmoe": ("Olmoe", {"num_experts": 5, "num_experts_per_tok": 3, "intermediate_size": 48}),
    "gpt-oss": ("GptOss", {"intermediate_size": 48, "num_local_experts": 4, "num_hidden_layers": 2}),
    "deepseek-v2": ("DeepseekV2", MLA),
    "deepseek-v3": ("DeepseekV3", MLA | {"q_lora_rank": None, "n_routed_experts": 6}),
}


@pytest.fixture(params=["sums", "exchanges"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "exchanges":
        monkeypatch.setattr(whole_experts, "least_exchanged", lambda top_k, num_ranks, device: 1)


@pytest.mark.pairs
@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens(tmp_path: Path, family: str, size: int) -> None:
    name, changes = FAMILIES[family]
    save_tiny(tmp_path, name, **(HEADS | changes))
    assert_equal_on_ranks(tmp_path, size, whole_experts=True)


@pytest.mark.parametrize("name", ["awq", "gptq", "fp8 blocks", "compressed-tensors int8", "bitsandbytes nf4"])
def test_quantized(tmp_path: Path, name: str) -> None:
    """Three experts on two ranks."""
    config, packer, _ = FORMATS[name]
    save_quantized(tmp_path, config, packer)
    assert_equal_on_ranks(tmp_path, 2, whole_experts=True)
    assert_equal_on_ranks(tmp_path, 2, whole_experts=True, quantization="none")


@pytest.mark.usefixtures("way")
@pytest.mark.skipif(cpu_backend() != "cpp", reason="steps are recorded with the C++ kernels")
def test_recorded_steps(tmp_path: Path) -> None:
    """Tokens go to other experts in each replay; through the memory that ranks share."""
    from pagewire.services.executor.graphs.recorded_steps import RecordedSteps

    heads = {"num_attention_heads": 6, "num_key_value_heads": 3}
    save_tiny(tmp_path, "Mixtral", **MIXTRAL | heads, vocab_size=VOCAB_SIZE, max_position_embeddings=96)

    def generate(ranks: Communicator) -> dict[int, list[int]]:
        model = load(tmp_path, tensor=ranks, whole_experts=ranks is not ALONE)
        graphs = RecordedSteps(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens)
        driver = Driver(assemble(model, LIMITS, 64, CPU, graphs=graphs), 64)
        for request_id in range(3):
            driver.add(request_id, prompt(9 + request_id, seed=request_id))
        driver.step({0: 9, 1: 10, 2: 11})
        for _ in range(12):
            driver.step(dict.fromkeys(range(3), 1))
        return driver.tokens

    expected, memory, before = generate(ALONE), SharedMemory([3]), graph_steps("replayed")
    assert on_threads(3, lambda rank: generate(memory.channel(0, rank))) == [expected] * 3
    assert graph_steps("replayed") >= before + 3 * 11


@pytest.mark.parametrize("form", ["a tensor each", "one tensor", "gguf"])
def test_ranks_read_their_own_experts_alone(tmp_path: Path, form: str) -> None:
    path = tmp_path
    if form == "gguf":
        path /= "tiny.gguf"
        model = tiny_model("Mixtral", **MIXTRAL | {"intermediate_size": 64})
        write_experts(path, model, "llama", dict.fromkeys(("ffn_gate", "ffn_up", "ffn_down"), Type.Q4_0))
        assert_equal_on_ranks(path, 2, whole_experts=True)
    else:
        save_tiny(path, "Mixtral", **MIXTRAL).save_pretrained(path, save_original_format=form == "a tensor each")

    def bytes_of_experts(**options: Any) -> int:
        with counted() as found:
            load(path, **options)
        return sum(count for name, count in found.items() if "experts" in name or "_exps" in name)

    whole = bytes_of_experts()
    shares = [bytes_of_experts(tensor=_Rank(rank, 2), whole_experts=True) / whole for rank in range(2)]
    assert shares == [0.5, 0.5]


def test_the_weights_cache_distinguishes_whole_experts_from_parts(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Mixtral", **MIXTRAL | {"intermediate_size": 96})
    expected, cache = tokens_of(tmp_path / "model"), tmp_path / "cache"

    def generated(whole: bool, ranks: Communicator) -> list[list[int]]:
        return tokens_of(tmp_path / "model", ranks, weights_cache=str(cache), whole_experts=whole)

    for whole in (True, False, True):
        assert on_ranks(2, partial(generated, whole)) == [expected] * 2
    assert len(list(cache.iterdir())) == 4


@pytest.mark.parametrize(
    ("family", "size", "message"),
    [
        ("Llama", 2, "--enable-expert-parallel: LlamaForCausalLM has no experts; leave it out"),
        ("Mixtral", 6, "one of 4 experts at least; possible are 1, 2, 3, 4"),
    ],
)
def test_what_cannot_be_divided_is_refused(tmp_path: Path, family: str, size: int, message: str) -> None:
    save_tiny(tmp_path, family, **MIXTRAL | {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96})
    with pytest.raises(ModelLoadError, match=message):
        on_ranks(size, lambda ranks: load(tmp_path, tensor=ranks, whole_experts=True))


def test_the_flag(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Mixtral", **MIXTRAL)
    flags: dict[str, Any] = {"model": str(tmp_path), "dtype": "float32"}
    message = r"\(80\) cannot be split .* possible are 1, 5; up to 4 with --enable-expert-parallel"
    with pytest.raises(ModelLoadError, match=message):
        load_served(ExecutorConfig(**flags, tensor_parallel_size=2), tmp_path, CPU, "auto", tensor=_Rank(0, 2))
    with pytest.raises(StartupError, match="--tensor-parallel-size is 1"):
        load_served(ExecutorConfig(**flags, enable_expert_parallel=True), tmp_path, CPU, "auto")
    config = ExecutorConfig(**flags, tensor_parallel_size=2, enable_expert_parallel=True)
    model = load_served(config, tmp_path, CPU, "auto", tensor=_Rank(1, 2)).model
    assert isinstance(model, DecoderModel)
    experts = next(leaf for leaf in model.leaves() if isinstance(leaf, ExpertsLinear))
    assert {shard.name.split(".")[-2] for shard in experts.shards} == {"2", "3"}
