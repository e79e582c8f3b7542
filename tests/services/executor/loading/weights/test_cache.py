"""Packed weights kept on disk: the same model from them, and a start that never fails because of them."""

from __future__ import annotations

import errno
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from pagewire.services.executor.loading.filler import Filler
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.loading.weights import cache, tensor_file
from pagewire.services.executor.loading.weights.cache import copied
from pagewire.services.executor.loading.weights.staging import Staging
from pagewire.services.executor.models.decoder import DecoderModel
from tests.services.executor.helpers.paged_batch import PagedBatch
from tests.services.executor.loading.weights.test_gguf import tiny_model
from tests.services.executor.loading.weights.test_gguf_quantized import MIXTURES, SIZES, write_quantized
from tests.services.executor.loading.weights.test_staging import LateTransfer
from tests.services.executor.models.test_models import CPU, save_tiny
from tests.sweep import examples


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A GGUF file with weights of several types."""
    path = tmp_path / "tiny [1].gguf"
    write_quantized(path, tiny_model("Llama", **SIZES), "llama", MIXTURES["Q4_K_M"])
    return path


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The checkpoints that weights were read from."""
    read, paths = Filler.read, []

    def noted(self: Filler, path: Path, weights: Any) -> None:
        paths.append(path)
        read(self, path, weights)

    monkeypatch.setattr(Filler, "read", noted)
    return paths


def load(path: Path, directory: Path | str | None, dtype: str = "float32", **options: Any) -> DecoderModel:
    cached = None if directory is None else str(directory)
    model = load_model(path, dtype=dtype, device=CPU, weights_cache=cached, **options)
    assert isinstance(model, DecoderModel)
    return model


def logits(model: DecoderModel) -> Tensor:
    return PagedBatch(model, num_requests=1, max_len=8).step({0: [1, 5, 9, 3]})[0]


def entries(directory: Path) -> list[Path]:
    return sorted(directory.iterdir())


@pytest.mark.parametrize("quantization", [None, "none"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_second_start_maps_what_the_first_has_packed(
    model: Path, tmp_path: Path, reads: list[Path], quantization: str | None, dtype: str
) -> None:
    expected = logits(load(model, None, dtype, quantization=quantization))
    first, second = (load(model, tmp_path / "cache", dtype, quantization=quantization) for _ in range(2))
    assert len(reads) == 2 and len(entries(tmp_path / "cache")) == 1
    assert first.weight_bytes == second.weight_bytes
    assert torch.equal(logits(first), expected) and torch.equal(logits(second), expected)


def test_a_dense_model_with_biases(tmp_path: Path, reads: list[Path]) -> None:
    save_tiny(tmp_path / "model", "Qwen2")
    models = [load(tmp_path / "model", tmp_path / "cache", "bfloat16") for _ in range(2)]
    assert len(reads) == 1
    assert torch.equal(logits(models[0]), logits(models[1]))


def test_weights_are_views_of_the_file_at_aligned_addresses(model: Path, tmp_path: Path) -> None:
    for _ in range(2):
        loaded = load(model, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    ((start, end),) = [
        tuple(int(address, 16) for address in line.split()[0].split("-"))
        for line in Path("/proc/self/maps").read_text().splitlines()
        if line.endswith(str(file))
    ]
    for module in loaded.modules():
        for part in module.parts:
            tensor = part.codes  # type: ignore[attr-defined]
            assert start <= tensor.data_ptr() < end
            assert tensor.data_ptr() % 64 == 0


def test_any_safetensors_reader_takes_the_file(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(5, dtype=torch.int16), "b": torch.randn(3, 33).to(torch.float8_e4m3fn)}
    tensor_file.write(tmp_path / "x", tensors, {"k": [1]})
    with safe_open(tmp_path / "x", framework="pt") as file:
        assert sorted(file.keys()) == ["a", "b"]
    read, content = tensor_file.read(tmp_path / "x")
    assert content == {"k": [1]}
    for name, tensor in tensors.items():
        assert read[name].dtype is tensor.dtype and read[name].shape == tensor.shape
        assert torch.equal(read[name].float(), tensor.float())


def test_dtype_and_none_have_entries_of_their_own(model: Path, tmp_path: Path, reads: list[Path]) -> None:
    for _ in range(2):
        load(model, tmp_path / "cache")
        load(model, tmp_path / "cache", "bfloat16")
        load(model, tmp_path / "cache", quantization="none")
    assert len(reads) == 3 and len(entries(tmp_path / "cache")) == 3
    load(model, tmp_path / "cache", quantization="gguf")  # insisting changes nothing
    assert len(reads) == 3


def test_auto_is_in_the_cache_directory(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "pagewire"))
    load(model, "auto")
    (entry,) = entries(tmp_path / "pagewire" / "weights")
    assert entry.name.startswith("tiny [1].gguf-")


def change_checkpoint(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_quantized(path, tiny_model("Llama", **SIZES), "llama", MIXTURES["Q4_K_M"], std=0.1)


def change_time(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.utime(path, (1, 1))


def change_code(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "code_digest", lambda: "another")


@pytest.mark.parametrize("change", [change_checkpoint, change_time, change_code])
def test_an_entry_that_is_outdated_is_replaced(
    model: Path,
    tmp_path: Path,
    reads: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Path, pytest.MonkeyPatch], None],
) -> None:
    directory = tmp_path / "cache"
    load(model, directory)
    load(model, directory, "bfloat16")
    change(model, monkeypatch)
    expected = logits(load(model, None))
    assert torch.equal(logits(load(model, directory)), expected)
    assert len(entries(directory)) == 1, "the other dtype's is outdated too"
    assert torch.equal(logits(load(model, directory)), expected)
    assert len(reads) == 4


def test_other_checkpoints_keep_their_entries(model: Path, tmp_path: Path, reads: list[Path]) -> None:
    other = tmp_path / "other.gguf"
    other.write_bytes(model.read_bytes())
    for path in (model, other, model, other):
        load(path, tmp_path / "cache")
    assert len(reads) == 2 and len(entries(tmp_path / "cache")) == 2


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 1, exclude_max=True), byte=st.none() | st.integers(0, 255))
def test_a_damaged_entry_is_replaced(model: Path, tmp_path: Path, share: float, byte: int | None) -> None:
    """Cut off anywhere; or a byte changed in the header, which describes the weights."""
    directory = tmp_path / "cache"
    expected = logits(load(model, directory))
    (entry,) = entries(directory)
    data = bytearray(entry.read_bytes())
    if byte is None:
        data = data[: int(share * len(data))]
    else:
        data[int(share * (8 + int.from_bytes(data[:8], "little")))] = byte
    entry.write_bytes(data)
    assert torch.equal(logits(load(model, directory)), expected)
    (entry,) = entries(directory)
    tensor_file.read(entry)


def test_the_log_says_what_is_wrong_with_an_entry(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names the file, the cause and the consequence, once."""
    load(model, tmp_path / "cache")
    (entry,) = entries(tmp_path / "cache")
    entry.write_bytes(entry.read_bytes().replace(b"PackedGrouped", b"PackedGrouper", 1))
    with caplog.at_level(logging.INFO):
        load(model, tmp_path / "cache")
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert line == (
        f"weights cache: {entry} cannot be used: the file is damaged (the checksum of its header is wrong); the "
        "checkpoint is read instead, and the entry is written anew"
    )
    assert "outdated" not in caplog.text


def test_an_entry_of_another_shape_changes_nothing(
    model: Path, tmp_path: Path, reads: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    load(model, tmp_path / "cache")
    (entry,) = entries(tmp_path / "cache")
    tensors, content = tensor_file.read(entry)
    (part,) = content["modules"]["model.layers.0.mlp.down_proj"]
    part["values"]["shape"][0] += 1
    copies = {name: tensor.clone() for name, tensor in tensors.items()}
    tensor_file.write(entry, copies, content)
    with caplog.at_level(logging.INFO):
        load(model, tmp_path / "cache")
    assert f"{entry} cannot be used: model.layers.0.mlp.down_proj has the wrong shape; the checkpoint is" in caplog.text
    assert len(reads) == 2


def test_a_directory_that_cannot_be_written(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert load(model, tmp_path / "file" / "cache").weight_bytes
    assert "weights are not kept, so the next start packs them again: [Errno 20]" in caplog.text


def test_a_full_disk(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    load(model, tmp_path / "cache")
    assert "No space left on device" in caplog.text
    assert entries(tmp_path / "cache") == []


def test_what_a_writer_that_died_left_is_removed(model: Path, tmp_path: Path) -> None:
    directory = tmp_path / "cache"
    load(model, directory)
    (entry,) = entries(directory)
    left, alive = entry.with_suffix(".123.part"), entry.with_suffix(".124.part")
    left.write_bytes(b"x")
    alive.write_bytes(b"x")
    os.utime(left, (time.time() - 3600,) * 2)
    entry.unlink()
    load(model, directory)
    assert entries(directory) == sorted([entry, alive])


def test_random_weights_and_foreign_models_are_not_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_tiny(tmp_path / "own", "Llama")
    save_tiny(tmp_path / "foreign", "StableLm")
    load(tmp_path / "own", tmp_path / "cache", load_format="dummy")
    with caplog.at_level(logging.INFO):
        load_model(tmp_path / "foreign", device=CPU, weights_cache=str(tmp_path / "cache"))
    assert "weights cache: not used for models that run in transformers' code" in caplog.text
    assert not (tmp_path / "cache").exists()


def test_a_device_gets_copies_through_small_buffers(model: Path, tmp_path: Path) -> None:
    load(model, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    tensors, content = tensor_file.read(file)
    assert json.dumps(content)
    transfers = [LateTransfer() for _ in range(3)]
    staging = Staging((torch.empty(1000, dtype=torch.uint8), transfer) for transfer in transfers)
    fractions: list[float] = []
    arrived = copied(tensors, CPU, staging, 2, lambda fraction, _: fractions.append(fraction))
    assert fractions == sorted(fractions) and fractions[-1] == 1.0
    for name, tensor in tensors.items():
        assert arrived[name].data_ptr() != tensor.data_ptr()
        assert torch.equal(arrived[name].view(torch.uint8), tensor.view(torch.uint8)), name
