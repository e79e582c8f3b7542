"""Drafts where layers are divided into stages: every stage drafts the same, and texts are those without."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.services.executor.helpers.staged import Staged, joined_runners
from tests.services.executor.helpers.stepping import GREEDY, LIMITS, PENALIZED, SEEDED, WITH_LOGPROBS, Driver, alone
from tests.services.executor.models.tiny import load, save_tiny
from tests.services.executor.speculation.test_exactness import Follower, _made, ngrams, suffixes

SIZES: dict[str, Any] = {
    "vocab_size": 200,
    "max_position_embeddings": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
}
NUM_TOKENS = 16
TEXT = [5, 9, 11, 5, 9, 12, 30, 5, 9]  # much of it twice
SAMPLINGS = [GREEDY, SEEDED, PENALIZED, WITH_LOGPROBS]


def generate_in_turns(driver: Driver, stages: int) -> list[list[int]]:
    """A request or two in each cohort, with a step more in flight than there are stages. Some steps have no drafts, and
    requests that are done leave while steps are under way; others take their rows."""
    rng = np.random.default_rng(3)
    waiting, in_flight, last = list(range(3 * stages)), list[Any](), dict[int, int]()
    running: list[int] = []
    while waiting or running or in_flight:
        for request_id in [one for one in running if len(driver.tokens[one]) >= NUM_TOKENS]:
            running.remove(request_id)
            driver.finish(request_id)
        turn = driver._step_id
        able = [one for one in running if turn - last[one] >= stages or not in_flight]
        scheduled = {one: 1 + int(rng.integers(0, 5)) for one in able[:2]}
        drafts = {one: count - 1 for one, count in scheduled.items()}
        if waiting and len(running) < 2 * stages:
            one = waiting.pop(0)
            driver.add(one, TEXT[one % 3 :], SAMPLINGS[one % 4])
            running.append(one)
            scheduled[one] = len(TEXT[one % 3 :])
        if scheduled:
            in_flight.append(driver.launch(scheduled, drafts))
            last |= dict.fromkeys(scheduled, turn)
        if in_flight and (len(in_flight) > stages or not scheduled):
            driver.collect(in_flight.pop(0))
    return [driver.tokens[one][:NUM_TOKENS] for one in sorted(driver.tokens)]


@pytest.mark.parametrize("make", [ngrams, suffixes])
@pytest.mark.parametrize(("tensor", "stages"), [(1, 2), (1, 3), (2, 2)])
@pytest.mark.few("1-3-ngrams", "2-2-suffixes")
def test_texts_equal_plain_decoding(tmp_path: Path, tensor: int, stages: int, make: Any) -> None:
    save_tiny(tmp_path, "Qwen3", **SIZES, head_dim=8, tie_word_embeddings=True)
    whole = load(tmp_path)
    runners = joined_runners(
        lambda group: load(tmp_path, tensor=group.tensor, stage=group.stage),
        tensor,
        stages,
        LIMITS,
        64,
        partial(_made, make),
        4,
    )
    staged: Any = Staged([*map(Follower, runners[:-1]), runners[-1]])  # type: ignore[list-item]
    texts = generate_in_turns(Driver(staged, 64), stages)
    staged.stop()
    for one, tokens in enumerate(texts):
        assert tokens == alone(whole, TEXT[one % 3 :], NUM_TOKENS, SAMPLINGS[one % 4])
