"""GGUF files that are damaged or lie: an error that names the file, in bounded time and memory; never a crash."""

from __future__ import annotations

import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pagewire.errors import StartupError
from pagewire.files.gguf import GgufError, read_header
from pagewire.services.executor.loading.loader import load_model
from pagewire.services.executor.loading.weights.gguf_file import GgufFile
from tests.limited_memory import address_space, python_peak
from tests.makers.gguf_bytes import Entry, header, number_fields, string
from tests.services.executor.loading.weights.test_gguf import tiny_model
from tests.services.executor.loading.weights.test_gguf_quantized import LINEAR, SIZES, write_quantized
from tests.services.executor.models.test_models import CPU

MEBI = 1 << 20
MEMORY = 1 << 30  # of address space: a thread's stack and heap take much of it
EDGES = [0, 1, 2, 31, 255, 65536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1]


@cache
def sound_file() -> bytes:
    """A model of one layer, in two types."""
    types = dict.fromkeys(LINEAR, Type.Q4_1) | {"attn_v": Type.Q6_K, "token_embd": Type.Q8_0}
    model = tiny_model("Llama", **SIZES | {"intermediate_size": 256}, tie_word_embeddings=True)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "tiny.gguf")
        write_quantized(path, model, "llama", types)
        return path.read_bytes()


def sound_parts() -> tuple[dict[str, Any], list[Entry], bytes]:
    parsed = read_header(sound_file())
    entries = [Entry(t.name.encode(), t.shape[::-1], t.type, t.offset) for t in parsed.tensors]
    return parsed.metadata, entries, sound_file()[parsed.data_offset :]


def load(path: Path) -> None:
    load_model(path, dtype="float32", device=CPU, max_model_len=32, model_impl="pagewire")


@pytest.fixture(scope="module", autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Libraries are loaded and threads started before memory is limited; the file is sound, so that damage shows."""
    path = tmp_path_factory.mktemp("sound") / "tiny.gguf"
    path.write_bytes(sound_file())
    load(path)


@pytest.fixture
def loads_or_names_the_file(tmp_path: Path) -> Callable[[bytes], str | None]:
    path = tmp_path / "damaged.gguf"

    def check(data: bytes) -> str | None:
        """The error's message."""
        path.write_bytes(data)
        with address_space(MEMORY):
            try:
                load(path)
            except StartupError as error:
                assert "damaged.gguf" in str(error)
                assert len(str(error)) < 2000
                return str(error)
        return None

    return check


def fuzz(max_examples: int) -> settings:
    return settings(
        max_examples=max_examples, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
    )


@fuzz(80)
@given(data=st.data())
def test_flipped_bits(loads_or_names_the_file: Callable[[bytes], str | None], data: st.DataObject) -> None:
    damaged = bytearray(sound_file())
    end = read_header(sound_file()).data_offset if data.draw(st.booleans()) else len(damaged)
    for position in data.draw(st.lists(st.integers(0, end - 1), min_size=1, max_size=20)):
        damaged[position] ^= 1 << data.draw(st.integers(0, 7))
    loads_or_names_the_file(bytes(damaged))


@fuzz(120)
@given(data=st.data())
def test_numbers_of_the_header(loads_or_names_the_file: Callable[[bytes], str | None], data: st.DataObject) -> None:
    """Counts, lengths, types, dimensions, offsets and values: huge, tiny, off by one."""
    damaged = bytearray(sound_file())
    position, size = data.draw(st.sampled_from(number_fields(sound_file())))
    stored = int.from_bytes(damaged[position : position + size], "little")
    near = [stored - 1, stored + 1, stored * 2, len(damaged), len(damaged) - position]
    value = data.draw(st.sampled_from(EDGES + near))
    damaged[position : position + size] = (value % (1 << 8 * size)).to_bytes(size, "little")
    loads_or_names_the_file(bytes(damaged))


def test_truncated_at_every_structure(tmp_path: Path) -> None:
    data, path = sound_file(), tmp_path / "cut.gguf"
    cuts = {position + more for position, _ in number_fields(data) for more in (0, 1)}
    parsed = read_header(data)
    cuts |= {parsed.data_offset + tensor.offset for tensor in parsed.tensors} | {1, 2, 3, parsed.data_offset}
    for cut in sorted(cuts):
        path.write_bytes(data[:cut])
        with pytest.raises(StartupError, match=r"cut\.gguf: truncated or not a GGUF file"):
            GgufFile(path)


WRONG_VALUES = st.sampled_from(
    [
        "",
        "text",
        -1,
        0,
        3,
        2**32,
        2**63,
        -(2**40),
        1.5,
        -1.0,
        float("nan"),
        float("inf"),
        True,
        [],
        [1, 2],
        ["a"],
        [[1]],
    ]
)


@fuzz(120)
@given(data=st.data())
def test_metadata_of_wrong_types(loads_or_names_the_file: Callable[[bytes], str | None], data: st.DataObject) -> None:
    metadata, entries, tensors = sound_parts()
    scaling = ["type", "factor", "attn_factor", "original_context_length", "yarn_beta_fast", "yarn_beta_slow"]
    more = ["attention.key_length", "attention.sliding_window", "expert_count", "rope.dimension_count"]
    keys = [*metadata, "general.alignment", *(f"llama.{key}" for key in more)]
    keys += [f"llama.rope.scaling.{key}" for key in scaling]
    for key in data.draw(st.lists(st.sampled_from(keys), min_size=1, max_size=3)):
        metadata[key] = data.draw(WRONG_VALUES)
    if data.draw(st.booleans()):
        metadata["llama.rope.scaling.type"] = data.draw(st.sampled_from(["linear", "yarn"]))
    loads_or_names_the_file(header(metadata, entries) + tensors)


def replaced(entries: list[Entry], index: int, **changes: Any) -> list[Entry]:
    return [*entries[:index], Entry(**(vars(entries[index]) | changes)), *entries[index + 1 :]]


DAMAGED_TABLES: dict[str, tuple[Callable[[list[Entry], int], list[Entry]], str]] = {
    "twice": (lambda table, end: [*table, table[3]], r"tensor '{name}' appears twice"),
    "no such type": (lambda table, end: replaced(table, 3, type=4711), r"tensor {name} has the unknown type 4711"),
    "beyond the end": (lambda table, end: replaced(table, 3, offset=end), r"tensor {name} ends at byte"),
    "far beyond the end": (lambda table, end: replaced(table, 3, offset=1 << 62), r"tensor {name} ends at byte"),
    "not aligned": (lambda table, end: replaced(table, 3, offset=table[3].offset + 8), r"'{name}' begins at byte"),
    "overlapping": (lambda table, end: replaced(table, 3, offset=table[4].offset), r"tensors {name} and .* overlap"),
    "empty": (lambda table, end: replaced(table, 3, dimensions=(256, 0)), r"tensor {name} is empty"),
    "no dimensions": (lambda table, end: replaced(table, 3, dimensions=()), r"'{name}' has 0 dimensions"),
    "five dimensions": (lambda table, end: replaced(table, 3, dimensions=(1,) * 5), r"'{name}' has 5 dimensions"),
    "huge": (lambda table, end: replaced(table, 3, dimensions=(1 << 63, 1 << 63)), r"tensor {name} ends at byte"),
    "rows cut blocks": (lambda table, end: replaced(table, 3, dimensions=(48, 4)), r"tensor {name}: row of 48"),
    "odd name": (lambda table, end: replaced(table, 3, name=b"\xff\xfe\0"), r"missing: model\.layers.*unexpected"),
    "long name": (lambda table, end: replaced(table, 3, name=b"n" * 70000), r"has 70000 characters"),
    "another shape": (
        lambda table, end: replaced(table, 3, dimensions=(256, 64)),
        r"v_proj\.weight: expected shape \[128, 256\], found \[64, 256\]",
    ),
}


@pytest.mark.parametrize("case", DAMAGED_TABLES)
def test_tables_of_tensors_that_lie(loads_or_names_the_file: Callable[[bytes], str | None], case: str) -> None:
    metadata, entries, tensors = sound_parts()
    damage, message = DAMAGED_TABLES[case]
    entries.sort(key=lambda entry: entry.offset)
    name = entries[3].name.decode()
    error = loads_or_names_the_file(header(metadata, damage(entries, len(tensors))) + tensors)
    assert error is not None
    assert re.search(message.format(name=re.escape(name)), error), error


def test_huge_counts_in_a_small_file(tmp_path: Path) -> None:
    numbers = string(b"k") + struct.pack("<IIQ", 9, 4, 1 << 60)
    strings = string(b"k") + struct.pack("<IIQ", 9, 8, 1 << 60)
    arrays = string(b"k") + struct.pack("<IIQ", 9, 9, 1 << 60)
    long_key = struct.pack("<Q", 1 << 60)
    for num_tensors, num_pairs, rest in (
        (2**64 - 1, 0, b""),
        (0, 2**64 - 1, b""),
        (1, 1, numbers),
        (1, 1, strings),
        (1, 1, arrays),
        (1, 1, long_key),
        (1, 0, long_key),
    ):
        data = struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, num_pairs) + rest + bytes(200)
        with python_peak(MEBI), pytest.raises(GgufError, match="runs past the end of the file"):
            read_header(data)


def test_memory_of_metadata_is_a_small_multiple_of_the_file() -> None:
    values: list[list[Any]] = [[200] * 10_000, [1.5] * 10_000, ["ab"] * 10_000, [[]] * 10_000, [[1], [2]] * 5_000]
    for value in values:
        data = header({"k": value}, [])
        with python_peak(20 * len(data)):
            assert len(read_header(data).metadata["k"]) == 10_000
    many = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + string(b"k") + struct.pack("<IIQ", 9, 0, 9_000_000)
    data = many + bytes(9_000_000)
    with python_peak(MEBI), pytest.raises(GgufError, match="'k' has 9000000 values"):
        read_header(data)


def test_what_is_no_file(tmp_path: Path) -> None:
    empty, directory, text = tmp_path / "empty.gguf", tmp_path / "directory.gguf", tmp_path / "text.gguf"
    empty.touch()
    directory.mkdir()
    text.write_text("version https://git-lfs.github.com/spec/v1\n")
    for path in (empty, directory, text):
        with pytest.raises(StartupError, match=rf"{path.name}: "):
            load(path)


def test_a_context_that_no_memory_holds(tmp_path: Path) -> None:
    metadata, entries, tensors = sound_parts()
    path = tmp_path / "long.gguf"
    path.write_bytes(header(metadata | {"llama.context_length": 2**28}, entries) + tensors)
    with address_space(MEMORY), pytest.raises(StartupError, match="--max-model-len"):
        load_model(path, dtype="float32", device=CPU)


def test_exit_code(tmp_path: Path) -> None:
    """The message is printed, and nothing is loaded."""
    path = tmp_path / "cut.gguf"
    path.write_bytes(sound_file()[:-5000])
    command = [sys.executable, "-c", "from pagewire.cli import main; main()", "executor", "--device", "cpu"]
    command += ["--model", str(path), "--listen", f"unix:{tmp_path}/executor.sock"]
    environment = os.environ | {"PAGEWIRE_CPU_KERNELS": "torch"}  # there is nothing to compile them for
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 1
    assert "cut.gguf: truncated or not a GGUF file (tensor " in ended.stderr
    assert "Traceback" not in ended.stderr
