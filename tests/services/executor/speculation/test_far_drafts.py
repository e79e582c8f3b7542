"""Drafting where the host may not look at what is drafted, as on a GPU: with C++ kernels, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.executor.far_memory import far_memory
from tests.services.executor.triton_speculation import METHODS, generate


@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_read_and_drafts_are_the_same(tmp_path: Path, method: str) -> None:
    """With two steps in flight: what the first gains decides on the device where the second drafts."""
    tokens, drafts = generate(tmp_path, method, depth=1)
    with far_memory():
        far_tokens, far_drafts = generate(tmp_path, method, depth=2)
    for far, near in zip(far_tokens, tokens, strict=True):
        both = min(len(far), len(near))
        assert both > 3 and far[:both] == near[:both]
    if method != "ngram":  # which drafts nothing where it finds nothing, if the host may know it
        assert (far_tokens, far_drafts) == (tokens, drafts)


def test_who_reads_is_caught(tmp_path: Path) -> None:
    """As code for a CPU's memory does: otherwise the test above could not fail."""
    with pytest.raises(AssertionError, match="would wait for the device"):
        generate(tmp_path, "draft_model", depth=2)
