import contextlib
import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.files.gguf import GgufError, read_header, read_metadata
from tests.sweep import examples


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int64("i64", -(2**40))
    writer.add_float64("f64", 0.1)
    writer.add_bool("yes", True)
    writer.add_string("text", "héllo 🎉")
    writer.add_array("ints", [1, -2, 3])
    writer.add_array("words", ["a", "", "ü"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def test_every_kind_of_value(small_file: Path) -> None:
    metadata = read_metadata(small_file)
    assert metadata["general.architecture"] == "llama"
    assert {key: metadata[key] for key in ("u8", "i64", "f64", "yes", "text", "ints", "words")} == {
        "u8": 200,
        "i64": -(2**40),
        "f64": 0.1,
        "yes": True,
        "text": "héllo 🎉",
        "ints": [1, -2, 3],
        "words": ["a", "", "ü"],
    }


def test_real_file_equals_the_gguf_package(smollm2_gguf: Path) -> None:
    ours = read_metadata(smollm2_gguf)
    reader = gguf.GGUFReader(smollm2_gguf)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert ours == theirs


def test_every_truncation_is_an_error_not_a_crash(small_file: Path, tmp_path: Path) -> None:
    data = small_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(len(data) - 8):
        cut.write_bytes(data[:size])
        with pytest.raises(GgufError, match=r"cut\.gguf"):
            read_metadata(cut)


@given(data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_flipped_bytes_never_crash_or_take_all_memory(tmp_path_factory, data) -> None:
    path = tmp_path_factory.getbasetemp() / "flip.gguf"
    original = _small_bytes(tmp_path_factory)
    position = data.draw(st.integers(0, len(original) - 1))
    path.write_bytes(original[:position] + bytes([data.draw(st.integers(0, 255))]) + original[position + 1 :])
    with contextlib.suppress(GgufError):
        read_metadata(path)
    with contextlib.suppress(GgufError):
        read_header(path.read_bytes(), skip_string_arrays=True)


def _small_bytes(tmp_path_factory) -> bytes:
    path = tmp_path_factory.getbasetemp() / "flip-source.gguf"
    if not path.exists():
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_array("words", ["a", "bc", "def"])
        writer.add_array("numbers", [1.5, 2.5])
        writer.add_tensor("t", np.zeros((2, 3), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
    return path.read_bytes()


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(40))
    with pytest.raises(GgufError, match="not a GGUF file"):
        read_metadata(path)
    path.write_bytes(b"GGUF\x00\x00\x00\x03" + bytes(40))
    with pytest.raises(GgufError, match="big-endian"):
        read_metadata(path)


def test_table_of_tensors_equals_the_gguf_package(smollm2_gguf: Path) -> None:
    header = read_header(smollm2_gguf.read_bytes(), skip_string_arrays=True)
    reader = gguf.GGUFReader(smollm2_gguf)
    theirs = [(t.name, tuple(int(n) for n in reversed(t.shape)), int(t.tensor_type)) for t in reader.tensors]
    assert [(t.name, t.shape, t.type) for t in header.tensors] == theirs
    assert header.data_offset == reader.data_offset
    assert [header.data_offset + t.offset for t in header.tensors] == [int(t.data_offset) for t in reader.tensors]
    metadata = read_metadata(smollm2_gguf)
    assert "tokenizer.ggml.tokens" not in header.metadata
    assert header.metadata == {key: metadata[key] for key in header.metadata}


def _bytes_of(pairs: bytes, num_pairs: int, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_pairs) + pairs + tensors


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_bytes_of((_string("k") + struct.pack("<IB", 0, 1)) * 2, 2), "'k' appears twice"),
        (_bytes_of(_string("k") + struct.pack("<IB", 77, 1), 1), "unknown value type 77"),
        (_bytes_of(_string("general.alignment") + struct.pack("<II", 4, 3), 1), "alignment is 3"),
        (_bytes_of(b"", 0, _string("t") + struct.pack("<I", 9), 1), "'t' has 9 dimensions"),
        (_bytes_of(b"", 0, (_string("t") + struct.pack("<IQIQ", 1, 4, 0, 0)) * 2, 2), "'t' appears twice"),
        (_bytes_of(_string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000, 1), "nested"),
    ],
)
def test_what_makes_no_sense_is_refused(data: bytes, message: str) -> None:
    with pytest.raises(GgufError, match=message):
        read_header(data)
