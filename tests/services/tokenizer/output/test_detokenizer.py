from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.tokenizer.output.decoder_plan import UnsupportedDecoderError
from pagewire.services.tokenizer.output.detokenizer import Detokenizers
from tests.services.tokenizer import tiny_tokenizers
from tests.services.tokenizer.texts import TEXTS
from tests.sweep import examples


def stream(detokenizers: Detokenizers, token_ids: list[int], *, skip_special_tokens: bool) -> list[str]:
    detokenizer = detokenizers.make(skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


def assert_streams_like_decode(tokenizer: LoadedTokenizer, detokenizers: Detokenizers, token_ids, skip) -> None:
    deltas = stream(detokenizers, token_ids, skip_special_tokens=skip)
    assert "".join(deltas) == tokenizer.decode(token_ids, skip_special_tokens=skip)


@given(token_ids=st.lists(st.one_of(st.integers(0, 49_160), st.integers(0, 300)), max_size=40), skip=st.booleans())
@settings(max_examples=examples(400), deadline=None)
def test_any_tokens_of_the_real_model(smollm2, detokenizers, token_ids, skip) -> None:
    """Special tokens, lone bytes of characters, ids beyond the vocabulary."""
    assert_streams_like_decode(smollm2, detokenizers, token_ids, skip)


@pytest.mark.parametrize("text", TEXTS)
def test_text_of_the_real_model_has_no_broken_characters(smollm2, detokenizers, text) -> None:
    token_ids = smollm2.encode(text, add_special_tokens=False)
    deltas = stream(detokenizers, token_ids, skip_special_tokens=False)
    assert "".join(deltas) == text
    assert not any("\ufffd" in delta for delta in deltas)


def test_an_emoji_appears_with_its_last_byte(smollm2, detokenizers) -> None:
    token_ids = smollm2.encode("🧑‍🚀", add_special_tokens=False)
    deltas = stream(detokenizers, token_ids, skip_special_tokens=True)
    assert len(token_ids) > 3
    assert "" in deltas
    assert [delta for delta in deltas if delta] == list("🧑‍🚀")


def test_cut_off_bytes_become_replacement_characters_only_at_the_end(smollm2, detokenizers) -> None:
    token_ids = smollm2.encode("🧑", add_special_tokens=False)[:-1]
    deltas = stream(detokenizers, token_ids, skip_special_tokens=True)
    assert set(deltas[:-1]) == {""}
    assert deltas[-1] == smollm2.decode(token_ids, skip_special_tokens=True) == "\ufffd"


KINDS = [
    tiny_tokenizers.save_byte_level,
    tiny_tokenizers.save_sentencepiece,
    tiny_tokenizers.save_unigram,
    tiny_tokenizers.save_word_level,
    tiny_tokenizers.save_word_pieces,
]


@pytest.fixture(scope="module", params=KINDS, ids=lambda save: save.__name__)
def tiny(request, tmp_path_factory) -> LoadedTokenizer:
    return load_tokenizer(request.param(tmp_path_factory.mktemp("tiny"), clean_up_tokenization_spaces=True))


@given(data=st.data())
@settings(max_examples=examples(150), deadline=None)
def test_any_tokens_of_every_kind_of_decoder(tiny: LoadedTokenizer, data) -> None:
    vocab_size = tiny.backend.get_vocab_size()
    token_ids = data.draw(st.lists(st.integers(0, vocab_size + 2), max_size=30))
    assert_streams_like_decode(tiny, Detokenizers(tiny), token_ids, data.draw(st.booleans()))


# "<0xE2>" is id 3 + 0xE2: many valid and invalid runs of bytes.
@given(values=st.lists(st.sampled_from([0xE2, 0x82, 0xAC, 0x41, 0xFF, 0xF0, 0x9F, 0x91, 0x8D, 300, 301, 1, 0])))
@settings(max_examples=examples(300), deadline=None)
def test_runs_of_byte_tokens(tmp_path_factory, values) -> None:
    tokenizer = _sentencepiece(tmp_path_factory)
    assert_streams_like_decode(tokenizer, Detokenizers(tokenizer), [3 + value for value in values], False)


_cache: list[LoadedTokenizer] = []


def _sentencepiece(tmp_path_factory) -> LoadedTokenizer:
    if not _cache:
        _cache.append(load_tokenizer(tiny_tokenizers.save_sentencepiece(tmp_path_factory.mktemp("spm"))))
    return _cache[0]


@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(
    "chain",
    [
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("he", "HE"), decoders.Replace("Ell", "*")]),
        decoders.Metaspace(prepend_scheme="never"),
    ],
    ids=["strip-2", "replace-after-fuse", "two-replaces", "metaspace-never"],
)
def test_other_decoder_chains(tmp_path: Path, chain, skip) -> None:
    tokenizer = load_tokenizer(tiny_tokenizers.save_sentencepiece(tmp_path))
    tokenizer.backend.decoder = chain
    detokenizers = Detokenizers(tokenizer)
    for text in [*TEXTS, "hello hell shell hhe"]:
        token_ids = tokenizer.encode(text, add_special_tokens=True)
        assert_streams_like_decode(tokenizer, detokenizers, token_ids, skip)


def test_a_decoder_that_cannot_be_streamed_is_refused_by_name(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizers.save_sentencepiece(tmp_path))
    tokenizer.backend.decoder = decoders.CTC()
    with pytest.raises(UnsupportedDecoderError, match="CTC"):
        Detokenizers(tokenizer)


def test_bytes_of_single_tokens(smollm2, detokenizers, tmp_path: Path) -> None:
    """A token's bytes are its own, even where they are no text; together they are the text's bytes."""
    for text in TEXTS:
        token_ids = smollm2.encode(text, add_special_tokens=False)
        assert b"".join(map(detokenizers.token_bytes, token_ids)) == text.encode()
    spm = Detokenizers(load_tokenizer(tiny_tokenizers.save_sentencepiece(tmp_path)))
    assert [spm.token_bytes(token_id) for token_id in (1, 3 + 0xE2, 99_999)] == [b"<s>", b"\xe2", b""]
