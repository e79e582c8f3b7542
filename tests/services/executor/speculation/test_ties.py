"""Drafts in 16 bits may turn a near tie: by no more than what 16 bits cost anyway."""

from pathlib import Path

import pytest
import torch

from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.executor.loading.loader import load_model
from tests.services.executor.speculation.ties import PROMPTS, Compared, Texts, compare


@pytest.mark.slow
def test_drafts_change_logits_by_less_than_16_bits_do(smollm2_gguf: Path) -> None:
    tokenizer = load_tokenizer(smollm2_gguf)
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS[:2]]

    def texts(dtype: str) -> Texts:
        model = load_model(smollm2_gguf, dtype=dtype, device=torch.device("cpu"), quantization="none")
        return Texts(model, 24, max(map(len, prompts)))

    own, exact = texts("bfloat16"), texts("float32")
    plain = own.generate(prompts)
    exact.outputs = own.outputs
    rounding = compare(plain, exact.again(prompts, 1, 7))
    assert len(rounding.changes) > 30 and 0.01 < max(rounding.changes) < 2
    for num_drafts in (3, 7):
        drafted = compare(plain, own.again(prompts, 1, num_drafts))
        assert len(drafted.changes) > 30
        assert max(drafted.changes) < 2 * max(rounding.changes)
        assert max(drafted.gaps, default=0) < 2 * max(rounding.changes), "only what was near a tie has turned"


def test_what_has_changed_places_is_found() -> None:
    before, after = torch.tensor([1.0, 3.0, 2.5]), torch.tensor([1.0, 2.75, 3.0])
    assert compare([{4: before, 5: before}], [{4: after, 6: after}]) == Compared(gaps=[0.5], changes=[0.75])
    assert compare([{0: before}], [{0: before}]) == Compared(gaps=[], changes=[0.0])
