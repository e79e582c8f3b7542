"""The real all-MiniLM-L6-v2: our tokens and vectors are those that sentence-transformers computes.

Its steps, by transformers: the tokens of its tokenizer, up to 256; the mean of the states; length 1.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModel, AutoTokenizer

from pagewire.services.tokenizer.pool.codec import Codec
from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.pool.input_encoding import Cuts
from tests.services.executor.runner.test_pooling import start, vectors

TEXTS = [
    "This is an example sentence.",
    "",
    " \n\t ",
    "?",
    "Der schnelle braune Fuchs springt über den faulen Hund – déjà vu, naïve façade!",
    "北京是中国的首都。東京は日本の首都です。서울은 대한민국의 수도이다.",
    "Москва — столица России; Αθήνα είναι η πρωτεύουσα; عاصمة مصر هي القاهرة; दिल्ली",
    "👍🏽 emoji \u200b and \ufffd odd \x00 characters supercalifragilisticexpialidocious",
    "def f(x):\n    return x**2  # code",
    "word " * 100,
    "A long text is cut where the model ends. " * 60,
]


@torch.inference_mode()
def test_vectors_are_those_of_sentence_transformers(minilm: Path) -> None:
    tokenizer, reference = AutoTokenizer.from_pretrained(minilm), AutoModel.from_pretrained(minilm, dtype=torch.float32)
    codec = Codec(FileSource(str(minilm)))
    encoded = codec.encode_inputs([(text, None) for text in TEXTS], add_special_tokens=True, cuts=Cuts(256))
    runner, info = start(minilm)
    assert (info.max_model_len, info.vector_size) == (256, 384)
    expected = []
    for text, (token_ids, _) in zip(TEXTS, encoded, strict=True):
        inputs = tokenizer(text, truncation=True, max_length=256, return_tensors="pt")
        assert inputs["input_ids"][0].tolist() == token_ids
        expected.append(functional.normalize(reference(**inputs).last_hidden_state[0].mean(0), dim=-1))
    found = [vectors(runner, [token_ids for token_ids, _ in encoded[i : i + 4]]) for i in range(0, len(TEXTS), 4)]
    torch.testing.assert_close(torch.cat(found), torch.stack(expected), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", ["bfloat16"])
def test_vectors_in_sixteen_bits_point_the_same_way(minilm: Path, dtype: str) -> None:
    codec = Codec(FileSource(str(minilm)))
    encoded = codec.encode_inputs([(text, None) for text in TEXTS[4:8]], add_special_tokens=True, cuts=Cuts(256))
    token_ids = [ids for ids, _ in encoded]
    exact, rounded = (vectors(start(minilm, dtype=name)[0], token_ids) for name in ("float32", dtype))
    assert (exact * rounded).sum(-1).min() > 0.998
