"""The executor on the GPU's kernels, without a GPU: its tokens in Triton's interpreter, and what it has compiled."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pagewire.files.tokenizer_files.loading import load_tokenizer
from tests.services.executor.triton import speculation
from tests.services.executor.triton.executor import MODELS
from tests.services.executor.triton.tokens import generate
from tests.sweep import IS_FULL

pytest.importorskip("triton", reason="triton is not installed")

ROOT = Path(__file__).parents[4]


def answer_of(module: str, *arguments: Path | int | str, **environment: str) -> Any:
    """Runs a module; returns what it prints, as JSON."""
    result = subprocess.run(
        [sys.executable, "-m", f"tests.services.executor.triton.{module}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=600 if IS_FULL else 280,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The GPU kernels' tokens by name, all from one process."""
    names = [*MODELS, "states", "grammars"]
    environment = {"TRITON_INTERPRET": "1", "PAGEWIRE_CPU_KERNELS": "triton"}
    answer = answer_of("tokens", tmp_path_factory.mktemp("gpu"), *names, **environment)
    assert answer["backend"] == "triton"
    found: dict[str, Any] = answer["tokens"]
    return found


def test_no_kernel_of_a_step_writes_what_attention_reads_before_it_waits(tmp_path: Path) -> None:
    """The plan and block tables are settled; the check sees where they are not."""
    environment = {"TRITON_INTERPRET": "1", "PAGEWIRE_CPU_KERNELS": "triton"}
    found = answer_of("early_reads", tmp_path, **environment)
    assert found["as they are"]["faults"] == [] and found["as they are"]["reads"] > 2
    assert "split_plan_kernel writes plan_ptr" in found["without settling"]["faults"]
    assert found["with a table written"]["faults"] == ["careless_kernel writes block_table_ptr"]


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_tokens_of_the_gpu_kernels_are_those_of_the_cpu(tmp_path: Path, tokens: dict[str, Any], model: str) -> None:
    assert tokens[model] == generate(tmp_path, model)


@pytest.mark.slow
def test_states_of_the_gpu_kernels_give_the_tokens_of_the_cpu(tmp_path: Path, tokens: dict[str, Any]) -> None:
    expected = generate(tmp_path, "states")
    assert tokens["states"] == expected
    assert expected["2"] == expected["0"][: len(expected["2"])], "a prefix hit goes on with the same tokens"


@pytest.mark.slow
def test_grammars_on_the_gpu_kernels_give_the_tokens_of_the_cpu(tmp_path: Path, tokens: dict[str, Any]) -> None:
    assert tokens["grammars"] == generate(tmp_path, "grammars")
    decode = load_tokenizer(tmp_path / "grammars").decode
    digits, boolean, free = (decode(given, skip_special_tokens=True) for given in tokens["grammars"])
    assert re.match("[0-9]{3}-[0-9]{2}", digits) and re.match("true|false", boolean)
    assert not re.match("[0-9]{3}-|true|false", free)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method",
    ["draft_model", "ngram", "self", "eagle3"],
)
def test_drafts_of_the_gpu_kernels_are_those_of_the_cpu(tmp_path: Path, method: str) -> None:
    answer = answer_of("speculation", tmp_path, method, TRITON_INTERPRET="1", PAGEWIRE_CPU_KERNELS="triton")
    assert answer["backend"] == "triton"
    tokens, drafts = speculation.generate(tmp_path, method, depth=1)
    for mine, expected in zip(answer["tokens"], tokens, strict=True):
        both = min(len(mine), len(expected))
        assert both > 3 and mine[:both] == expected[:both]
    if method in ("draft_model", "eagle3"):  # on CPUs, some are left out of one, and those of the other are rougher
        assert (answer["tokens"], answer["drafts"]) == (tokens, drafts)


def test_a_layer_of_a_decode_step_is_six_kernels(tmp_path: Path) -> None:
    """Norms are computed in the products behind them, and gates and ups are multiplied in theirs."""
    answer = answer_of("nodes", tmp_path, TRITON_INTERPRET="1", PAGEWIRE_CPU_KERNELS="triton")
    between = {"rotary_store_kv_kernel": 1, "decode_attention_kernel": 1}
    assert answer["dense"]["8"] == between | {"skinny_kernel": 4}
    assert answer["4 bits"]["8"] == between | {"grouped_skinny_kernel": 2, "grouped_gemm_kernel": 2}
    # Of experts, gates and ups are one product, and down is one.
    routed = {"route_experts_kernel": 1, "sort_by_expert_kernel": 1, "combine_experts_kernel": 1}
    around = {"add_rms_norm_kernel": 2, "skinny_kernel": 3}
    assert answer["experts"]["8"] == between | routed | around | {"experts_linear_kernel": 2}
    # More rows than that are normed by themselves; products still end with the activation, and none is a library's.
    assert answer["4 bits"]["12"] == between | {"add_rms_norm_kernel": 2, "grouped_gemm_kernel": 4}
    assert answer["dense"]["12"] == between | {"add_rms_norm_kernel": 2, "skinny_kernel": 4}


@pytest.mark.parametrize(
    ("model", "max_num_seqs"),
    [("llama", 1), *(pytest.param(model, 130, marks=pytest.mark.slow) for model in ("llama", "mixtral"))],
)
def test_serving_compiles_nothing_that_the_warm_up_has_not(tmp_path: Path, model: str, max_num_seqs: int) -> None:
    forms = answer_of("forms", tmp_path, max_num_seqs, model, TRITON_INTERPRET="0")
    assert forms["warm-up"] > 10 and forms["serving"] == []
