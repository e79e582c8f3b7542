"""Log probabilities of prompts: those that their tokens would have had, sampled one by one."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from pagewire.services.executor.graphs.recorded_steps import RecordedSteps
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.runner import prompt_logprobs
from pagewire.services.executor.sampling.logprobs import LogprobsMode
from pagewire.services.executor.service.convert import result_to_proto
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.start.graph_capture import capture_graphs
from pagewire.services.executor.step.prompt_lines import PromptLines
from pagewire.services.executor.step.step import HostTokens, InvalidStep
from tests.services.executor.graphs.test_cuda_graphs import ReplayedFunction
from tests.services.executor.helpers.drafting import KnownTexts
from tests.services.executor.helpers.stepping import (
    CPU,
    GREEDY,
    LIMITS,
    SEEDED,
    VOCAB_SIZE,
    Driver,
    alone,
    changed,
    make_driver,
    prompt,
    sampling_params,
    tiny_llama,
)

SCORED = changed(GREEDY, prompt_logprobs=3)
PROMPT = prompt(21)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return tiny_llama(tmp_path_factory.mktemp("llama"))


def sampled_lines(model: DecoderModel, token_ids: Sequence[int], num_top: int) -> PromptLines:
    """Each token sampled behind those before it, as the only one that is allowed. Takes the model away from other
    drivers."""
    driver, lines = make_driver(model), list[PromptLines]()
    for end in range(1, len(token_ids)):
        sampling = sampling_params(temperature=0, allowed_token_ids=[token_ids[end]], logprobs=num_top)
        driver.add(end, list(token_ids[:end]), sampling)
        host = driver.step({end: end})
        driver.finish(end)
        assert host.logprob_token_ids is not None and host.logprobs is not None and host.ranks is not None
        lines.append(PromptLines(host.logprob_token_ids, host.logprobs, host.ranks))
    return PromptLines.joined(lines, 1 + num_top)


def check_equal(lines: PromptLines, expected: PromptLines) -> None:
    assert lines.token_ids.tolist() == expected.token_ids.tolist()
    assert lines.ranks.tolist() == expected.ranks.tolist()
    np.testing.assert_allclose(lines.logprobs, expected.logprobs, atol=1e-4)


def score(driver: Driver, token_ids: list[int], chunks: Sequence[int], num_top: int = 3) -> PromptLines:
    driver.add(0, token_ids, changed(GREEDY, prompt_logprobs=num_top))
    *parts, last = [driver.step({0: chunk}) for chunk in chunks]
    assert not any(host.prompt_logprobs for host in parts), "they come with the first token"
    driver.finish(0)
    return last.prompt_logprobs[0]


@pytest.mark.parametrize("chunks", [[21], [20, 1], [1, 20], [1] * 21, [8, 8, 5], [7, 13, 1]])
def test_a_prompts_tokens_have_the_log_probabilities_of_sampled_ones(model: DecoderModel, chunks: list[int]):
    check_equal(score(make_driver(model), PROMPT, chunks), sampled_lines(model, PROMPT, 3))


def test_a_thread_may_wait_for_a_later_step_first(model: DecoderModel):
    """Waits for results on another thread, like the one that fills the masks of requests with a grammar."""
    driver = make_driver(model)
    driver.add(0, PROMPT, SCORED)
    first, last = driver.launch({0: 8}), driver.launch({0: 13})
    last.wait()
    driver.collect(first)
    check_equal(driver.collect(last).prompt_logprobs[0], sampled_lines(model, PROMPT, 3))


def test_recorded_steps_report_the_same(model: DecoderModel):
    expected = sampled_lines(model, PROMPT, 3)
    driver = Driver(assemble(model, LIMITS, 64, CPU, graphs=RecordedSteps(LIMITS.max_num_seqs, 64)), 64)
    for _ in range(2):  # recorded, then replayed
        check_equal(score(driver, PROMPT, [13, 8]), expected)


def test_graphs_report_the_same(model: DecoderModel):
    runner = assemble(model, LIMITS, 64, CPU)
    capture_graphs(runner, (1,), lambda fraction, text: None, ReplayedFunction, prompts=(8, 24))
    check_equal(score(Driver(runner, 64), PROMPT, [13, 8]), sampled_lines(model, PROMPT, 3))


def test_steps_that_look_like_decoding_report_the_same(model: DecoderModel):
    """One token of the prompt beside one of another request, recorded with its sampling."""
    text, expected = alone(model, prompt(9), 22), sampled_lines(model, PROMPT, 3)
    driver = Driver(assemble(model, LIMITS, 64, CPU, graphs=RecordedSteps(LIMITS.max_num_seqs, 64)), 64)
    driver.add(1, prompt(9))
    driver.step({1: 9})
    driver.add(0, PROMPT, SCORED)
    hosts = [driver.step({0: 1, 1: 1}) for _ in PROMPT]
    check_equal(hosts[-1].prompt_logprobs[0], expected)
    assert driver.tokens[1] == text


def test_logits_are_computed_in_pieces(model: DecoderModel, monkeypatch: pytest.MonkeyPatch):
    expected = score(make_driver(model), PROMPT, [21])
    monkeypatch.setattr(prompt_logprobs, "_PIECE_BYTES", 4 * VOCAB_SIZE * 6 + 1)
    driver, sizes = make_driver(model), list[int]()
    compute = model.compute_logits

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        sizes.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(model, "compute_logits", compute_logits)
    check_equal(score(driver, PROMPT, [21]), expected)
    assert sizes == [1, 6, 6, 6, 2]


def test_each_request_gets_its_own_beside_others_that_ask_for_none(model: DecoderModel):
    first, second = sampled_lines(model, prompt(9, seed=1), 0), sampled_lines(model, prompt(17, seed=2), 5)
    text = alone(model, PROMPT, 3)
    driver = make_driver(model)
    driver.add(0, PROMPT)
    driver.step({0: 21})
    driver.add(1, prompt(9, seed=1), changed(SEEDED, prompt_logprobs=0, logprobs=1))
    driver.add(2, prompt(17, seed=2), changed(GREEDY, prompt_logprobs=5))
    driver.add(3, prompt(6, seed=3))
    assert not driver.step({0: 1, 2: 10, 3: 6, 1: 4}).prompt_logprobs
    output = driver.launch({1: 5, 0: 1, 2: 7})
    host = driver.collect(output)
    assert list(host.prompt_logprobs) == [1, 2]
    check_equal(host.prompt_logprobs[1], first)
    check_equal(host.prompt_logprobs[2], second)
    assert driver.tokens[0] == text
    message = result_to_proto(output, host, 0, 0, None)
    sizes = {index: (lines.entries_per_token, len(lines.ranks)) for index, lines in message.prompt_logprobs.items()}
    assert sizes == {0: (1, 8), 2: (6, 16)}, "by index into request_ids"
    assert list(message.prompt_logprobs[2].token_ids[::6]) == prompt(17, seed=2)[1:]
    assert not driver.step({0: 1, 1: 1, 2: 1}).prompt_logprobs, "once"


def test_of_a_single_token_there_are_none(model: DecoderModel):
    lines = score(make_driver(model), [5], [1])
    assert (lines.token_ids.shape, lines.logprobs.shape, lines.ranks.shape) == ((0, 4), (0, 4), (0,))


def test_a_resumed_request_is_scored_again_only_without_output(model: DecoderModel):
    expected, driver = sampled_lines(model, PROMPT, 3), make_driver(model)
    driver.add(0, PROMPT, SCORED)
    driver.step({0: 11})
    driver.finish(0)
    check_equal(score(driver, PROMPT, [5, 16]), expected)
    driver.add(1, [*PROMPT, 7, 8], SCORED, num_prompt_tokens=21)
    assert not driver.step({1: 23}).prompt_logprobs


def test_results_may_come_after_the_next_step_was_launched(model: DecoderModel):
    expected, driver = sampled_lines(model, PROMPT, 3), make_driver(model)
    driver.add(0, PROMPT, SCORED)
    outputs = [driver.launch({0: count}) for count in (9, 12, 1)]
    hosts: list[HostTokens] = [driver.collect(output) for output in outputs]
    assert [bool(host.prompt_logprobs) for host in hosts] == [False, True, False]
    check_equal(hosts[1].prompt_logprobs[0], expected)


def test_drafts_behind_the_prompt_change_nothing(model: DecoderModel):
    text, expected = alone(model, PROMPT, 6), sampled_lines(model, PROMPT, 3)
    driver = make_driver(model, proposer=KnownTexts([[*PROMPT, *text]], 1.0))
    driver.add(0, PROMPT, SCORED)
    driver.step({0: 11})
    check_equal(driver.step({0: 12}, {0: 2}).prompt_logprobs[0], expected)
    assert not driver.step({0: 3}, {0: 2}).prompt_logprobs
    assert driver.tokens[0] == text


def test_cached_tokens_are_refused(model: DecoderModel):
    driver = make_driver(model)
    driver.add(0, PROMPT)
    driver.step({0: 21})
    driver.add(1, PROMPT, SCORED, shared_blocks=driver.blocks(0)[:1])
    with pytest.raises(InvalidStep, match="8 tokens are computed already"):
        driver.step({1: 13})


@pytest.mark.parametrize("mode", LogprobsMode)
def test_modes_report_logits_or_log_probabilities_of_the_model(model: DecoderModel, mode: LogprobsMode):
    """Nothing is processed before a prompt's tokens."""
    driver = Driver(assemble(model, LIMITS, 64, CPU, logprobs_mode=mode), 64)
    lines, expected = score(driver, PROMPT, [21], VOCAB_SIZE), sampled_lines(model, PROMPT, VOCAB_SIZE)
    if mode.is_logits:
        assert np.abs(np.exp(lines.logprobs[:, 1:]).sum(1) - 1).min() > 0.1
        logprobs = torch.from_numpy(lines.logprobs[:, 1:]).log_softmax(-1).numpy()
        np.testing.assert_allclose(logprobs, expected.logprobs[:, 1:], atol=1e-4)
        assert lines.token_ids.tolist() == expected.token_ids.tolist()
    else:
        check_equal(lines, expected)
