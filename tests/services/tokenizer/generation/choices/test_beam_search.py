"""The search finds what transformers' generate() does, whatever its settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pagewire.services.tokenizer.generation.choices.beam_search import BeamSearch, Continuations, Hypothesis

VOCAB_SIZE = 40
PROMPTS = [[5, 6, 7], [20], [11, 3, 8, 30, 2]]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(7)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=VOCAB_SIZE, initializer_range=0.4, **sizes)
    return LlamaForCausalLM(config).eval()


@torch.inference_mode()
def continuations(model: LlamaForCausalLM, prompt: list[int], one: Hypothesis, count: int) -> Continuations:
    logits = model(torch.tensor([[*prompt, *one.token_ids]])).logits[0, -1].float()
    top = logits.log_softmax(-1).topk(count)
    return list(zip(top.indices.tolist(), top.values.tolist(), strict=True))


def find(model: LlamaForCausalLM, prompt: list[int], search: BeamSearch) -> list[list[int]]:
    while search.running:
        search.advance([continuations(model, prompt, one, search.num_continuations) for one in search.running])
    return [output.token_ids for output in search.outputs]


@torch.inference_mode()
def expected(model: LlamaForCausalLM, prompt: list[int], ends: list[int], **settings: Any) -> list[list[int]]:
    answer = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        num_return_sequences=settings["num_beams"],
        eos_token_id=ends or None,
        pad_token_id=VOCAB_SIZE - 1,
        **settings,
    )
    outputs = [sequence[len(prompt) :].tolist() for sequence in answer]
    return [cut(output, ends) for output in outputs]


def cut(output: list[int], ends: list[int]) -> list[int]:
    """Removes the padding behind the end."""
    end = next((index + 1 for index, token_id in enumerate(output) if token_id in ends), len(output))
    return output[:end]


@pytest.mark.pairs
@pytest.mark.parametrize("early_stopping", [False, True])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
@pytest.mark.parametrize(("width", "ends"), [(1, [4]), (3, []), (3, [4]), (5, [4, 9, 17])])
def test_outputs_are_those_of_transformers(
    model: LlamaForCausalLM, width: int, ends: list[int], length_penalty: float, early_stopping: bool
) -> None:
    for prompt in PROMPTS:
        wanted = expected(
            model,
            prompt,
            ends,
            num_beams=width,
            max_new_tokens=12,
            length_penalty=length_penalty,
            # Without an end token there is nothing to stop early for.
            early_stopping=early_stopping,
        )
        search = BeamSearch(width, ends, 12, length_penalty, early_stopping)
        assert find(model, prompt, search) == wanted


def test_a_history_says_each_token_and_what_else_there_was(model: LlamaForCausalLM) -> None:
    search = BeamSearch(2, [], 5)
    best = find(model, PROMPTS[0], search)[0]
    tokens = search.outputs[0].tokens()
    assert [one.token_ids for one in tokens] == [best[: index + 1] for index in range(5)]
    assert sum(one.token_logprob for one in tokens) == pytest.approx(search.outputs[0].logprob)
    assert all((one.token_ids[-1], one.token_logprob) in one.alternatives for one in tokens)


def test_outputs_may_be_fewer_than_the_vocabulary_allows() -> None:
    """The vocabulary has two tokens, one of which ends: no beginning is left to continue."""
    search = BeamSearch(4, [0], 3)
    while search.running:
        search.advance([[(1, -0.5), (0, -1.0)] for _ in search.running])
    assert [output.token_ids for output in search.outputs] == [[1, 1, 1], [1, 1, 0], [1, 0], [0]]
