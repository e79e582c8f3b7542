"""Grammar engines over a folder of JSON schemas: `python -m benchmarks.grammars FOLDER [--model M] [--engines NAMES]`.

A file is a schema, or an object with "schema" and "tests" (instances, and whether they are valid), as MaskBench of
https://github.com/guidance-ai/jsonschemabench has them. For every engine that is installed (llguidance, xgrammar): how
many schemas compile, how many instances are judged rightly, the time to compile, and the time to fill a mask, over the
tokens of valid instances. Compile times include the first mask, which engines that compile lazily would hide otherwise.
Each engine runs in a process of its own, which is given up where a schema with its instances takes more than `--limit`
seconds.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from pagewire.config import DEFAULT_MODEL
from pagewire.files.models import resolve_model
from pagewire.files.tokenizer_files.loading import LoadedTokenizer, load_tokenizer


class Matcher(Protocol):
    def fill_mask(self, mask: np.ndarray) -> None: ...
    def consume(self, token_id: int) -> bool: ...
    def may_end(self) -> bool: ...


Compile = Callable[[str], Matcher]  # raises ValueError


def llguidance_engine(tokenizer: LoadedTokenizer, vocab_size: int, eos: int) -> Compile:
    import llguidance

    ll_tokenizer = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=eos)

    class LLGuidance:
        def __init__(self, matcher: llguidance.LLMatcher) -> None:
            self._matcher = matcher

        def fill_mask(self, mask: np.ndarray) -> None:
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)

        def consume(self, token_id: int) -> bool:
            return self._matcher.consume_token(token_id)

        def may_end(self) -> bool:
            return self._matcher.is_accepting()

    def compile_schema(schema: str) -> Matcher:
        matcher = llguidance.LLMatcher(ll_tokenizer, llguidance.LLMatcher.grammar_from_json_schema(schema), log_level=0)
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return LLGuidance(matcher)

    return compile_schema


def xgrammar_engine(tokenizer: LoadedTokenizer, vocab_size: int, eos: int) -> Compile:
    import torch
    import xgrammar

    entries = tokenizer.vocabulary_entries(range(vocab_size))
    info = xgrammar.TokenizerInfo(entries, xgrammar.VocabType.BYTE_LEVEL, vocab_size=vocab_size, stop_token_ids=[eos])
    compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_enabled=False)

    class XGrammar:
        def __init__(self, compiled: Any) -> None:
            self._matcher = xgrammar.GrammarMatcher(compiled)

        def fill_mask(self, mask: np.ndarray) -> None:
            self._matcher.fill_next_token_bitmask(torch.from_numpy(mask)[None])

        def consume(self, token_id: int) -> bool:
            return self._matcher.accept_token(token_id)

        def may_end(self) -> bool:
            return self._matcher.accept_token(eos)

    def compile_schema(schema: str) -> Matcher:
        try:
            return XGrammar(compiler.compile_json_schema(schema, any_whitespace=True, strict_mode=False))
        except Exception as error:
            raise ValueError(str(error)) from error

    return compile_schema


ENGINES = {"llguidance": llguidance_engine, "xgrammar": xgrammar_engine}


@dataclass
class Outcome:
    """Of one schema."""

    compile_s: float = 0.0
    mask_s: list[float] = field(default_factory=list)
    verdicts: list[tuple[bool, bool]] = field(default_factory=list)  # (the instance is valid, the engine says so)
    error: str = ""


def judge(compile_schema: Compile, schema: Any, tests: list[Any], tokenizer: LoadedTokenizer, mask: np.ndarray) -> Any:
    outcome, text = Outcome(), json.dumps(schema)
    start = time.perf_counter()
    try:
        compile_schema(text).fill_mask(mask)
    except ValueError as error:
        outcome.error = str(error)
        return outcome
    finally:
        outcome.compile_s = time.perf_counter() - start
    for test in tests:
        instance = json.dumps(test["data"], ensure_ascii=False)
        token_ids = tokenizer.encode(instance, add_special_tokens=False)
        outcome.verdicts.append((test["valid"], accepts(compile_schema(text), token_ids, mask, outcome.mask_s)))
    return outcome


def accepts(matcher: Matcher, token_ids: list[int], mask: np.ndarray, mask_s: list[float]) -> bool:
    times = []
    for token_id in token_ids:
        start = time.perf_counter()
        matcher.fill_mask(mask)
        times.append(time.perf_counter() - start)
        if not mask[token_id // 32] >> (token_id % 32) & 1 or not matcher.consume(token_id):
            return False
    mask_s += times
    return matcher.may_end()


def serve(connection: Connection, engine: str, model: str) -> None:
    tokenizer = load_tokenizer(resolve_model(model))
    vocab_size = tokenizer.backend.get_vocab_size()
    eos = tokenizer.backend.token_to_id(tokenizer.special_tokens["eos_token"])
    assert eos is not None
    start = time.perf_counter()
    compile_schema = ENGINES[engine](tokenizer, vocab_size, eos)
    connection.send(time.perf_counter() - start)
    mask = np.zeros(-(-vocab_size // 32), dtype=np.int32)
    while True:
        schema, tests = connection.recv()
        connection.send(judge(compile_schema, schema, tests, tokenizer, mask))


def outcomes(engine: str, model: str, cases: dict[str, tuple[Any, list[Any]]], limit: float) -> Iterator[Any]:
    """First the seconds that the engine takes to start."""
    context = multiprocessing.get_context("spawn")
    process, connection = None, None
    for index, case in enumerate(cases.values()):
        if process is None or connection is None:
            connection, theirs = context.Pipe()
            process = context.Process(target=serve, args=(theirs, engine, model), daemon=True)
            process.start()
            theirs.close()
            started = connection.recv()
            if index == 0:
                yield started
        connection.send(case)
        try:
            answer = connection.recv() if connection.poll(limit) else Outcome(error="too slow")
        except EOFError:
            answer = Outcome(error="the process died")
        if answer.error in ("too slow", "the process died"):
            process.kill()
            process = None
        yield answer
    if process is not None:
        process.kill()


def read_cases(folder: Path) -> dict[str, tuple[Any, list[Any]]]:
    cases = {}
    for path in sorted(folder.glob("*.json")):
        try:
            value = json.loads(path.read_text(encoding="utf-8-sig"))
        except ValueError:
            continue  # not JSON, as some of what is published as schemas
        is_case = "schema" in value and "tests" in value
        cases[path.name] = (value["schema"], value["tests"]) if is_case else (value, [])
    return cases


def percentiles(seconds: list[float], unit: float) -> str:
    cuts = statistics.quantiles(seconds, n=100, method="inclusive")
    return f"{cuts[49] / unit:9.2f} {cuts[89] / unit:9.2f} {cuts[98] / unit:9.2f} {max(seconds) / unit:9.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--limit", type=float, default=10.0, help="seconds for a schema with its instances")
    parser.add_argument("--verbose", action="store_true", help="name the schemas that fail, and why")
    args = parser.parse_args()
    cases = read_cases(args.folder)
    print(f"{len(cases)} schemas, {sum(len(tests) for _, tests in cases.values())} instances, {args.model}")
    print("engine        start s   compiled   valid taken   invalid refused   schemas right")
    lines = []
    for engine in args.engines.split(","):
        start, *results = outcomes(engine, args.model, cases, args.limit)
        compiled = [outcome for outcome in results if not outcome.error]
        verdicts = [verdict for outcome in compiled for verdict in outcome.verdicts]
        valid, invalid = [v for v in verdicts if v[0]], [v for v in verdicts if not v[0]]
        right = sum(all(is_valid == taken for is_valid, taken in outcome.verdicts) for outcome in compiled)
        print(
            f"{engine:12} {start:8.2f}   {len(compiled):8}   {sum(v[1] for v in valid):5} of {len(valid):4}   "
            f"{sum(not v[1] for v in invalid):9} of {len(invalid):4}   {right:13}"
        )
        lines.append(f"{engine:12} compile, ms  {percentiles([o.compile_s for o in compiled], 1e-3)}")
        lines.append(f"{engine:12} mask, µs     {percentiles([s for o in compiled for s in o.mask_s], 1e-6)}")
        if args.verbose:
            for name, outcome in zip(cases, results, strict=True):
                wrong = [f"valid={v[0]} taken={v[1]}" for v in outcome.verdicts if v[0] != v[1]]
                if outcome.error or wrong:
                    lines.append(f"  {name}: {outcome.error.splitlines()[:1] or wrong[:3]}")
    print("\n                                p50       p90       p99       max", *lines, sep="\n")


if __name__ == "__main__":
    main()
