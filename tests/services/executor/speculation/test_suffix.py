"""Suffixes as drafts: what followed most often, here or in outputs of others of the same domain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.speculation.suffix import RecentOutputs, SuffixProposer
from tests.services.executor.helpers.stepping import PENALIZED, SEEDED, Driver, alone, make_driver, prompt, tiny_llama
from tests.sweep import examples


def make(max_draft_tokens: int = 4, max_requests: int = 10, factor: float = 4.0) -> SuffixProposer:
    return SuffixProposer(max_draft_tokens, max_depth=8, max_requests=max_requests, factor=factor, min_probability=0.1)


def test_what_is_kept_is_bounded() -> None:
    recent = RecentOutputs(max_requests=3, max_tokens=20)
    for first in range(0, 100, 10):
        recent.add([first, first + 1])
    assert recent.tokens.tolist() == [70, 71, -1, 80, 81, -1, 90, 91, -1]
    recent.add(list(range(100, 115)))
    assert recent.tokens.tolist() == [90, 91, -1, *range(100, 115), -1]
    recent.add(list(range(50)))
    assert recent.tokens.tolist() == [*range(31, 50), -1]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


def enter(driver: Driver, request_id: int, domain: int) -> None:
    driver.add(request_id, prompt(9, 1))
    driver._new[-1] = replace(driver._new[-1], draft_domain=domain)
    driver.step({request_id: 9})


@pytest.mark.parametrize(("domain", "is_found"), [(7, True), (8, False)], ids=["same domain", "another domain"])
def test_outputs_are_drafted_for_others_of_their_domain_only(model: DecoderModel, domain: int, is_found: bool) -> None:
    expected = alone(model, prompt(9, 1), 24)
    driver = make_driver(model, proposer=make())
    enter(driver, 0, 7)
    for _ in range(24):
        driver.step({0: 1})
    driver.finish(0)
    driver.launch({})  # only frees the row
    enter(driver, 1, domain)
    num_steps = 1
    while len(driver.tokens[1]) < 16:
        driver.step({1: 5}, {1: 4})
        num_steps += 1
    assert driver.tokens[1][:16] == expected[:16]
    assert (num_steps < 10) == is_found, num_steps


@given(st.integers(0, 2**32), st.integers(2, 12), st.integers(1, 3))
@settings(max_examples=examples(10), deadline=None)
def test_texts_equal_plain_decoding(model: DecoderModel, seed: int, num_kinds: int, depth: int) -> None:
    """Requests follow each other, with prompts of few kinds of tokens; up to `depth` steps are in flight."""
    rng = np.random.default_rng(seed)
    driver = make_driver(model, proposer=make())
    for request_id in range(4):
        token_ids = rng.integers(3, 3 + num_kinds, int(rng.integers(1, 30))).tolist()
        options = [{}, {"sampling": SEEDED}, {"sampling": PENALIZED}, {}][request_id]
        driver.add(request_id, token_ids, **options)  # type: ignore[arg-type]
        outputs = [driver.launch({request_id: len(token_ids)})]
        for _ in range(6):
            count = int(rng.integers(0, 5))
            outputs.append(driver.launch({request_id: 1 + count}, {request_id: count}))
            while len(outputs) >= depth:
                driver.collect(outputs.pop(0))
        for output in outputs:
            driver.collect(output)
        tokens = driver.tokens[request_id]
        assert tokens == alone(model, token_ids, len(tokens), **options)[: len(tokens)]  # type: ignore[arg-type]
        driver.finish(request_id)
