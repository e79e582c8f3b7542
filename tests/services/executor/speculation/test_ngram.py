"""N-grams as drafts: found where they are, and whatever is found, the text is that of plain decoding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.speculation.ngram import NgramProposer
from tests.services.executor.helpers.stepping import (
    PENALIZED,
    SEEDED,
    WITH_LOGPROBS,
    alone,
    make_driver,
    prompt,
    tiny_llama,
)
from tests.sweep import examples


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


def test_a_text_that_repeats_itself_gains_tokens_and_one_that_does_not_costs_none(model: DecoderModel) -> None:
    """The prompt has the output that greedy decoding gives it: a second run of it finds all of that."""
    first = prompt(8, 3)
    output = alone(model, first, 24)
    driver = make_driver(model, proposer=NgramProposer(3, 4, 4))
    driver.add(0, first + output[:4])
    host = driver.step({0: 12})
    assert host.num_drafted is None
    host = driver.step({0: 4}, {0: 3})
    assert host.num_drafted is None and host.num_tokens.tolist() == [1], "nothing was found: a step of one token"
    assert driver.tokens[0] == output[4:6]


@given(st.integers(0, 2**32), st.integers(2, 12), st.integers(1, 3))
@settings(max_examples=examples(15), deadline=None)
def test_texts_equal_plain_decoding(model: DecoderModel, seed: int, num_kinds: int, depth: int) -> None:
    """Prompts of few kinds of tokens have much to be found. Up to `depth` steps are in flight."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, 3 + num_kinds, int(rng.integers(1, 30))).tolist() for _ in range(4)]
    samplings = [None, SEEDED, PENALIZED, WITH_LOGPROBS]
    driver = make_driver(model, proposer=NgramProposer(4, 3, 1))
    options = [{} if sampling is None else {"sampling": sampling} for sampling in samplings]
    for index, token_ids in enumerate(prompts):
        driver.add(index, token_ids, **options[index])  # type: ignore[arg-type]
    outputs = [driver.launch({index: len(token_ids) for index, token_ids in enumerate(prompts)})]
    num_drafted = 0
    for _ in range(8):
        drafts = {index: int(rng.integers(0, 5)) for index in range(4) if rng.random() < 0.9}
        if drafts:
            outputs.append(driver.launch({index: 1 + count for index, count in drafts.items()}, drafts))
        while len(outputs) >= depth:
            host = driver.collect(outputs.pop(0))
            num_drafted += 0 if host.num_drafted is None else int(host.num_drafted.sum())
    for output in outputs:
        driver.collect(output)
    for index, token_ids in enumerate(prompts):
        tokens = driver.tokens[index]
        assert tokens == alone(model, token_ids, max(1, len(tokens)), **options[index])[: len(tokens)]  # type: ignore[arg-type]
