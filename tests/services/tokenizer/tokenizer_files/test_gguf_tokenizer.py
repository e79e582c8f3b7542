from pathlib import Path

import gguf
import pytest
from transformers import BertTokenizer, LlamaTokenizer, XLMRobertaTokenizer

from pagewire.files.tokenizer_files.gguf_pre_tokenizers import UnknownPreTokenizerError, pre_tokenizer_for
from pagewire.files.tokenizer_files.gguf_tokenizer import build_gguf_tokenizer
from pagewire.files.tokenizer_files.gguf_vocabulary import GgufTokenizerError, TokenType
from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.files.tokenizer_files.sentencepiece_file import parse
from tests.services.tokenizer.texts import TEXTS
from tests.services.tokenizer.tiny_tokenizers import sentencepiece_vocabulary
from tests.services.tokenizer.tokenizer_files.test_conversion import CORPUS, SENTENCEPIECE, trained


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


def _with_special(*special: str, **more: object) -> dict[str, object]:
    metadata = _sentencepiece_metadata(**more)
    metadata["tokenizer.ggml.tokens"] += special
    metadata["tokenizer.ggml.token_type"] += [TokenType.CONTROL] * len(special)
    metadata["tokenizer.ggml.scores"] += [0.0] * len(special)
    return metadata


TURN = ("<|user|>", "<|end|>", "<|endoftext|>")


@pytest.mark.parametrize(
    ("architecture", "pieces"),
    [
        ("phi3", ["<|user|>", "▁", "he", "<|end|>", "▁t", "<|endoftext|>", "▁", "\n"]),
        ("llama", ["<|user|>", "\n", "he", "<|end|>", "\n", "t", "<|endoftext|>", "\n"]),
    ],
)
def test_special_tokens_of_phi_3_take_the_spaces_after_them(architecture: str, pieces: list[str]) -> None:
    """The model's own tokenizer_config.json says so (rstrip), and no GGUF file does."""
    vocabulary = _with_special(*TURN, **{"general.architecture": architecture})
    backend, _ = build_gguf_tokenizer(vocabulary)
    encoded = backend.encode("<|user|>\nhe<|end|>\nt<|endoftext|>\n", add_special_tokens=False)
    assert [backend.id_to_token(token_id) for token_id in encoded.ids] == pieces


def test_a_token_that_ends_answers_is_never_plain_text() -> None:
    metadata = _with_special("<|im_end|>")
    metadata["tokenizer.ggml.token_type"][-1] = TokenType.NORMAL
    backend, _ = build_gguf_tokenizer(metadata)
    encoded = backend.encode("he<|im_end|>", add_special_tokens=False)
    assert encoded.tokens[-1] == "<|im_end|>"
    assert backend.decode(encoded.ids, skip_special_tokens=True) == "he"


def _bytes_metadata(architecture: str, **more: object) -> dict[str, object]:
    return {
        "general.architecture": architecture,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": ["a", "b", "Ġ", "<mask>"],
        "tokenizer.ggml.token_type": [1, 1, 1, TokenType.CONTROL],
        "tokenizer.ggml.merges": [],
    } | more


def test_masks_of_roberta_take_the_space_before_them() -> None:
    backend, _ = build_gguf_tokenizer(_bytes_metadata("jina-bert-v2", **{"tokenizer.ggml.pre": "jina-v2-de"}))
    encoded = backend.encode("a <mask> b", add_special_tokens=False)
    assert [backend.id_to_token(token_id) for token_id in encoded.ids] == ["a", "<mask>", "Ġ", "b"]


@pytest.mark.parametrize("pre", [None, "default"])
def test_a_rule_that_is_not_named_is_known_by_the_architecture_or_refused(pre: str | None) -> None:
    named = {} if pre is None else {"tokenizer.ggml.pre": pre}
    backend, _ = build_gguf_tokenizer(_bytes_metadata("gpt2", **named))
    assert backend.encode("ab", add_special_tokens=False).tokens == ["a", "b"]
    with pytest.raises(GgufTokenizerError, match="does not name the rule by which this model splits text; give"):
        build_gguf_tokenizer(_bytes_metadata("llama", **named))


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
        ("llama-bpe", "It'S 12345\n\nx", ["It", "'S", "Ġ", "123", "45", "ĊĊ", "x"]),
        ("qwen2", "It's 123", ["It", "'s", "Ġ", "1", "2", "3"]),
        ("tekken", "HelloWorld 12", ["Hello", "World", "Ġ", "1", "2"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", "Ġ", "123", "4"]),
        ("deepseek-llm", "Ab don't 12中文\n", ["Ab", "Ġdon", "'", "t", "Ġ", "1", "2", "ä¸Ńæĸĩ", "Ċ"]),
        ("deepseek-llm", "über жук+ x1。", ["Ã¼", "ber", "ĠÐ¶ÑĥÐº", "+", "Ġx", "1", "ãĢĤ"]),  # its third rule has ASCII
        ("deepseek-coder", "x_1 = 'é'", ["x", "_", "1", "Ġ=", "Ġ'", "Ã©", "'"]),
        ("falcon", "It's 12345!?", ["It", "'", "s", "Ġ", "123", "45", "!?"]),
        ("seed-coder", "It's 12\n\n+", ["It", "'s", "Ġ", "1", "2", "ĊĊ", "+"]),
        ("kimi-k2", "Hello中文 1234's", ["Hello", "ä¸Ńæĸĩ", "Ġ", "123", "4", "'s"]),
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


def _word_pieces(*, cased: bool) -> list[str]:
    chars = [chr(code) for code in range(33, 127)] + list("中文日本ü–é¿")
    if not cased:
        chars = [char for char in chars if not "A" <= char <= "Z"]
    words = ["the", "quick", "hello", "this", "un", "##aff", "##able", "##ing", "##ello"] + ["This"] * cased
    return ["[PAD]", "[unused0]", "[UNK]", "[CLS]", "[SEP]", *chars, *(f"##{char}" for char in chars), *words]


def _word_piece_metadata(pieces: list[str], **more: object) -> dict[str, object]:
    """As llama.cpp's converter writes it: special tokens as they are, a mark where words begin."""
    special = {"[PAD]": "padding", "[UNK]": "unknown", "[CLS]": "cls", "[SEP]": "seperator"}
    tokens = [piece if piece in special else piece[2:] if piece.startswith("##") else f"▁{piece}" for piece in pieces]
    types = [TokenType.CONTROL if piece in special else TokenType.NORMAL for piece in pieces]
    ids = {f"tokenizer.ggml.{key}_token_id": pieces.index(piece) for piece, key in special.items()}
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "bert",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        **ids,
        **more,
    }


@pytest.mark.parametrize("cased", [True, False])
def test_word_pieces_equal_transformers(tmp_path: Path, cased: bool) -> None:
    pieces = _word_pieces(cased=cased)
    (tmp_path / "vocab.txt").write_text("\n".join(pieces))
    theirs = BertTokenizer(vocab={piece: index for index, piece in enumerate(pieces)}, do_lower_case=not cased)
    backend, named = build_gguf_tokenizer(_word_piece_metadata(pieces))
    assert (named["cls_token"], named["sep_token"], named["unk_token"]) == ("[CLS]", "[SEP]", "[UNK]")
    for text in (*TEXTS, "This UNAFFABLE [SEP] ¿über? hello,中文"):
        ids = backend.encode(text).ids
        assert ids == theirs.encode(text), text
        assert backend.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True), text
    assert backend.encode("this", "hello").ids == theirs.encode("this", "hello")


def test_word_pieces_without_ids_of_special_tokens() -> None:
    metadata = _word_piece_metadata(_word_pieces(cased=False))
    without = {key: value for key, value in metadata.items() if not key.endswith("_token_id")}
    backend, named = build_gguf_tokenizer(without)
    assert named["sep_token"] == "[SEP]"
    assert backend.encode("this").ids == build_gguf_tokenizer(metadata)[0].encode("this").ids
    nameless = without | {
        "tokenizer.ggml.tokens": [f"▁{index}" for index in range(len(metadata["tokenizer.ggml.tokens"]))]
    }
    with pytest.raises(
        GgufTokenizerError, match=r"unknown_token_id is missing, and there is no \[UNK\]; give .*--tokenizer"
    ):
        build_gguf_tokenizer(nameless)
    with pytest.raises(GgufTokenizerError, match=r"seperator_token_id is 9999, but there are \d+ tokens"):
        build_gguf_tokenizer(metadata | {"tokenizer.ggml.seperator_token_id": 9999})


def _unigram_metadata(data: bytes) -> dict[str, object]:
    """As llama.cpp's converter writes XLM-RoBERTa's: its own special tokens first, then the model's pieces."""
    file = parse(data)
    special = [("<s>", 3), ("<pad>", 3), ("</s>", 3), ("<unk>", 2)]
    pieces = [(text, score) for text, score, _ in file.pieces if text not in dict(special)]
    return {
        "general.architecture": "bert",
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [text for text, _ in special] + [text for text, _ in pieces] + ["<mask>"],
        "tokenizer.ggml.scores": [0.0] * 4 + [score for _, score in pieces] + [0.0],
        "tokenizer.ggml.token_type": [type_ for _, type_ in special] + [1] * len(pieces) + [3],
        "tokenizer.ggml.precompiled_charsmap": list(file.charsmap),
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.remove_extra_whitespaces": True,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
    }


def test_unigrams_equal_transformers() -> None:
    data = trained(**SENTENCEPIECE["t5"])
    metadata = _unigram_metadata(data)
    vocab = list(zip(metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"], strict=True))
    theirs = XLMRobertaTokenizer(vocab=vocab, _spm_precompiled_charsmap=parse(data).charsmap)
    backend, named = build_gguf_tokenizer(metadata)
    assert (named["bos_token"], named["eos_token"], named["unk_token"]) == ("<s>", "</s>", "<unk>")
    for text in (*TEXTS, *CORPUS, "a <mask> ﬁn ½"):
        ids = backend.encode(text).ids
        assert ids == theirs.encode(text), text
        if 3 not in ids:  # which theirs leaves out, and ours once it is named
            assert backend.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True), text
    assert backend.encode("one", "two").ids == theirs.encode("one", "two")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scores", [0.0], r"scores: expected \d+ finite numbers, found 1 entries; give .* --tokenizer DIRECTORY"),
        (
            "precompiled_charsmap",
            [255] * 9,
            r"precompiled_charsmap cannot be read \(.*\); give .* --tokenizer DIRECTORY",
        ),
        ("eos_token_id", -1, r"eos_token_id is -1, but there are \d+ tokens"),
    ],
)
def test_unigrams_that_are_damaged(key: str, value: object, message: str) -> None:
    metadata = _unigram_metadata(trained(**SENTENCEPIECE["t5"])) | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(GgufTokenizerError, match=message):
        build_gguf_tokenizer(metadata)
