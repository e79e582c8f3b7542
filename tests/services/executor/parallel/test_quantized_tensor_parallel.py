"""Ranks that share a quantized model's layers generate what the whole model does, and read their share of its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.torch import load_file, save_file
from torch import Tensor

from pagewire.services.executor.layers.parts import Index
from pagewire.services.executor.loading.twins import twins
from pagewire.services.executor.loading.weights.gguf import GgufSource
from pagewire.services.executor.loading.weights.safetensors import SafetensorsSource
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.parallel.communicator import ALONE, Communicator
from tests.services.executor.helpers.paged_batch import mixed_batch_logits
from tests.services.executor.helpers.stepping import MIXTRAL_4_BITS, alone, write_tiny_llama
from tests.services.executor.loading.quantization import test_awq as awq
from tests.services.executor.loading.quantization import test_gptq as gptq
from tests.services.executor.loading.quantization.checkpoints import save_quantized
from tests.services.executor.loading.weights.test_gguf import tiny_model
from tests.services.executor.loading.weights.test_gguf_quantized import LINEAR, SIZES, write_quantized
from tests.services.executor.models.tiny import load, save_tiny
from tests.services.executor.parallel.test_tensor_parallel import assert_equal_on_ranks, tokens_of
from tests.services.executor.parallel.threads import on_ranks

# Shares of the inputs of all layers are whole groups of 32.
SPLIT: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}
UNEVEN = SPLIT | {"intermediate_size": 160}  # those of 80 inputs are not


def logits_of(model: Model) -> Tensor:
    return torch.cat([logits for _, logits in mixed_batch_logits(model, 60)])


@pytest.mark.parametrize("type_", [Type.Q4_0, Type.Q6_K, Type.IQ4_XS], ids=lambda t: t.name)
@pytest.mark.few("Q4_0", "IQ4_XS")
def test_gguf(tmp_path: Path, type_: Type) -> None:
    """Shares of 128 inputs are whole blocks of Q4_0, and half ones of the others."""
    path = tmp_path / "tiny.gguf"
    model = tiny_model("Llama", **SIZES)
    write_quantized(path, model, "llama", dict.fromkeys((*LINEAR, "token_embd", "output"), type_))
    assert_equal_on_ranks(path, 2)
    assert_equal_on_ranks(path, 2, quantization="none")


@pytest.mark.parametrize("sizes", [SPLIT, UNEVEN], ids=["split", "uneven"])
@pytest.mark.parametrize("act_order", [False, True], ids=["in-order", "act-order"])
def test_gptq(tmp_path: Path, sizes: dict[str, Any], act_order: bool) -> None:
    def packer(name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(weight.shape[1])
        return gptq.pack(weight, 4, 32, torch.randperm(weight.shape[1], generator=generator) if act_order else None)

    save_quantized(tmp_path, gptq.CONFIG | {"desc_act": act_order}, packer, **sizes)
    assert_equal_on_ranks(tmp_path, 2)


@pytest.mark.parametrize("sizes", [SPLIT, UNEVEN], ids=["split", "uneven"])
def test_awq(tmp_path: Path, sizes: dict[str, Any]) -> None:
    config = awq.CONFIG | {"group_size": 32}
    save_quantized(tmp_path, config, lambda _, weight: awq.pack_gemm(weight, 32), **sizes)
    assert_equal_on_ranks(tmp_path, 2)


@pytest.mark.parametrize("changes", [{}, {"num_hidden_layers": 1} | MIXTRAL_4_BITS], ids=["dense", "experts-4-bits"])
def test_random_weights(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Ranks make the weights that one would make alone."""
    path = write_tiny_llama(tmp_path, **changes)

    def first_logits(ranks: Communicator) -> Tensor:
        return logits_of(load(path, load_format="dummy", tensor=ranks))

    expected = first_logits(ALONE)
    for logits in on_ranks(2, first_logits):
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-5)


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """Bytes of files that sources hand out, by the name of the tensor."""
    found: dict[str, int] = {}

    def counting(source: type) -> Any:
        original = source.raw  # type: ignore[attr-defined]

        def raw(self: Any, name: str, index: Sequence[Index] = (), view: Sequence[int] | None = None) -> Tensor:
            tensor: Tensor = original(self, name, index, view)
            found[name] = found.get(name, 0) + tensor.nbytes
            return tensor

        return patch.object(source, "raw", raw)

    with counting(SafetensorsSource), counting(GgufSource):
        yield found


class _Rank:
    """One of several, which needs the others only in steps."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def all_gather(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def all_to_all(self, x: Tensor, rows: Tensor, starts: Tensor) -> None:
        raise NotImplementedError

    def broadcast(self, x: Tensor, root: int) -> Tensor:
        raise NotImplementedError


def bytes_read(path: Path, ranks: Communicator = ALONE) -> int:
    with counted() as found:
        load(path, tensor=ranks)
    return sum(found.values())


@pytest.mark.parametrize("form", ["dense", "gptq", "gptq-act-order", "awq", "gguf"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_read_their_share(tmp_path: Path, form: str, size: int) -> None:
    sizes = SPLIT | {"intermediate_size": 256, "num_key_value_heads": 4, "num_hidden_layers": 1, "vocab_size": 64}
    path = tmp_path
    if form == "dense":
        save_tiny(path, "Llama", **sizes)
    elif form == "gguf":
        path /= "tiny.gguf"
        types = dict.fromkeys((*LINEAR, "token_embd"), Type.Q4_0)
        write_quantized(
            path, tiny_model("Llama", **SIZES | {"num_key_value_heads": 4}, tie_word_embeddings=True), "llama", types
        )
    elif form == "awq":
        save_quantized(path, awq.CONFIG | {"group_size": 32}, lambda _, w: awq.pack_gemm(w, 32), **sizes)
    else:
        order = torch.arange(256).flip(0) if form == "gptq-act-order" else None
        save_quantized(
            path,
            gptq.CONFIG | {"desc_act": order is not None},
            lambda _, w: gptq.pack(w, 4, 32, None if order is None else order[-w.shape[1] :]),
            **sizes,
        )
    whole = bytes_read(path)
    for rank in range(size):
        share = bytes_read(path, _Rank(rank, size)) / whole
        # All ranks have norms and the orders of inputs; the last rank has less of the vocabulary.
        assert abs(share - 1 / size) < 0.04


def test_the_weights_cache_has_an_entry_for_each_rank(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Llama")
    expected = tokens_of(tmp_path / "model")
    options: dict[str, Any] = {"weights_cache": str(tmp_path / "cache")}
    for start in range(2):
        with counted() as found:
            for tokens in on_ranks(2, lambda ranks: tokens_of(tmp_path / "model", ranks, **options)):
                assert tokens == expected
        assert bool(found) == (start == 0), "the second start maps what the first has packed"
    assert tokens_of(tmp_path / "model", **options) == expected, "nor is one rank's taken for the whole"
    assert len(list((tmp_path / "cache").iterdir())) == 3


def test_weights_are_replaced_rank_by_rank(tmp_path: Path) -> None:
    save_tiny(tmp_path / "old", "Llama")
    save_tiny(tmp_path / "new", "Llama", initializer_range=0.2)

    def replaced(ranks: Communicator) -> list[tuple[Tensor, Tensor]]:
        old, new = (load(tmp_path / name, tensor=ranks) for name in ("old", "new"))
        with torch.inference_mode():
            for target, source in twins(old, new):
                target.copy_(source)
        return [(logits_of(old), logits_of(new))]

    for pairs in on_ranks(2, replaced):
        assert all(torch.equal(*pair) for pair in pairs)


def test_scales_of_an_fp8_cache_are_those_of_the_rank_s_heads(tmp_path: Path) -> None:
    save_tiny(tmp_path, "Llama")
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.1.self_attn.k_scale"] = torch.tensor([0.5, 2.0])
    save_file(tensors, tmp_path / "model.safetensors")
    models = on_ranks(2, lambda ranks: load(tmp_path, tensor=ranks, kv_cache_dtype="fp8"))
    found = [model.attention_layers[1].kv_scales for model in models]
    assert [scales.tolist() for scales in found if scales is not None] == [[[0.5], [0.5]], [[2.0], [2.0]]]


@pytest.mark.slow
def test_the_default_model_on_three_ranks(smollm2_gguf: Path) -> None:
    """Tests weights as stored, in bf16: blocks of 32 and of 256 inputs, nine heads with three of keys and values."""
    prompt = [504, 3575, 282, 4649, 314]

    def tokens(ranks: Communicator) -> list[int]:
        model = load(smollm2_gguf, dtype="float32", max_model_len=96, tensor=ranks)
        return alone(model, prompt, 16)

    expected = tokens(ALONE)
    assert on_ranks(3, tokens) == [expected] * 3
