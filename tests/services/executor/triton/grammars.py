"""Outputs with a grammar, under the whole executor. See `tokens.py`."""

from __future__ import annotations

from pathlib import Path

from pagewire.services.executor.grammar.compiler import Compiler
from pagewire.services.executor.grammar.matcher import GrammarMatcher
from pagewire.v1.common_pb2 import Grammar
from tests.services.executor.helpers.constrained import EOS, VOCAB_SIZE, constrained_runner, save_constrained
from tests.services.executor.helpers.stepping import Driver, prompt, sampling_params

GRAMMARS = [Grammar(regex="[0-9]{3}-[0-9]{2}"), Grammar(json_schema='{"type": "boolean"}'), None]
NUM_STEPS = 8


def generate(directory: Path) -> list[list[int]]:
    """Tokens of a request for each grammar, and of one without, in the same steps."""
    save_constrained(directory)
    runner, _ = constrained_runner(directory, num_blocks=16)
    compiler = Compiler(directory, VOCAB_SIZE, [EOS])
    driver = Driver(runner, 16)
    for request_id, grammar in enumerate(GRAMMARS):
        params = sampling_params(seed=request_id, temperature=1.2, grammar=grammar)
        matcher = None if grammar is None else GrammarMatcher(compiler.compile(grammar), params, [EOS])
        driver.add(request_id, prompt(3, seed=request_id), params, matcher=matcher)
    running = range(len(GRAMMARS))
    driver.step(dict.fromkeys(running, 3))
    for _ in range(NUM_STEPS - 1):
        driver.step(dict.fromkeys(running, 1))
    return [driver.tokens[request_id] for request_id in running]
