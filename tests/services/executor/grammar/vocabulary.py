"""A vocabulary of every byte, and of marks that are tokens of their own."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.executor.grammar.compiler import Compiler
from pagewire.v1.common_pb2 import Grammar
from tests.services.executor.helpers.constrained import EOS
from tests.services.tokenizer.tiny_tokenizers import save_byte_level


@dataclass(frozen=True)
class Vocabulary:
    compiler: Compiler
    tokenizer: LoadedTokenizer
    marks: Sequence[int]

    def admits(self, format: Any, text: str, *, by_letter: bool = False) -> bool:
        """Returns whether the text is a whole output. by_letter: no token is longer, so marks are no tokens."""
        return self.admits_tag({"type": "structural_tag", "format": format}, text, by_letter=by_letter)

    def admits_tag(self, tag: Any, text: str, *, by_letter: bool = False) -> bool:
        matcher = self.compiler.compile(Grammar(structural_tag=json.dumps(tag)))
        pieces = [*text] if by_letter else [text]
        token_ids = [id for piece in pieces for id in self.tokenizer.encode(piece, add_special_tokens=False)]
        return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()

    def any_output(self, format: Any, begin: str, choose: random.Random, max_tokens: int = 200) -> str | None:
        """Returns a random output after `begin` that prefers marks; None if it does not end soon."""
        tag = {"type": "structural_tag", "format": format}
        matcher = self.compiler.compile(Grammar(structural_tag=json.dumps(tag)))
        mask = np.empty(-(-self.tokenizer.backend.get_vocab_size() // 32), dtype=np.int32)
        output = self.tokenizer.encode(begin, add_special_tokens=False)
        assert matcher.consume_tokens(output)
        while len(output) < max_tokens:
            matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
            marks = [token_id for token_id in allowed if token_id in self.marks]
            if EOS in allowed and (len(allowed) == 1 or choose.random() < 0.1):
                return self.tokenizer.decode(output, skip_special_tokens=False)
            token_id = choose.choice(marks if marks and choose.random() < 0.4 else allowed)
            output.append(token_id)
            assert matcher.consume_token(token_id)
        return None


def vocabulary_with(path: Path, marks: Sequence[str], ends: Sequence[str] = ()) -> Vocabulary:
    """Returns a vocabulary with these marks. ends: marks that end the output."""
    save_byte_level(path, extra_special_tokens=list(marks))
    (path / "config.json").write_text("{}")
    tokenizer = load_tokenizer(path)
    vocabulary = tokenizer.backend.get_vocab()
    id_of = {mark: vocabulary[mark] for mark in marks}
    compiler = Compiler(path, len(vocabulary), [EOS, *(id_of[mark] for mark in ends)])
    return Vocabulary(compiler, tokenizer, [id_of[mark] for mark in marks if mark not in ends])
