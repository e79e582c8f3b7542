"""The sampler behind its parameters: what each one does to the next token, and that a token depends on nothing else.

Distributions, truncation and noise are the ops' (`tests/kernels/cpu/test_sampling.py`).
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.config.sampling_params import PARAMETERS
from pagewire.services.executor.sampling.logprobs import LogprobsMode, LogprobsTensors
from pagewire.services.executor.sampling.row_columns import RowColumns
from pagewire.services.executor.sampling.sampler import SampledTokens, SamplingExtras, sample
from pagewire.services.executor.sampling.sampling_state import SamplingState, column_values
from pagewire.services.executor.step.step import InvalidStep
from pagewire.v1.common_pb2 import SamplingParams, TokenSequence
from tests.makers.sampling_values import a_value
from tests.services.executor.helpers.stepping import CPU, sampling_params
from tests.sweep import examples

EOS = (2, 5)
STALE_TOKEN = 7
NOT_SAMPLED_BY = dict.fromkeys(("position_delta", "second_text_start"), 0)  # columns that no token depends on


def random_logits(num_rows: int, vocab_size: int = 300, *, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * scale


def sample_rows(
    logits: torch.Tensor,
    params: list[SamplingParams],
    known: list[list[int]] | None = None,
    num_prompt: list[int] | None = None,
    logprobs_mode: LogprobsMode = LogprobsMode.RAW_LOGPROBS,
) -> SampledTokens:
    """Samples one token per row of logits, as the model runner does, for rows with the given known tokens."""
    known = known or [[1]] * len(params)
    num_rows, vocab_size = logits.shape
    num_prompt = num_prompt or [len(tokens) for tokens in known]
    state, columns = SamplingState(num_rows, vocab_size, EOS), RowColumns(num_rows, CPU)
    # What lies behind a row's end must not matter.
    token_ids = torch.full((num_rows, 64), STALE_TOKEN, dtype=torch.int32)
    values = []
    for row, (row_params, tokens) in enumerate(zip(params, known, strict=True)):
        state.fill(row, row_params, num_prompt[row])
        counts = {"num_tokens": len(tokens), "num_computed_tokens": 0, "num_prompt_tokens": num_prompt[row]}
        values.append(NOT_SAMPLED_BY | counts | column_values(row_params, vocab_size))
        token_ids[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
    rows, num_tokens = np.arange(num_rows), np.array([len(tokens) for tokens in known])
    columns.fill(rows, values)
    extras = state.prepare(rows, num_tokens, CPU) or SamplingExtras()
    batch_rows = torch.arange(num_rows, dtype=torch.int32)
    sampled = sample(logits, batch_rows, columns, token_ids, extras, logprobs_mode=logprobs_mode)
    assert token_ids[rows, num_tokens].tolist() == sampled.token_ids.tolist(), "the token is appended to its row"
    assert columns.num_tokens.tolist() == (num_tokens + 1).tolist()
    return sampled


def greedy(logits: torch.Tensor, params: SamplingParams, known: list[int], num_prompt: int) -> int:
    return int(sample_rows(logits, [params], [known], [num_prompt]).token_ids[0])


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


# Parameters to columns


def test_every_parameter_with_a_column_reaches_its_row():
    """Names no parameter here: all of the table are there for kernels to read."""
    params = sampling_params(**{parameter.name: a_value(parameter) for parameter in PARAMETERS})
    columns = RowColumns(3, CPU)
    counts = NOT_SAMPLED_BY | {"num_tokens": 5, "num_computed_tokens": 1, "num_prompt_tokens": 4}
    columns.fill(np.array([2, 0]), [counts | column_values(each, 300) for each in (params, sampling_params(seed=9))])
    for parameter in PARAMETERS:
        if parameter.column is not None:
            column, default = getattr(columns, parameter.name), 9 if parameter.default is None else parameter.default
            assert column.dtype == {int: torch.int64, float: torch.float32}[parameter.type]
            assert column.tolist() == [parameter.column(default, 300), 0, a_value(parameter)], parameter.name
    assert columns.num_prompt_tokens.tolist() == [4, 0, 4]


def test_kernels_know_every_parameter_with_a_column_of_floats():
    floats = {one.name for one in PARAMETERS if one.column is not None and one.type is float}
    assert floats == set(RowColumns.FLOATS), "see kernels/sampling_parameters.py"


@pytest.mark.parametrize(("top_k", "num_kept"), [(0, 300), (-1, 300), (7, 7), (300, 300), (301, 300)])
def test_top_k_that_is_off_keeps_all_tokens(top_k: int, num_kept: int):
    assert column_values(sampling_params(top_k=top_k), 300)["top_k"] == num_kept


# Greedy


def test_greedy_takes_the_highest_logit_and_the_lowest_id_of_a_tie():
    logits = random_logits(3)
    logits[1, [40, 17, 200]] = 50.0
    tokens = sample_rows(logits, [sampling_params(temperature=0)] * 3).token_ids
    assert tokens.tolist() == [logits[0].argmax(), 17, logits[2].argmax()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_are_left_as_they_are(dtype: torch.dtype):
    logits = random_logits(2).to(dtype)
    before = logits.clone()
    params = sampling_params(
        seed=1, top_p=0.5, min_p=0.1, logit_bias=((3, 9.0),), repetition_penalty=1.5, min_tokens=3, logprobs=2
    )
    sample_rows(logits, [params, sampling_params(seed=2, temperature=0.7)])
    assert torch.equal(logits, before)


# Truncation


def test_extreme_truncation_keeps_the_most_probable_token():
    logits = random_logits(4)
    params = [
        sampling_params(seed=1, top_p=1e-9),
        sampling_params(seed=2, top_k=1),
        sampling_params(seed=3, min_p=1.0),
        sampling_params(seed=4, temperature=1e-4),
    ]
    assert torch.equal(sample_rows(logits, params).token_ids, logits.argmax(-1))


def test_top_p_counts_mass_among_what_top_k_left():
    # Probabilities 0.4, 0.3, 0.2, 0.1; of the first two, 0.4 is 57 %.
    logits = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).log()
    for top_p, kept in ((0.55, {0}), (0.6, {0, 1})):
        params = [sampling_params(seed=seed, top_k=2, top_p=top_p) for seed in range(60)]
        assert set(sample_rows(logits.expand(60, -1), params).token_ids.tolist()) == kept


# Noise


def test_noise_belongs_to_the_absolute_position():
    """Wherever the prompt ends: a request that is resubmitted with its output as prompt goes on the same way."""
    logits, known = random_logits(1).expand(3, -1), [[1] * 12, [1] * 12, [1] * 13]
    drawn = [
        sample_rows(logits, [sampling_params(seed=seed, temperature=5.0)] * 3, known, [12, 4, 12]).token_ids.tolist()
        for seed in range(10)
    ]
    assert all(same == also_same for same, also_same, _ in drawn)
    assert any(same != later for same, _, later in drawn)


def test_temperature_flattens_and_sharpens():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for temperature in (0.5, 1.0, 3.0):
        params = [sampling_params(seed=seed, temperature=temperature) for seed in range(4000)]
        tokens = sample_rows(logits.expand(4000, -1), params).token_ids.numpy()
        expected = softmax(logits[0].numpy() / temperature)
        assert np.bincount(tokens, minlength=3) / 4000 == pytest.approx(expected, abs=0.03)


_param_strategy = st.builds(
    sampling_params,
    temperature=st.sampled_from([0.0, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3]),
    top_k=st.sampled_from([0, 1, 40]),
    min_p=st.sampled_from([0.0, 0.05]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (250, -100.0))]),
    min_tokens=st.sampled_from([0, 4]),
    seed=st.integers(-(2**63), 2**63 - 1),
    logprobs=st.sampled_from([None, 0, 3]),
)


@given(st.data(), st.lists(_param_strategy, min_size=1, max_size=6), st.sampled_from([300, 512]))
@settings(max_examples=examples(40), deadline=None)
def test_a_token_does_not_depend_on_the_batch(data: st.DataObject, params: list[SamplingParams], vocab_size: int):
    """Bitwise: alone, together and in any other order."""
    logits = random_logits(len(params), vocab_size, seed=len(params))
    known = [[row + 1, 9, 9, row] for row in range(len(params))]
    together = sample_rows(logits, params, known, [2] * len(params)).token_ids.tolist()
    for row in range(len(params)):
        alone = sample_rows(logits[row : row + 1], [params[row]], [known[row]], [2]).token_ids.tolist()
        assert alone == together[row : row + 1]
    order = data.draw(st.permutations(range(len(params))))
    shuffled = sample_rows(logits[order], [params[i] for i in order], [known[i] for i in order], [2] * len(order))
    assert shuffled.token_ids.tolist() == [together[i] for i in order]


# Bias, min_tokens, penalties


def test_logit_bias_moves_tokens_before_everything_else():
    logits = random_logits(1)
    best = int(logits.argmax())
    assert greedy(logits, sampling_params(temperature=0, logit_bias=((best, -100.0), (11, 100.0))), [1], 1) == 11
    twice = sampling_params(temperature=0, logit_bias=((11, 60.0), (11, 60.0)))
    assert greedy(logits - 100 * torch.nn.functional.one_hot(torch.tensor([11]), 300), twice, [1], 1) == 11


@pytest.mark.parametrize("num_output", [0, 1, 2, 3])
def test_min_tokens_forbids_end_tokens_until_reached(num_output: int):
    logits = random_logits(1)
    logits[0, [2, 5, 80]] = torch.tensor([90.0, 80.0, 70.0])
    params = sampling_params(temperature=0, min_tokens=2, stop_token_ids=(80,))
    without_ends = logits.clone()
    without_ends[0, [2, 5, 80]] = -100.0
    expected = 2 if num_output >= 2 else int(without_ends.argmax())
    assert greedy(logits, params, [1, 1, 1] + [4] * num_output, 3) == expected


def test_min_tokens_leaves_eos_alone_where_it_does_not_end():
    logits = random_logits(1)
    logits[0, [2, 80]] = torch.tensor([80.0, 90.0])
    params = sampling_params(temperature=0, min_tokens=2, ignore_eos=True, stop_token_ids=(80,))
    assert greedy(logits, params, [1], 1) == 2


@pytest.mark.parametrize(
    "penalties",
    [
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.8},
        {"repetition_penalty": 1.2, "presence_penalty": -1.0, "frequency_penalty": 1.9},
    ],
)
def test_penalties_follow_their_definition(penalties: dict[str, Any]):
    """Probed through the whole sampler: penalised logits are read off as log probabilities of the next argmax."""
    vocab_size = 40
    logits = random_logits(1, vocab_size)
    prompt, output = [3, 3, 9, 0], [9, 12, 12, 12, 30]
    expected = logits[0].numpy().astype(np.float64).copy()
    repetition = penalties.get("repetition_penalty", 1.0)
    for token_id in set(prompt + output):
        expected[token_id] *= repetition if expected[token_id] <= 0 else 1 / repetition
    for token_id in set(output):
        expected[token_id] -= penalties.get("presence_penalty", 0.0)
        expected[token_id] -= penalties.get("frequency_penalty", 0.0) * output.count(token_id)
    order = np.argsort(-expected)
    # Peel off the best token by an overwhelming logit bias, again and again: the whole order must agree.
    for taken in range(vocab_size):
        banned = tuple((int(token_id), -1e4) for token_id in order[:taken])
        params = sampling_params(temperature=0, logit_bias=banned, **penalties)
        assert greedy(logits, params, prompt + output, len(prompt)) == order[taken]


def test_penalties_of_one_row_leave_the_others_alone():
    logits = random_logits(3)
    tokens = logits.argmax(-1).tolist()
    params = [
        sampling_params(temperature=0),
        sampling_params(temperature=0, repetition_penalty=50.0),
        sampling_params(temperature=0),
    ]
    sampled = sample_rows(logits, params, [[token] for token in tokens]).token_ids.tolist()
    assert [sampled[0], sampled[2]] == [tokens[0], tokens[2]]
    assert sampled[1] != tokens[1]


def test_what_lies_behind_the_end_of_a_shorter_row_is_not_penalised():
    logits = random_logits(2)
    logits[:, STALE_TOKEN] = 50.0
    params = [sampling_params(temperature=0, repetition_penalty=50.0, presence_penalty=2.0)] * 2
    assert sample_rows(logits, params, [[1, 1], [1] * 9]).token_ids.tolist() == [STALE_TOKEN] * 2
    assert sample_rows(logits, params, [[1, 1], [STALE_TOKEN] * 9]).token_ids[1] != STALE_TOKEN


def test_a_plain_step_has_no_extras():
    state = SamplingState(3, 300, EOS)
    for row, params in enumerate(
        [sampling_params(top_k=3, top_p=0.5), sampling_params(temperature=0), sampling_params(logprobs=1)]
    ):
        state.fill(row, params, 4)
    assert state.prepare(np.array([1, 0]), np.array([4, 4]), CPU) is None
    assert state.prepare(np.array([1, 2]), np.array([4, 4]), CPU) is not None
    state.fill(2, sampling_params(min_tokens=1), 4)
    assert state.prepare(np.array([1, 2]), np.array([4, 4]), CPU) is not None
    assert state.prepare(np.array([1, 2]), np.array([4, 5]), CPU) is None, "long enough"


def words(*sequences: list[int]) -> list[TokenSequence]:
    return [TokenSequence(token_ids=sequence) for sequence in sequences]


def test_only_allowed_tokens_are_sampled():
    logits = random_logits(64).repeat(4, 1)
    allowed = [0, 31, 32, 150, 299]
    mixed = [sampling_params(seed=seed, allowed_token_ids=allowed if seed % 2 else []) for seed in range(len(logits))]
    sampled = sample_rows(logits, mixed).token_ids.tolist()
    assert {*sampled[1::2]} == {*allowed}
    assert (
        sampled[::2] == sample_rows(logits, [sampling_params(seed=seed) for seed in range(256)]).token_ids[::2].tolist()
    )


@pytest.mark.parametrize(
    ("bad", "output", "is_forbidden"),
    [
        ([[9]], [], True),
        ([[9]], [9, 9], True),
        ([[4, 9]], [4], True),
        ([[4, 9]], [], False),  # the prompt ends with 4
        ([[4, 9]], [4, 3], False),
        ([[3, 4, 9]], [3, 4], True),
        ([[3, 4, 9]], [4], False),
        ([[4, 4, 9]], [4], False),
        ([[3, 4, 9], [7]], [5, 3, 4], True),
        ([[1, 2, 3, 4, 5, 6, 9], [8, 9]], [4], False),
        ([[1, 2, 3, 4, 5, 6, 9], [4, 9], [4, 9]], [4], True),
    ],
)
def test_a_bad_word_is_not_completed(bad: list[list[int]], output: list[int], is_forbidden: bool):
    logits = random_logits(1)
    logits[0, 9] = 50.0
    params = sampling_params(temperature=0, bad_words=words(*bad), logit_bias=((9, 30.0),), repetition_penalty=1.5)
    assert (greedy(logits, params, [3, 4, *output], 2) != 9) is is_forbidden


def test_bad_words_of_one_row_leave_the_others_alone():
    logits = random_logits(4)
    best = logits.argmax(1).tolist()
    params = [sampling_params(temperature=0, bad_words=words(*([1, token] for token in best))) for _ in range(2)]
    free = [sampling_params(temperature=0)] * 2
    known = [[5, 1], [5, 2], [5, 1], [5, 1]]
    sampled = sample_rows(logits, [*params, *free], known, [1] * 4).token_ids.tolist()
    assert [a == b for a, b in zip(sampled, best, strict=True)] == [False, True, True, True]


def test_where_all_that_is_allowed_is_a_bad_word_one_of_them_is_sampled():
    params = [sampling_params(seed=seed, allowed_token_ids=[9, 20], bad_words=words([9], [20])) for seed in range(20)]
    assert {*sample_rows(random_logits(20), params).token_ids.tolist()} <= {9, 20}


def test_token_ids_outside_the_vocabulary_are_refused():
    state = SamplingState(1, 300, EOS)
    with pytest.raises(InvalidStep, match="outside the vocabulary"):
        state.fill(0, sampling_params(allowed_token_ids=[300]), 1)
    with pytest.raises(InvalidStep, match="outside the vocabulary"):
        state.fill(0, sampling_params(bad_words=words([1, 300])), 1)
    with pytest.raises(InvalidStep, match="outside the vocabulary"):
        state.fill(0, sampling_params(logit_bias=((300, 1.0),)), 1)
    with pytest.raises(InvalidStep, match="outside the vocabulary"):
        state.fill(0, sampling_params(min_tokens=1, stop_token_ids=(-1,)), 1)


# Log probabilities


def test_logprobs_are_of_the_raw_distribution():
    logits = random_logits(3)
    params = [
        sampling_params(temperature=0, logprobs=2, logit_bias=((50, 200.0),)),
        sampling_params(temperature=0),
        sampling_params(seed=5, temperature=3.0, top_k=9, logprobs=4),
    ]
    sampled = sample_rows(logits, params)
    logprobs = sampled.logprobs
    assert logprobs is not None and logprobs.logprobs.shape == (2, 5)
    for line, (row, num_top) in enumerate([(0, 2), (2, 4)]):
        expected = np.log(softmax(logits[row].double().numpy()))
        order = np.argsort(-expected)
        chosen = int(sampled.token_ids[row])
        ids = [chosen, *order[:num_top].tolist()]
        assert logprobs.token_ids[line, : 1 + num_top].tolist() == ids
        assert logprobs.logprobs[line, : 1 + num_top].numpy() == pytest.approx(expected[ids], abs=1e-4)
        assert logprobs.ranks[line] == order.tolist().index(chosen) + 1
    assert sampled.token_ids[0] == 50


def test_no_logprobs_unless_asked_for():
    assert sample_rows(random_logits(1), [sampling_params(temperature=0)]).logprobs is None
    only_chosen = sample_rows(random_logits(1), [sampling_params(temperature=0, logprobs=0)]).logprobs
    assert only_chosen is not None and only_chosen.token_ids.shape == (1, 1)


@pytest.mark.parametrize("temperature", [1e-5, 1e-6, 1e-30, 1e-40])
def test_tiny_temperatures_take_the_most_probable_token(temperature: float) -> None:
    logits = random_logits(1, scale=300.0)
    sampled = sample_rows(logits, [sampling_params(temperature=temperature, seed=3, top_k=50, top_p=0.9, min_p=0.1)])
    assert int(sampled.token_ids[0]) == int(logits.argmax())


# Log probabilities


def reported(logits: torch.Tensor, params: list[SamplingParams], mode: LogprobsMode) -> LogprobsTensors:
    logprobs = sample_rows(logits, params, logprobs_mode=mode).logprobs
    assert logprobs is not None
    return logprobs


TRUNCATED: dict[str, Any] = {"top_k": 12, "top_p": 0.8, "min_p": 0.01, "temperature": 1.5, "logit_bias": ((7, 4.0),)}


def test_processed_log_probabilities_are_those_of_being_drawn():
    num_draws = 4000
    logits = random_logits(1, seed=3).expand(num_draws, -1)
    params = [sampling_params(seed=seed, logprobs=20, **TRUNCATED) for seed in range(num_draws)]
    logprobs = reported(logits, params, LogprobsMode.PROCESSED_LOGPROBS)
    top_ids, probs = logprobs.token_ids[0, 1:], logprobs.logprobs[0, 1:].exp()
    assert 2 < int((probs > 0).sum()) <= 12 and float(probs.sum()) == pytest.approx(1, abs=1e-5)
    frequencies = (logprobs.token_ids[:, :1] == top_ids).float().mean(0)
    assert float(frequencies.sum()) == pytest.approx(1, abs=1e-5), "nothing else is drawn"
    torch.testing.assert_close(frequencies, probs, atol=0.04, rtol=0)
    logits_reported = reported(logits[:1], params[:1], LogprobsMode.PROCESSED_LOGITS)
    torch.testing.assert_close(logits_reported.logprobs[:, 1:].log_softmax(-1), logprobs.logprobs[:1, 1:])
    assert logits_reported.ranks[0] == logprobs.ranks[0] <= 12


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_raw_ones_are_the_models_whatever_is_drawn(dtype: torch.dtype):
    logits = random_logits(2, seed=4).to(dtype)
    params = [sampling_params(seed=1, logprobs=3, **TRUNCATED), sampling_params(temperature=0, logprobs=0)]
    logprobs, of_logits = (reported(logits, params, LogprobsMode(f"raw_{kind}")) for kind in ("logprobs", "logits"))
    assert logprobs.token_ids.equal(of_logits.token_ids) and logprobs.ranks.equal(of_logits.ranks)
    assert of_logits.logprobs.equal(logits.float().gather(1, logprobs.token_ids))
    torch.testing.assert_close(logprobs.logprobs, logits.float().log_softmax(-1).gather(1, logprobs.token_ids))


@pytest.mark.parametrize("name", [one.name for one in PARAMETERS if one.column is not None and one.name != "seed"])
def test_processed_log_probabilities_depend_on_every_parameter_that_kernels_read(name: str):
    """Names no parameter here: `kernels.sampling_parameters` has to apply a new one."""
    logits = random_logits(1, seed=6)
    logits[0, 1] = logits.max() + 1
    value = a_value(next(parameter for parameter in PARAMETERS if parameter.name == name))
    processed = []
    for params in (sampling_params(seed=1, logprobs=20), sampling_params(seed=1, logprobs=20, **{name: value})):
        sampled = sample_rows(logits, [params], [[1, 1]], [1], LogprobsMode.PROCESSED_LOGPROBS)
        assert sampled.logprobs is not None
        processed.append(sampled.logprobs.logprobs[0, 1:])
    assert not torch.equal(*processed), f"{name} changes what is sampled, but not the processed log probabilities"


def test_greedy_rows_return_the_logits_that_were_compared():
    """The logits with everything that changes them, and none left out."""
    logits = random_logits(2, seed=5)
    greedy_row = sampling_params(temperature=0, top_k=1, top_p=0.1, logit_bias=((9, 50.0),), logprobs=20)
    reported_logits = reported(
        logits, [greedy_row, sampling_params(seed=1, top_k=2, logprobs=20)], LogprobsMode.PROCESSED_LOGITS
    )
    assert reported_logits.token_ids[0, 0] == reported_logits.token_ids[0, 1] == 9
    assert float(reported_logits.logprobs[0, 0]) == pytest.approx(float(logits[0, 9]) + 50)
    assert reported_logits.logprobs[0].isfinite().all() and reported_logits.logprobs[1, 1:].isfinite().sum() == 2


@settings(max_examples=examples(60), deadline=None)
@given(
    seed=st.integers(0, 2**31),
    temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 30.0]),
    top_p=st.floats(0.001, 1),
    top_k=st.integers(0, 20),
    min_p=st.floats(0, 1),
)
def test_what_is_drawn_was_never_left_out(seed: int, temperature: float, top_p: float, top_k: int, min_p: float):
    logits = random_logits(8, seed=seed).round()  # with ties
    params = [
        sampling_params(seed=seed + i, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, logprobs=2)
        for i in range(8)
    ]
    logprobs = reported(logits, params, LogprobsMode.PROCESSED_LOGPROBS)
    assert logprobs.logprobs[:, :2].isfinite().all() and (logprobs.ranks >= 1).all()
