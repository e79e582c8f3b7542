"""Safetensors directories that are damaged or lie: an error that names the file or tensor; never a crash."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from pagewire.errors import StartupError
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.loading.weights.safetensors import SafetensorsSource
from tests.limited_memory import address_space
from tests.services.executor.models.test_models import CPU, save_tiny

MEMORY = 1 << 30  # of address space: a thread's stack and heap take much of it
TENSOR = "model.layers.1.mlp.up_proj.weight"

Check = Callable[[bytes], str | None]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sound")
    save_tiny(directory, "Llama")
    load(directory)
    return directory


def load(directory: Path) -> None:
    load_model(directory, dtype="float32", device=CPU, max_model_len=32, model_impl="pagewire")


@pytest.fixture
def loads_or_names_the_file(sound: Path, tmp_path: Path) -> Check:
    directory = tmp_path / "damaged"
    directory.mkdir()
    (directory / "config.json").write_bytes((sound / "config.json").read_bytes())

    def check(data: bytes) -> str | None:
        """The error's message."""
        (directory / "model.safetensors").write_bytes(data)
        with address_space(MEMORY):
            try:
                load(directory)
            except StartupError as error:
                assert "damaged" in str(error)
                return str(error)
        return None

    return check


def fuzz(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


def parts(sound: Path) -> tuple[dict[str, Any], bytes]:
    """The header and the tensors' data."""
    data = (sound / "model.safetensors").read_bytes()
    end = 8 + struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8:end]), data[end:]


def assembled(header: Any, tensors: bytes) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + tensors


@fuzz(60)
@given(data=st.data())
def test_flipped_bits(sound: Path, loads_or_names_the_file: Check, data: st.DataObject) -> None:
    damaged = bytearray((sound / "model.safetensors").read_bytes())
    end = 8 + struct.unpack("<Q", damaged[:8])[0] if data.draw(st.booleans()) else len(damaged)
    for position in data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=20)):
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    loads_or_names_the_file(bytes(damaged))


@fuzz(30)
@given(share=st.floats(0, 1, exclude_max=True))
def test_truncated_anywhere(sound: Path, loads_or_names_the_file: Check, share: float) -> None:
    whole = (sound / "model.safetensors").read_bytes()
    for size in (int(share * len(whole)), int(share * 3000)):
        error = loads_or_names_the_file(whole[:size])
        assert error is not None
        assert "model.safetensors: truncated or not a safetensors file" in error


NUMBERS = (-1, 0, 1, 2**31, 2**62, 2**63, 2**64, 1e300, 0.5)
LISTS: tuple[list[Any], ...] = ([], [0], [-1, 4], [2**40, 2**40], [0, 2**63], [4, 0], [[[]]])
ANY_JSON = st.sampled_from((None, True, *NUMBERS, "", "F32", "Q4", *LISTS, {}, {"a": 1}))


@fuzz(80)
@given(data=st.data())
def test_headers_that_lie(sound: Path, loads_or_names_the_file: Check, data: st.DataObject) -> None:
    header, tensors = parts(sound)
    names = data.draw(
        st.lists(st.sampled_from(sorted(set(header) - {"__metadata__"})), min_size=1, max_size=2, unique=True)
    )
    for name in names:
        if data.draw(st.integers(0, 5)) == 0:
            header[name] = data.draw(ANY_JSON)
        else:
            key = data.draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
            header[name] = header[name] | {key: data.draw(ANY_JSON)}
    loads_or_names_the_file(assembled(header, tensors))


@fuzz(40)
@given(length=st.sampled_from([0, 1, 7, 10**8, 2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 8, 2**64 - 1]))
def test_header_lengths(sound: Path, loads_or_names_the_file: Check, length: int) -> None:
    whole = (sound / "model.safetensors").read_bytes()
    error = loads_or_names_the_file(struct.pack("<Q", length) + whole[8:])
    assert error is not None


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"[]",
        b"{",
        b"\xff" * 64,
        b'{"a\xff": 1}',
        b'{"a":' * 20_000,
        b"[" * 100_000,
        b'{"__metadata__": 3}',
        b"null",
    ],
    ids=range(9),
)
def test_headers_that_are_no_headers(loads_or_names_the_file: Check, text: bytes) -> None:
    error = loads_or_names_the_file(assembled(text, bytes(64)))
    assert error is not None
    assert "model.safetensors: truncated or not a safetensors file" in error or "missing" in error


def test_overlapping_and_repeated_tensors(sound: Path, loads_or_names_the_file: Check) -> None:
    header, tensors = parts(sound)
    first, second = sorted(
        (name for name in header if name != "__metadata__"), key=lambda n: header[n]["data_offsets"]
    )[:2]
    overlapping = header | {second: header[first]}
    text = json.dumps(header)
    repeated = text[:-1] + f', "{first}": {json.dumps(header[second])}' + "}"
    for damaged in (overlapping, repeated.encode()):
        error = loads_or_names_the_file(assembled(damaged, tensors))
        assert error is not None
        assert "truncated or not a safetensors file" in error


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float8_e5m2, torch.complex64])
def test_weights_of_an_odd_type_are_named(sound: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    source = SafetensorsSource(sound)
    tensors = {name: source.raw(name).clone() for name in source.shapes}
    tensors[TENSOR] = torch.zeros(tensors[TENSOR].shape, dtype=dtype)
    (tmp_path / "config.json").write_bytes((sound / "config.json").read_bytes())
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(StartupError, match=rf"model\.safetensors: tensor {TENSOR} has type"):
        load(tmp_path)


def test_a_tensor_in_two_shards(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((sound / "config.json").read_bytes())
    (tmp_path / "a.safetensors").write_bytes((sound / "model.safetensors").read_bytes())
    save_file({TENSOR: torch.zeros(2)}, tmp_path / "b.safetensors")
    index = {"weight_map": {"x": "a.safetensors", TENSOR: "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartupError, match=rf"b\.safetensors: tensor {TENSOR} is also in a\.safetensors"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (b"", "not a valid index"),
        (b"\xff\xfe", "not a valid index"),
        (b"[]", "not a valid index"),
        (b"[" * 100_000, "not a valid index"),
        (b'{"weight_map": []}', "not a valid index"),
        (b'{"weight_map": null}', "not a valid index"),
        (b'{"weight_map": {"a": ["b"]}}', "not a valid index"),
        (b'{"weight_map": {"a": 1, "b": "c"}}', "not a valid index"),
        (b'{"weight_map": {"a": 1}}', "weight_map names 1, expected a file in the same folder"),
        (b'{"weight_map": {"a": "../sound/model.safetensors"}}', r"names '\.\./sound/model"),
        (b'{"weight_map": {"a": "/etc/passwd"}}', "weight_map names '/etc/passwd'"),
        (b'{"weight_map": {"a": ".."}}', "missing: .."),
        (b'{"weight_map": {"a": "\\u0000"}}', "missing"),
        (b'{"weight_map": {"a": "gone.safetensors"}}', r"missing: gone\.safetensors"),
        (b'{"weight_map": {}}', "missing: model.embed_tokens"),
    ],
)
def test_indices(sound: Path, tmp_path: Path, index: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes((sound / "config.json").read_bytes())
    (tmp_path / "model.safetensors.index.json").write_bytes(index)
    with pytest.raises(StartupError, match=message) as raised:
        load(tmp_path)
    assert str(tmp_path) in str(raised.value)


def test_a_directory_for_a_file(sound: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((sound / "config.json").read_bytes())
    (tmp_path / "model.safetensors").mkdir()
    with pytest.raises(StartupError, match=r"neither model\.safetensors nor"):
        load(tmp_path)
    (tmp_path / "config.json").write_bytes(b"[" * 100_000)
    with pytest.raises(StartupError, match=r"config\.json: cannot be read as JSON"):
        load(tmp_path)
