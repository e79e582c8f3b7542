"""Directories without a tokenizer.json: ids and text equal those of the libraries that their files are made for."""

import base64
import io
import json
import logging
from pathlib import Path

import pytest
import sentencepiece
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import BertTokenizer, GPT2Tokenizer, Qwen2Tokenizer

from pagewire.files.tokenizer_files.byte_alphabet import CHAR_TO_BYTE
from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.files.tokenizer_files.loading import TokenizerLoadError, load_tokenizer
from pagewire.files.tokenizer_files.sentencepiece_file import SentencePieceError, parse
from tests.services.tokenizer.texts import SPACES_BEFORE_DIGITS, TEXTS

CORPUS = [text for text in [*TEXTS, *SPACES_BEFORE_DIGITS] if "<|" not in text]
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
# As in the code that comes with Kimi-K2.
KIMI = "|".join(
    [
        r"""[\p{Han}]+""",
        rf"""[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}*{_CASED[1]}+(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        rf"""[^\r\n\p{{L}}\p{{N}}]?{_CASED[0]}+{_CASED[1]}*(?i:'s|'t|'re|'ve|'m|'ll|'d)?""",
        r"""\p{N}{1,3}""",
        r""" ?[^\s\p{L}\p{N}]+[\r\n]*""",
        r"""\s*[\r\n]+""",
        r"""\s+(?!\S)""",
        r"""\s+""",
    ]
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PAGEWIRE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "tokenizers"


def trained(**options: object) -> bytes:
    """A SentencePiece model of the corpus."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([line for text in CORPUS for line in text.splitlines()] * 3),
        model_writer=model,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    return model.getvalue()


# As the models are trained that ship such files: Llama's, T5's, Gemma's, and one with unknown characters.
SENTENCEPIECE = {
    "llama": {
        "model_type": "bpe",
        "vocab_size": 600,
        "byte_fallback": True,
        "split_digits": True,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "allow_whitespace_only_pieces": True,
    },
    "t5": {
        "model_type": "unigram",
        "vocab_size": 400,
        "character_coverage": 0.98,
        **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
    },
    "gemma": {
        "model_type": "bpe",
        "vocab_size": 600,
        "byte_fallback": True,
        "add_dummy_prefix": False,
        "remove_extra_whitespaces": False,
        "normalization_rule_name": "identity",
    },
    "unigram, bytes": {"model_type": "unigram", "vocab_size": 600, "byte_fallback": True},
    "bpe, unknown": {"model_type": "bpe", "vocab_size": 500, "character_coverage": 0.98},
}


@pytest.mark.parametrize("case", SENTENCEPIECE)
def test_sentencepiece(tmp_path: Path, case: str) -> None:
    data = trained(**SENTENCEPIECE[case])
    (tmp_path / "tokenizer.model").write_bytes(data)
    loaded = load_tokenizer(tmp_path)
    reference = sentencepiece.SentencePieceProcessor(model_proto=data)
    assert loaded.backend.get_vocab_size() == reference.get_piece_size()
    for text in CORPUS:
        ids = reference.encode(text)
        found = loaded.encode(text, add_special_tokens=False)
        scores = [sum(map(reference.get_score, tokens)) for tokens in (found, ids)]
        is_tie = SENTENCEPIECE[case]["model_type"] == "unigram" and scores[0] == pytest.approx(scores[1], rel=1e-6)
        # "???" may be "?" and "??" in either order: both have the same probability.
        assert found == ids or (is_tie and sorted(found) == sorted(ids)), text
        if reference.unk_id() not in ids:
            assert loaded.decode(ids, skip_special_tokens=True) == reference.decode(ids), text


def test_named_tokens_of_a_sentencepiece_model(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained(**SENTENCEPIECE["llama"]))
    loaded = load_tokenizer(tmp_path)
    assert loaded.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    plain = loaded.encode("Hello world", add_special_tokens=False)
    assert loaded.encode("Hello world", add_special_tokens=True) == [1, *plain]
    after = loaded.encode("<s>Hello world", add_special_tokens=False)
    assert after == [1, *plain] and loaded.decode(after, skip_special_tokens=True) == "Hello world"
    config = {"add_eos_token": True, "add_bos_token": False, "additional_special_tokens": ["<|end|>"]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": len(loaded.backend.get_vocab())}))
    loaded = load_tokenizer(tmp_path)
    assert loaded.encode("Hello world", add_special_tokens=True) == [*plain, 2]
    assert loaded.encode("<pad><|end|>", add_special_tokens=False) == [
        loaded.backend.get_vocab_size() - 2 + n for n in (0, 1)
    ]


@given(st.binary(max_size=60))
def test_any_bytes_are_a_model_or_an_error(data: bytes) -> None:
    try:
        assert parse(data).pieces
    except SentencePieceError as error:
        assert "not a SentencePiece model" in str(error)


def byte_ranks() -> dict[bytes, int]:
    """Ranks as tiktoken's, of a byte-level BPE trained on the corpus."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS * 3, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    )
    tokens = sorted(backend.get_vocab().items(), key=lambda item: item[1])
    spelled = [bytes(CHAR_TO_BYTE[char] for char in token) for token, _ in tokens]
    return {token: rank for rank, token in enumerate(dict.fromkeys(spelled))}


def write_tiktoken(path: Path, ranks: dict[bytes, int]) -> None:
    path.write_bytes(b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in ranks.items()))


@pytest.mark.parametrize(
    ("name", "tokenizer_class", "pattern"),
    [
        ("tokenizer.model", None, LLAMA3),
        ("qwen.tiktoken", "QWenTokenizer", LLAMA3.replace("{1,3}", "")),
        ("tiktoken.model", "TikTokenTokenizer", KIMI),
    ],
)
def test_tiktoken(tmp_path: Path, name: str, tokenizer_class: str | None, pattern: str) -> None:
    ranks = byte_ranks()
    write_tiktoken(tmp_path / name, ranks)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    loaded = load_tokenizer(tmp_path)
    reference = tiktoken.Encoding("test", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
    for text in CORPUS:
        if name == "qwen.tiktoken" and "\u0301" in text:
            continue  # Qwen's is normalized first, which tiktoken knows nothing of
        ids = reference.encode_ordinary(text)
        assert loaded.encode(text, add_special_tokens=False) == ids, text
        assert loaded.decode(ids, skip_special_tokens=True) == text


def test_special_tokens_of_llama_3(tmp_path: Path) -> None:
    ranks = byte_ranks()
    write_tiktoken(tmp_path / "tokenizer.model", ranks)
    loaded = load_tokenizer(tmp_path)
    first = len(ranks)
    assert loaded.encode("a<|eot_id|>", add_special_tokens=True) == [first, ranks[b"a"], first + 9]
    assert loaded.backend.token_to_id("<|reserved_special_token_4|>") == first + 8
    assert loaded.backend.token_to_id("<|reserved_special_token_250|>") == first + 255


def test_tekken(tmp_path: Path) -> None:
    ranks = byte_ranks()
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in ranks.items()]
    unused = {"rank": len(ranks), "token_bytes": base64.b64encode(b"Hello world").decode()}
    file = {
        "config": {"pattern": LLAMA3, "default_vocab_size": len(ranks) + 20, "default_num_special_tokens": 20},
        "vocab": [*vocab, unused],
        "special_tokens": [{"rank": 3, "token_str": "[INST]"}, {"rank": 4, "token_str": "[/INST]"}],
    }
    (tmp_path / "tekken.json").write_text(json.dumps(file))
    loaded = load_tokenizer(tmp_path)
    reference = tiktoken.Encoding("test", pat_str=LLAMA3, mergeable_ranks=ranks, special_tokens={})
    for text in CORPUS:
        ids = [20 + token_id for token_id in reference.encode_ordinary(text)]
        assert loaded.encode(text, add_special_tokens=False) == ids
        assert loaded.decode(ids, skip_special_tokens=True) == text
    assert loaded.encode("[INST]a[/INST]", add_special_tokens=True) == [1, 3, 20 + ranks[b"a"], 4]


@pytest.mark.parametrize("reference_class", [GPT2Tokenizer, Qwen2Tokenizer])
def test_vocab_and_merges(tmp_path: Path, reference_class: type) -> None:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    backend.model.save(str(tmp_path))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": reference_class.__name__}))
    check_same(load_tokenizer(tmp_path), reference_class.from_pretrained(tmp_path))


def test_word_pieces(tmp_path: Path) -> None:
    words = {word for text in CORPUS for word in text.lower().split() if len(word) < 9 and word.isalpha()}
    letters = {char for word in words for char in word}
    pieces = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *sorted(words), *sorted(letters - words)]
    pieces += [f"##{letter}" for letter in sorted(letters)]
    (tmp_path / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer"}))
    check_same(load_tokenizer(tmp_path), BertTokenizer.from_pretrained(tmp_path))


def check_same(loaded: LoadedTokenizer, reference: object) -> None:
    for text in CORPUS:
        ids = reference.encode(text)
        assert loaded.encode(text, add_special_tokens=True) == ids, text
        assert loaded.decode(ids, skip_special_tokens=True) == reference.decode(ids, skip_special_tokens=True), text


def test_a_conversion_is_kept(tmp_path: Path, cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    write_tiktoken(tmp_path / "tokenizer.model", byte_ranks())
    first = load_tokenizer(tmp_path)
    (kept,) = cache.iterdir()
    assert "tokenizer converted from tokenizer.model" in caplog.text
    caplog.clear()
    again = load_tokenizer(tmp_path)
    assert again.special_tokens == first.special_tokens and again.backend.to_str() == first.backend.to_str()
    assert not caplog.records
    kept.write_text("{")
    assert load_tokenizer(tmp_path).backend.to_str() == first.backend.to_str()
    assert "the tokenizer is converted again" in caplog.text
    write_tiktoken(tmp_path / "tokenizer.model", dict(list(byte_ranks().items())[:300]))
    assert load_tokenizer(tmp_path).backend.get_vocab_size() < first.backend.get_vocab_size()
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "holds no tokenizer.json, nor files from which one can be made; write a tokenizer.json with transformers"),
        (
            {"tokenizer.model": b"\n\xff"},
            "cannot be converted to a tokenizer: it is not a SentencePiece",
        ),
        ({"tokenizer.model": b"hello world\n"}, "line 1 is not a token in base64 and its rank"),
        ({"tokenizer.model": b"aGVsbG8= 0\n"}, "not every byte is a token"),
        ({"tekken.json": b"{}"}, "not in the format of tekken.json"),
        ({"vocab.txt": b"hello\nworld\n"}, r"\[UNK\], \[CLS\], \[SEP\], \[PAD\] is not in it"),
        ({"vocab.json": b'{"a": 0}', "merges.txt": b"a b\n"}, "vocab.json and merges.txt cannot be converted"),
        (
            {"a.tiktoken": base64.b64encode(b"a") + b" 0", "tokenizer_config.json": b'{"tokenizer_class": "Own"}'},
            "not every byte is a token",
        ),
    ],
)
def test_files_that_are_no_tokenizer(tmp_path: Path, files: dict[str, bytes], message: str) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerLoadError, match=message):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("rank", [255, 258])
def test_ranks_without_gaps(tmp_path: Path, rank: int) -> None:
    """Special tokens would get the ids of others."""
    write_tiktoken(tmp_path / "tokenizer.model", {**{bytes([byte]): byte for byte in range(256)}, b"ab": rank})
    with pytest.raises(TokenizerLoadError, match="its 257 ranks are not the numbers from 0 to 256; write"):
        load_tokenizer(tmp_path)


def test_tokenizers_that_cannot_be_converted_say_why(tmp_path: Path) -> None:
    write_tiktoken(tmp_path / "own.tiktoken", byte_ranks())
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "OwnTokenizer"}')
    with pytest.raises(TokenizerLoadError, match=r"the rule by which OwnTokenizer splits text is unknown; write"):
        load_tokenizer(tmp_path)
    (tmp_path / "own.tiktoken").unlink()
    (tmp_path / "tokenizer.model").write_bytes(trained(model_type="unigram", vocab_size=300))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "XLMRobertaTokenizer"}')
    with pytest.raises(TokenizerLoadError, match="XLMRobertaTokenizer numbers the pieces in its own order"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("listed", [{"<x>": 10, "<y>": 9}, {"a": 5, "<x>": 9, "<y>": 10}, {"<x>": 12}, {"b": 5}])
@pytest.mark.parametrize("file", ["added_tokens.json", "tokenizer_config.json"])
def test_added_tokens_have_their_ids(tmp_path: Path, listed: dict[str, int], file: str) -> None:
    """Files that the library would number differently are refused, as the model would read other tokens."""
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcd"]))
    by_id = {str(token_id): {"content": text, "special": True} for text, token_id in listed.items()}
    content = listed if file == "added_tokens.json" else {"added_tokens_decoder": by_id}
    (tmp_path / file).write_text(json.dumps(content))
    if max(listed.values()) == 10:
        loaded = load_tokenizer(tmp_path)
        for text, token_id in listed.items():
            assert loaded.encode(text, add_special_tokens=False) == [token_id]
    else:
        with pytest.raises(TokenizerLoadError, match=rf"{file} gives .* the id .*, but after .*; write a"):
            load_tokenizer(tmp_path)


def test_added_tokens_without_ids(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]"]))
    (tmp_path / "added_tokens.json").write_text('{"a": 4, "b": "5"}')
    with pytest.raises(TokenizerLoadError, match=r"added_tokens\.json must map each token to its id"):
        load_tokenizer(tmp_path)
