"""The resources of Triton kernels, by compiling them ahead of time without a GPU."""

from __future__ import annotations

import itertools

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.kernels import aot
from benchmarks.kernels.compiler import ARCHITECTURES
from benchmarks.kernels.forms.specializations import (
    VERIFIED_HEAD_DIMS,
    all_forms,
    attention,
    attention_form,
    attention_key,
)
from tests.kernels.processes import run_module

# Minutes on a machine that is busy otherwise.
pytestmark = pytest.mark.timeout(900)


def test_ahead_of_time_compilation() -> None:
    run_module("compiled.ahead_of_time", TRITON_INTERPRET="0")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_ahead_of_time_compilation_of_every_form() -> None:
    run_module("compiled.ahead_of_time", "--all", timeout=3500, TRITON_INTERPRET="0")


def test_kernels_that_begin_early_wait_for_their_inputs() -> None:
    run_module("compiled.launches", TRITON_INTERPRET="0")


def test_record_of_compiled_forms_is_of_this_code() -> None:
    compiled = {(capability, *form) for capability in ARCHITECTURES for form in all_forms(capability)}
    assert aot.recorded().keys() == compiled, "forms have changed: run python -m benchmarks.kernels aot"


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_attention_of_any_number_of_drafts_is_among_the_compiled_forms(capability: int) -> None:
    compiled = {attention_key(form) for form in attention(capability)}
    groups, lens = (1, 2, 3, 4, 5, 6, 7, 8, 16), range(2, 17)
    for head_dim, kv_bytes, group, query_len in itertools.product(VERIFIED_HEAD_DIMS, (1, 2), groups, lens):
        shape = {"head_dim": head_dim, "kv_bytes": kv_bytes, "block_size": 16, "group": group, "batch": 8}
        form = attention_form("decode_attention", capability, shape | {"query_len": query_len})
        assert attention_key(form) in compiled, (head_dim, kv_bytes, group, query_len)
