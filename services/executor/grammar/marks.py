"""Marks in text that are single tokens: expressions for one of them, and for all others."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence

Piece = str | int  # text, or a token


class Marks:
    """The marks of a vocabulary."""

    def __init__(self, token_ids: Mapping[str, int], eos_token_ids: Collection[int]) -> None:
        """token_ids: the tokens that are not made of text, by their names."""
        self._token_ids = dict(token_ids)
        self._names = {token_id: name for name, token_id in token_ids.items()}
        self._eos = frozenset(eos_token_ids)
        longest_first = sorted(filter(None, token_ids), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if longest_first else None

    def split(self, text: str) -> list[Piece]:
        """Marks and the texts between them; at least one piece, which may be an empty text."""
        pieces: list[Piece] = []
        at = 0
        for mark in self._pattern.finditer(text) if self._pattern is not None else ():
            if mark.start() > at:
                pieces.append(text[at : mark.start()])
            pieces.append(self._token_ids[mark[0]])
            at = mark.end()
        return [*pieces, text[at:]] if at < len(text) or not pieces else pieces

    def before_end(self, text: str) -> str:
        """Returns the text without trailing end tokens: a grammar is complete where they may follow."""
        *_, last = self.split(text)
        while isinstance(last, int) and last in self._eos:
            text = text.removesuffix(self._names[last])
            *_, last = self.split(text)
        return text

    def written(self, pieces: Sequence[Piece], *, by_token: bool = False) -> str:
        """Returns the pieces as an expression. by_token: the first mark is the token itself."""
        parts = []
        for piece in pieces:
            if isinstance(piece, int):
                parts.append(f"<[{piece}]>" if by_token else f"(<[{piece}]> | {json.dumps(self._names[piece])})")
                by_token = False
            elif piece:
                parts.append(json.dumps(piece))
        return " ".join(parts) or '""'

    def besides(self, texts: Iterable[str]) -> str:
        """Returns an expression for any mark that is in none of the texts and ends nothing; "" if there is none."""
        within = {piece for text in texts for piece in self.split(text) if isinstance(piece, int)}
        others = sorted(set(self._names) - within - self._eos)
        return f"<[{','.join(map(str, others))}]>" if others else ""
