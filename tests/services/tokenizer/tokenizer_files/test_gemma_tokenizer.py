"""Gemma 3's own vocabulary against SentencePiece's algorithm, written down here as its paper and code describe it."""

from __future__ import annotations

import heapq
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pagewire.files.gguf import read_metadata
from pagewire.files.tokenizer_files.gguf_tokenizer import build_gguf_tokenizer
from pagewire.files.tokenizer_files.gguf_vocabulary import TokenType
from tests.services.tokenizer.texts import SPACES_BEFORE_DIGITS, TEXTS
from tests.sweep import examples

SPACE = "▁"
SPACES = [" " * count for count in (2, 3, 31, 32, 33, 64, 100)] + ["a  b   c", "▁▁ literal ▁", "\t" * 40, "\n" * 70]
# Several merges make the same piece.
PERIODIC = ["ha" * 20, "abab" * 9, "-=" * 33, "aabaab" * 5, "…" * 17, "哈哈哈哈哈哈哈", "0" * 50]


class SentencePiece:
    """BPE by scores: user-defined pieces first, then of all neighbours that make a piece the best, leftmost, joins."""

    def __init__(self, metadata: dict[str, Any]) -> None:
        tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
        scores = metadata["tokenizer.ggml.scores"]
        spelled = [token.replace(" ", SPACE) for token in tokens]
        self.ids = {token: i for i, token in enumerate(spelled)}
        self.scores = {token: score for token, score, type_ in zip(spelled, scores, types, strict=True) if type_ == 1}
        defined = [t for t, type_ in zip(spelled, types, strict=True) if type_ == TokenType.USER_DEFINED]
        self.defined = re.compile("|".join(map(re.escape, sorted(defined, key=len, reverse=True))))

    def encode(self, text: str) -> list[int]:
        text, ids, start = text.replace(" ", SPACE), [], 0
        for match in self.defined.finditer(text):
            ids += [*self.merge(text[start : match.start()]), self.ids[match[0]]]
            start = match.end()
        return ids + self.merge(text[start:])

    def merge(self, text: str) -> list[int]:
        pieces: list[str] = list(text)  # at the index where each begins; "" where one was joined to its left neighbour
        candidates: list[tuple[float, int, str, int]] = []

        def consider(left: int) -> None:
            right = left + len(pieces[left])
            if right < len(pieces) and (joined := pieces[left] + pieces[right]) in self.scores:
                heapq.heappush(candidates, (-self.scores[joined], left, joined, right))

        for index in range(len(pieces)):
            consider(index)
        while candidates:
            _, left, joined, right = heapq.heappop(candidates)
            if pieces[left] + pieces[right] != joined or left + len(pieces[left]) != right:
                continue  # one of both has been joined to another since
            pieces[left], pieces[right] = joined, ""
            consider(left)
            before = next((index for index in range(left - 1, -1, -1) if pieces[index]), None)
            if before is not None:
                consider(before)
        return [token_id for piece in pieces if piece for token_id in self.piece_ids(piece)]

    def piece_ids(self, piece: str) -> list[int]:
        if piece in self.scores:
            return [self.ids[piece]]
        return [self.ids[f"<0x{byte:02X}>"] for byte in piece.encode()]


@pytest.fixture(scope="module")
def gemma(gemma3_gguf: Path) -> tuple[Tokenizer, SentencePiece]:
    metadata = read_metadata(gemma3_gguf)
    return build_gguf_tokenizer(metadata)[0], SentencePiece(metadata)


def ids(tokenizer: Tokenizer, text: str) -> list[int]:
    encoded: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return encoded


@pytest.mark.parametrize("texts", [TEXTS, SPACES_BEFORE_DIGITS, SPACES, PERIODIC], ids=["", "digits", "spaces", "runs"])
def test_texts(gemma: tuple[Tokenizer, SentencePiece], texts: list[str]) -> None:
    tokenizer, reference = gemma
    for text in texts:
        encoded = ids(tokenizer, text)
        assert encoded == reference.encode(text), text
        assert tokenizer.decode(encoded, skip_special_tokens=False) == text.replace(SPACE, " ")


@settings(max_examples=examples(300), deadline=None)
@given(st.one_of(st.text(max_size=60), st.text("ab \n\t<div>/=-▁", max_size=80), st.text("eθя界 👍", max_size=60)))
def test_any_text(gemma: tuple[Tokenizer, SentencePiece], text: str) -> None:
    tokenizer, reference = gemma
    assert ids(tokenizer, text) == reference.encode(text)


def test_every_id_is_of_the_models_vocabulary(gemma: tuple[Tokenizer, SentencePiece]) -> None:
    tokenizer, _ = gemma
    assert tokenizer.get_vocab_size() == 262144
    assert ids(tokenizer, "a   b") == [236746, 139, 236763]
    assert ids(tokenizer, "<start_of_turn>user\n")[0] == 105
