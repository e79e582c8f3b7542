"""The text of an output continues that of its prompt, however its tokens arrive."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.tokenizer.output.detokenizer import Detokenizers
from pagewire.services.tokenizer.output.text_stream import OutputOptions, TextStream
from pagewire.services.tokenizer.record import Unrecorded
from pagewire.v1 import common_pb2
from tests.services.tokenizer import tiny_tokenizers
from tests.sweep import examples

KINDS = [
    tiny_tokenizers.save_byte_level,
    tiny_tokenizers.save_sentencepiece,
    tiny_tokenizers.save_unigram,
    tiny_tokenizers.save_word_level,
    tiny_tokenizers.save_word_pieces,
]
LENGTH = common_pb2.FINISH_REASON_LENGTH


@pytest.fixture(scope="module", params=KINDS, ids=lambda save: save.__name__)
def tiny(request, tmp_path_factory) -> LoadedTokenizer:
    return load_tokenizer(request.param(tmp_path_factory.mktemp("tiny")))


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> LoadedTokenizer:
    return load_tokenizer(tiny_tokenizers.save_sentencepiece(tmp_path_factory.mktemp("llama")))


class Output:
    """Collects what a client receives of an output."""

    def __init__(self, tokenizer: LoadedTokenizer, prompt: list[int], **options: object) -> None:
        self.said: list = []
        args = (OutputOptions(**options), prompt, self.said.append, Unrecorded(), None, None, "text")
        self.stream = TextStream(Detokenizers(tokenizer), *args)

    def take(self, *chunks: list[int], logprobs: bool = False) -> "Output":
        for index, chunk in enumerate(chunks):
            columns = common_pb2.Logprobs(entries_per_token=1, token_ids=chunk, logprobs=[-1.0] * len(chunk))
            reason = LENGTH if index == len(chunks) - 1 else common_pb2.FINISH_REASON_UNSPECIFIED
            self.stream.on_tokens(chunk, reason, 0, None, columns if logprobs else None)
            if self.stream.finished:
                break
        return self

    @property
    def text(self) -> str:
        return "".join(one.text for one in self.said)

    @property
    def logprobs(self) -> list:
        return [token for one in self.said for token in one.logprobs]


def sequences(tokenizer: LoadedTokenizer, *, others: bool = True) -> st.SearchStrategy[list[int]]:
    """Returns tokens of pieces of text; others: between tokens of any kind."""
    tokens = st.integers(0, tokenizer.backend.get_vocab_size() + 2).map(lambda token_id: [token_id])
    texts = st.sampled_from([word for text in tiny_tokenizers.CORPUS[:3] for word in text.split(" ")])
    pieces = texts.map(lambda text: tokenizer.encode(text, add_special_tokens=False)).filter(bool)
    parts = st.lists(st.one_of(pieces, tokens) if others else pieces, min_size=1, max_size=8)
    return parts.map(lambda lists: [token_id for one in lists for token_id in one])


@given(data=st.data())
@settings(max_examples=examples(200), deadline=None)
def test_an_output_is_what_its_tokens_add_to_the_prompts_text(tiny, data) -> None:
    """Chunks of any size, and a request that is resumed after any of its tokens."""
    prompt, output = data.draw(sequences(tiny)), data.draw(sequences(tiny))
    skip = data.draw(st.booleans())
    before = tiny.decode(prompt, skip_special_tokens=skip)
    whole = tiny.decode(prompt + output, skip_special_tokens=skip)
    # Bytes at the end of the prompt may be text only with those that follow.
    assume(whole.startswith(before) and not before.endswith("\ufffd"))
    options = {"skip_special_tokens": skip, "stop": ("never said",)}
    cuts = [0, *sorted(data.draw(st.lists(st.integers(0, len(output)), max_size=5))), len(output)]
    chunks = [output[start:end] for start, end in pairwise(cuts)]
    assert before + Output(tiny, prompt, **options).take(*chunks).text == whole

    cut = data.draw(st.integers(0, len(output)))
    first, second = Output(tiny, prompt, **options), Output(tiny, prompt, **options)
    if cut:
        first.take(output[:cut], [])
        first.said.pop()  # the service dies before the end
    second.stream.replay(output[:cut])
    assert before + first.text + second.take(output[cut:]).text == whole


def _ids(tokenizer: LoadedTokenizer, *tokens: str) -> list[int]:
    return [tokenizer.backend.token_to_id(token) for token in tokens]


CASES = [
    (tiny_tokenizers.save_sentencepiece, ["<s>", "▁", "he"], ["▁t"], " t"),
    (tiny_tokenizers.save_sentencepiece, ["<s>", "▁", "he"], ["▁", "▁t"], "  t"),
    (tiny_tokenizers.save_sentencepiece, ["<s>"], ["▁t", "he"], "the"),
    (tiny_tokenizers.save_sentencepiece, ["<0x41>"], ["▁t"], " t"),
    (tiny_tokenizers.save_sentencepiece, ["he", "<0xC3>"], ["<0xA9>", "▁t"], "é t"),
    (tiny_tokenizers.save_sentencepiece, ["he", "<0xC3>", "<0xA9>"], ["<0xC3>", "<0xA9>"], "é"),
    (tiny_tokenizers.save_byte_level, ["H", "Ã"], ["©"], "é"),
    (tiny_tokenizers.save_unigram, ["▁t"], ["▁t", "h"], " th"),
    (tiny_tokenizers.save_word_pieces, ["[CLS]", "he"], ["is"], " is"),
    (tiny_tokenizers.save_word_pieces, ["[CLS]", "he"], ["##llo", "."], "llo."),
    (tiny_tokenizers.save_word_pieces, ["[CLS]"], ["he"], "he"),
    (tiny_tokenizers.save_word_level, ["hello"], ["world"], " world"),
]


@pytest.mark.parametrize(("save", "prompt", "output", "text"), CASES)
def test_how_an_output_begins(tmp_path: Path, save, prompt, output, text) -> None:
    tokenizer = load_tokenizer(save(tmp_path))
    said = Output(tokenizer, _ids(tokenizer, *prompt)).take(*([token] for token in _ids(tokenizer, *output)))
    assert said.text == text


def test_a_long_prompt_ends_within_a_character(llama) -> None:
    prompt = _ids(llama, "▁", "he", *["<0xC3>", "<0xA9>", "t"] * 50, "<0xF0>", "<0x9F>", "<0x91>")
    assert Output(llama, prompt).take(_ids(llama, "<0x8D>", "▁t")).text == "👍 t"


def test_a_stop_string_begins_with_the_space_of_the_first_word(llama) -> None:
    prompt = _ids(llama, "<s>", "▁", "he")
    said = Output(llama, prompt, stop=(" the",)).take(_ids(llama, "▁th", "e"), _ids(llama, "l", "l"))
    assert (said.text, said.said[-1].stop_string) == ("", " the")
    assert Output(llama, prompt, stop=("the",)).take(_ids(llama, "▁th", "e")).text == " "


@pytest.mark.parametrize("one_by_one", [False, True])
@pytest.mark.parametrize(
    ("output", "offsets"),
    [
        (["▁t", "<0xC3>", "<0xA9>", "▁t", "he"], [0, 2, 2, 3, 5]),
        (["<0xF0>", "<0x9F>", "<0x91>", "<0x8D>", "<0xC3>", "<0xA9>", "t"], [0, 0, 0, 0, 1, 1, 2]),
        (["<0x41>", "<0x42>", "t", "<0x0A>", "he"], [0, 1, 2, 3, 4]),
        (["t", "<0xFF>", "he", "t"], [0, 1, 2, 4]),
        (["<0xC3>", "</s>", "<0xA9>", "t"], [0, 0, 0, 1]),
    ],
)
def test_tokens_after_bytes_are_where_their_text_is(llama, output, offsets, one_by_one) -> None:
    token_ids = _ids(llama, *output)
    chunks = [[token_id] for token_id in token_ids] if one_by_one else [token_ids]
    said = Output(llama, _ids(llama, "he"), has_logprobs=True).take(*chunks, logprobs=True)
    assert [token.text_offset for token in said.logprobs] == offsets


def test_a_byte_that_continues_nothing_takes_a_place(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(tiny_tokenizers.save_byte_level(tmp_path))
    said = Output(tokenizer, [1], has_logprobs=True).take(_ids(tokenizer, "Ã", "t", "Ã", "©", "t"), logprobs=True)
    assert said.text == "\ufffdtét"
    assert [token.text_offset for token in said.logprobs] == [0, 1, 2, 2, 3]


@given(data=st.data())
@settings(max_examples=examples(100), deadline=None)
def test_the_tokens_of_logprobs_make_up_the_text(tiny, data) -> None:
    """The bytes of tokens are the text's, and each offset is where the text of the tokens before it ends."""
    prompt, output = tiny.encode("hello", add_special_tokens=False), data.draw(sequences(tiny, others=False))
    said = Output(tiny, prompt, has_logprobs=True, skip_special_tokens=False).take(output, logprobs=True)
    assert b"".join(token.token_bytes for token in said.logprobs) == said.text.encode()
    place = 0
    for token in said.logprobs:
        assert token.text_offset == len(said.text.encode()[:place].decode("utf-8", "ignore"))
        place += len(token.token_bytes)
