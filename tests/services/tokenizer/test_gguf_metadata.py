from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaTokenizer

from services.tokenizer.gguf_metadata import GgufError, read_gguf_metadata
from services.tokenizer.gguf_pre_tokenizers import UnknownPreTokenizerError, pre_tokenizer_for
from services.tokenizer.gguf_tokenizer import GgufTokenizerError, TokenType, build_gguf_tokenizer
from services.tokenizer.loading import load_tokenizer
from tests.services.tokenizer.texts import TEXTS
from tests.services.tokenizer.tiny_tokenizers import sentencepiece_vocabulary


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
    metadata = read_gguf_metadata(small_file)
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
    ours = read_gguf_metadata(smollm2_gguf)
    reader = gguf.GGUFReader(smollm2_gguf)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert ours == theirs


def test_every_truncation_is_an_error_not_a_crash(small_file: Path, tmp_path: Path) -> None:
    data = small_file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in range(len(data) - 8):
        cut.write_bytes(data[:size])
        with pytest.raises(GgufError, match=r"cut\.gguf"):
            read_gguf_metadata(cut)


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_flipped_bytes_never_crash_or_take_all_memory(tmp_path_factory, data) -> None:
    path = tmp_path_factory.getbasetemp() / "flip.gguf"
    original = _small_bytes(tmp_path_factory)
    position = data.draw(st.integers(0, len(original) - 1))
    path.write_bytes(original[:position] + bytes([data.draw(st.integers(0, 255))]) + original[position + 1 :])
    try:
        read_gguf_metadata(path)
    except GgufError:
        pass


def _small_bytes(tmp_path_factory) -> bytes:
    path = tmp_path_factory.getbasetemp() / "flip-source.gguf"
    if not path.exists():
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_array("words", ["a", "bc", "def"])
        writer.add_array("numbers", [1.5, 2.5])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    return path.read_bytes()


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(40))
    with pytest.raises(GgufError, match="not a GGUF file"):
        read_gguf_metadata(path)
    path.write_bytes(b"GGUF\x00\x00\x00\x03" + bytes(40))
    with pytest.raises(GgufError, match="big-endian"):
        read_gguf_metadata(path)


def _sentencepiece_metadata(**more: object) -> dict[str, object]:
    vocab, merges = sentencepiece_vocabulary()
    ranks = {"".join(pair): -float(rank) for rank, pair in enumerate(merges)}
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL] + [TokenType.BYTE] * 256
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(vocab),
        "tokenizer.ggml.scores": [ranks.get(token, -1000.0) for token in vocab],
        "tokenizer.ggml.token_type": types + [TokenType.NORMAL] * (len(vocab) - len(types)),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    } | more


def test_sentencepiece_from_scores_equals_transformers() -> None:
    vocab, merges = sentencepiece_vocabulary()
    theirs = LlamaTokenizer(vocab=vocab, merges=merges, add_bos_token=True)
    backend, config = build_gguf_tokenizer(_sentencepiece_metadata())
    assert (config["bos_token"], config["eos_token"], config["add_bos_token"]) == ("<s>", "</s>", True)
    for text in TEXTS:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert ids == theirs.encode(text, add_special_tokens=False), text
        assert backend.decode(ids, skip_special_tokens=False) == theirs.decode(ids), text


def test_sentencepiece_without_space_prefix() -> None:
    backend, _ = build_gguf_tokenizer(_sentencepiece_metadata(**{"tokenizer.ggml.add_space_prefix": False}))
    ids = backend.encode("this", add_special_tokens=False).ids
    assert backend.decode(ids) == "this"
    assert backend.id_to_token(ids[0]) == "t"


def test_sentencepiece_file_adds_bos(tmp_path: Path) -> None:
    path = tmp_path / "spm.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in _sentencepiece_metadata().items():
        if isinstance(value, list):
            writer.add_array(key, [int(v) if isinstance(v, TokenType) else v for v in value])
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif key != "general.architecture":
            writer.add_string(key, str(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    tokenizer = load_tokenizer(path)
    assert tokenizer.encode("this", add_special_tokens=True)[0] == 1
    assert tokenizer.encode("</s>", add_special_tokens=False)[-1] == 2


@pytest.mark.parametrize(
    ("pre", "text", "pieces"),
    [
        ("smollm", "a  12", ["a", "ĠĠ", "1", "2"]),
        ("gpt-2", "a  12", ["a", "Ġ", "Ġ12"]),
        ("default", "a  12", ["a", "Ġ", "Ġ12"]),
        ("llama-bpe", "It'S 12345\n\nx", ["It", "'S", "Ġ", "123", "45", "ĊĊ", "x"]),
        ("qwen2", "It's 123", ["It", "'s", "Ġ", "1", "2", "3"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", "Ġ", "123", "4"]),
        ("deepseek-v3", "a1234中文b", ["a", "123", "4", "ä¸Ńæĸĩ", "b"]),
    ],
)
def test_pre_tokenizers(pre, text, pieces) -> None:
    assert [piece for piece, _ in pre_tokenizer_for(pre).pre_tokenize_str(text)] == pieces


def test_unknown_kinds_are_refused_with_a_remedy() -> None:
    with pytest.raises(UnknownPreTokenizerError, match="--tokenizer"):
        pre_tokenizer_for("brand-new")
    with pytest.raises(GgufTokenizerError, match=r"'rwkv'.*--tokenizer"):
        build_gguf_tokenizer({"tokenizer.ggml.model": "rwkv", "tokenizer.ggml.tokens": ["a"]})
    with pytest.raises(GgufTokenizerError, match="no tokenizer"):
        build_gguf_tokenizer({"general.architecture": "llama"})
    broken = _sentencepiece_metadata(**{"tokenizer.ggml.eos_token_id": 10**6})
    with pytest.raises(GgufTokenizerError, match="eos_token_id"):
        build_gguf_tokenizer(broken)
    joins_nothing = _sentencepiece_metadata(**{"tokenizer.ggml.merges": ["h qq"]})
    with pytest.raises(GgufTokenizerError, match="merges"):
        build_gguf_tokenizer(joins_nothing)
