"""Drafts of requests with a grammar or a thinking budget: what they generate is what they generate without."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.services.executor.grammar.compiler import Compiler
from pagewire.services.executor.grammar.look_ahead import fill_masks, fitting
from pagewire.services.executor.grammar.matcher import GrammarMatcher
from pagewire.services.executor.grammar.thinking import ThinkingMatcher
from pagewire.services.executor.models.decoder import DecoderModel
from pagewire.services.executor.parallel.communicator import ALONE
from pagewire.services.executor.parallel.tokens import LeadersTokens
from pagewire.services.executor.runner.proposer import Proposer
from pagewire.services.executor.sampling.tokens import OWN_TOKENS, Tokens
from pagewire.services.executor.speculation.draft_model import DraftModel
from pagewire.services.executor.speculation.draft_steps import Target
from pagewire.services.executor.speculation.ngram import NgramProposer
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.matcher import Matcher
from pagewire.v1.common_pb2 import Grammar, SamplingParams, Thinking, TokenSequence
from tests.services.executor.helpers.constrained import (
    DIGITS,
    EOS,
    PERSON,
    VOCAB_SIZE,
    constrained_runner,
    one_of,
    save_constrained,
)
from tests.services.executor.helpers.constrained import LIMITS as OF_CONSTRAINED
from tests.services.executor.helpers.drafting import KnownTexts
from tests.services.executor.helpers.stepping import CPU, Driver, prompt, sampling_params
from tests.sweep import examples

LIMITS = replace(OF_CONSTRAINED, max_num_seqs=16)
NUM_TOKENS, DRAFTS = 60, 4
PROMPTS = [[*prompt(8), 20 + index] for index in range(16)]  # of kinds
CALL = {"begin": "<call>", "content": {"type": "json_schema", "json_schema": PERSON}, "end": "</call>"}
CALLS = {"type": "triggered_tags", "triggers": ["<call>"], "tags": [CALL], "at_least_one": True}
GRAMMARS = {
    "schema": Grammar(json_schema=json.dumps(PERSON), disable_any_whitespace=True),
    "regex": Grammar(regex=DIGITS),
    "choice": one_of(["perhaps so", "perhaps not", "no"]),
    "tools": Grammar(structural_tag=json.dumps({"type": "structural_tag", "format": CALLS})),
}
MARKS = {"start": TokenSequence(token_ids=[5, 6]), "end": TokenSequence(token_ids=[7, 8, 7, 9])}
THINKING = Thinking(**MARKS, begun=True, budget=11)


def params(name: str, *, thinks: bool = False, **fields: Any) -> SamplingParams:
    grammar, thinking = GRAMMARS.get(name), THINKING if thinks else None
    return sampling_params(grammar=grammar, thinking=thinking, **{"temperature": 0} | fields)


KINDS = {
    **{name: params(name) for name in GRAMMARS},
    "seeded schema": params("schema", temperature=1.3, seed=3),
    "schema, penalties, no early end": params("schema", temperature=1.0, seed=4, min_tokens=40, repetition_penalty=1.2),
    "tools, log probabilities": params("tools", temperature=1.0, seed=5, logprobs=2),
    "budget": params("", thinks=True),
    "seeded budget": params("", thinks=True, temperature=1.0, seed=6),
    "budget, then schema": params("schema", thinks=True, temperature=1.0, seed=7),
}


@dataclass(frozen=True)
class Tiny:
    tokenizer: LoadedTokenizer
    compiler: Compiler
    model: DecoderModel

    def matcher(self, sampling: SamplingParams) -> Matcher:
        grammar = None
        if sampling.HasField("grammar"):
            grammar = GrammarMatcher(self.compiler.compile(sampling.grammar), sampling, [EOS])
        if sampling.HasField("thinking"):
            return ThinkingMatcher(sampling, grammar, [EOS], VOCAB_SIZE)
        assert grammar is not None
        return grammar

    def driver(self, proposer: Proposer | None = None, tokens: Tokens = OWN_TOKENS) -> Driver:
        return Driver(assemble(self.model, LIMITS, 320, CPU, proposer=proposer, tokens=tokens), 320)

    def generate(self, driver: Driver, num_drafts: int, depth: int = 1) -> dict[str, int]:
        """Some tokens of each kind, all at the same time and `depth` steps in flight. By kind, in how many steps."""
        num_steps = {}
        for request_id, sampling in enumerate(KINDS.values()):
            driver.add(request_id, PROMPTS[request_id], sampling, matcher=self.matcher(sampling))
        running = list(range(len(KINDS)))
        outputs = [driver.launch(dict.fromkeys(running, len(PROMPTS[0])))]
        while running:
            drafts = dict.fromkeys(running, num_drafts)
            outputs.append(driver.launch(dict.fromkeys(running, 1 + num_drafts), drafts if num_drafts else None))
            while len(outputs) >= depth:
                driver.collect(outputs.pop(0))
            for request_id in [one for one in running if len(driver.tokens[one]) >= NUM_TOKENS]:
                running.remove(request_id)
                driver.finish(request_id)
                num_steps[list(KINDS)[request_id]] = driver.num_steps
        for output in outputs:
            driver.collect(output)
        return num_steps


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = tmp_path_factory.mktemp("constrained")
    tokenizer = save_constrained(path)
    model = constrained_runner(path)[0].model
    assert isinstance(model, DecoderModel)
    return Tiny(tokenizer, Compiler(path, VOCAB_SIZE, [EOS]), model)


@pytest.fixture(scope="module")
def plain(tiny: Tiny) -> list[list[int]]:
    """Returns tokens without drafts, of each kind of request."""
    driver = tiny.driver()
    tiny.generate(driver, 0)
    return [tokens[:NUM_TOKENS] for tokens in driver.tokens.values()]


def known_texts(plain: list[list[int]], accuracy: float) -> KnownTexts:
    return KnownTexts([one + tokens for one, tokens in zip(PROMPTS, plain, strict=False)], accuracy, DRAFTS)


@pytest.mark.parametrize("tokens", [OWN_TOKENS, LeadersTokens(ALONE, 256, CPU)], ids=["chosen", "as offered"])
@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("depth", [1, 2])
def test_outputs_are_those_without_drafts(
    tiny: Tiny, plain: list[list[int]], tokens: Tokens, accuracy: float, depth: int
) -> None:
    """Drafts are chosen by grammar, or refused by it, as on a GPU or among ranks."""
    driver = tiny.driver(known_texts(plain, accuracy), tokens)
    num_steps = tiny.generate(driver, DRAFTS, depth)
    for kind, expected, actual in zip(KINDS, plain, driver.tokens.values(), strict=True):
        assert actual[:NUM_TOKENS] == expected, kind
    if accuracy == 1.0 and depth == 1:
        endless = {kind for kind, output in zip(KINDS, plain, strict=True) if EOS not in output}
        assert endless and {num_steps[kind] for kind in endless} == {1 + -(-(NUM_TOKENS - 1) // (1 + DRAFTS))}


def test_what_has_to_follow_is_gained_without_a_proposer(tiny: Tiny, plain: list[list[int]]) -> None:
    """Keys of objects, ends of choices, the mark behind a budget that is used up."""
    driver = tiny.driver(NgramProposer(DRAFTS, 90, 90))  # which finds nothing
    num_steps = tiny.generate(driver, DRAFTS)
    assert [tokens[:NUM_TOKENS] for tokens in driver.tokens.values()] == plain
    assert num_steps["schema"] < NUM_TOKENS * 0.7 and num_steps["budget"] <= NUM_TOKENS - 3


def bits(mask: np.ndarray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


@given(st.sampled_from(list(KINDS)), st.integers(0, 40), st.randoms(use_true_random=False))
@settings(max_examples=examples(80), deadline=None)
def test_looking_ahead_leaves_no_trace(
    tiny: Tiny, plain: list[list[int]], kind: str, num_known: int, choose: random.Random
) -> None:
    """Masks behind drafts are those that the matcher has when the drafts are known, and it stays where it was."""
    sampling, output = KINDS[kind], plain[list(KINDS).index(kind)]
    matcher, walked = tiny.matcher(sampling), tiny.matcher(sampling)
    size = -(-VOCAB_SIZE // 32)
    before, after, masks = np.empty(size, np.int32), np.empty(size, np.int32), np.empty((DRAFTS, size), np.int32)
    for which in (matcher, walked):
        which.advance(output[:num_known])
    matcher.fill_mask(before)
    offered = [choose.choice([right, choose.randrange(VOCAB_SIZE)]) for right in output[num_known:][:DRAFTS]]
    drafts = fitting(matcher, offered, DRAFTS)
    fill_masks(matcher, drafts, masks)
    fill_masks(matcher, offered, masks.copy())
    matcher.fill_mask(after)
    assert bits(after) == bits(before)
    for draft, mask in zip(drafts, masks, strict=False):
        assert walked.allows(draft)
        walked.advance([draft])
        walked.fill_mask(after)
        assert bits(mask) == bits(after)


def test_a_way_that_cannot_be_gone_back_is_forgotten(tiny: Tiny, plain: list[list[int]]) -> None:
    """A matcher of llguidance never leaves an error; on a way ahead that says nothing of the output."""
    matcher = tiny.matcher(KINDS["schema"])
    output = plain[list(KINDS).index("schema")]
    matcher.advance(output[:20])
    place = matcher.place()
    matcher.advance(output[20:23])
    matcher.advance([next(id for id in range(VOCAB_SIZE) if not matcher.allows(id))])
    assert matcher.error
    matcher.go_back(place)
    assert not matcher.error
    for token_id in output[20:]:
        assert matcher.allows(token_id)
        matcher.advance([token_id])


def test_a_model_that_drafts_learns_what_stands_in_place_of_its_drafts(
    tmp_path: Path, tiny: Tiny, plain: list[list[int]]
) -> None:
    """A draft model with the target's weights is always right, also behind the tokens that close a reasoning."""
    target = tiny.model
    save_constrained(tmp_path)
    twin = constrained_runner(tmp_path)[0].model
    driver = tiny.driver(DraftModel(Target(target, LIMITS, 320, CPU), twin, DRAFTS, LIMITS.max_model_len))
    request_id = list(KINDS).index("budget")
    driver.add(0, PROMPTS[request_id], KINDS["budget"], matcher=tiny.matcher(KINDS["budget"]))
    driver.step({0: len(PROMPTS[0])})
    gained = [int(driver.step({0: 1 + DRAFTS}, {0: DRAFTS}).num_tokens[0]) for _ in range(11)]
    assert driver.tokens[0][:NUM_TOKENS] == plain[request_id][: len(driver.tokens[0])]
    assert gained[3:] == [1 + DRAFTS] * 8, gained
