"""The log probabilities that a server gives of prompts are those that its model computes in process."""

import asyncio
from pathlib import Path

import pytest
import torch

from benchmarks.fidelity import distance, load, scores, served
from tests.e2e.line import Line

LENGTH = 40


async def test_as_in_process(quick_line: Line, quick_model: Path) -> None:
    windows = torch.randint(49152, (3, LENGTH), generator=torch.Generator().manual_seed(0))
    found = await asyncio.to_thread(served, quick_line.base_url, windows)
    expected = scores(load(quick_model, "float32", LENGTH, None), windows, 1, LENGTH)
    assert distance(found, expected) == pytest.approx((0.0, 0.0, 1.0), abs=1e-4)


async def test_refusals_are_told(quick_line: Line) -> None:
    with pytest.raises(SystemExit, match=r"/v1/completions: HTTP Error 400.*1,?000"):
        await asyncio.to_thread(served, quick_line.base_url, torch.zeros(1, 1000, dtype=torch.long))
