"""The grammars of an executor: each is tried in a separate process, compiled once, and kept."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from llguidance import LLMatcher

from pagewire.process.worker_process import WorkerDiedError, WorkerProcess, WorkerTooSlowError
from pagewire.services.executor import stats
from pagewire.services.executor.grammar.compiler import Compiler, trial_compiler
from pagewire.services.executor.grammar.errors import GrammarError, SlowGrammarError
from pagewire.services.executor.grammar.matcher import GrammarMatcher
from pagewire.services.executor.grammar.thinking import ThinkingMatcher
from pagewire.services.executor.grammar.threads import grammar_thread
from pagewire.services.executor.grammar.turns import Turns
from pagewire.services.executor.step.failures import Cause, Failure
from pagewire.services.executor.step.matcher import Matcher
from pagewire.services.executor.step.step import NewRequest, Step
from pagewire.v1.common_pb2 import Grammar, SamplingParams
from pagewire.wire.rpc import RpcError

logger = logging.getLogger(__name__)

_START_SECONDS = 120.0  # for the process, which reads the vocabulary
# Of the grammars that are kept. A compiled one takes some 500 times its own bytes.
_CACHED_BYTES = 1024 * 1024
_MOST_TRIED = 100_000
# For which a grammar that took too long is refused without another trial. Afterwards the machine may be less busy.
_SLOW_SECONDS, _MOST_SLOW = 60.0, 1000


def _digest(grammar: bytes) -> bytes:
    return hashlib.sha256(grammar).digest()


def is_restricted(params: SamplingParams) -> bool:
    """Returns whether a request needs a matcher."""
    return params.HasField("grammar") or params.HasField("thinking")


class Grammars:
    """The `service.seams.Grammars` of llguidance. The vocabulary is read when the first grammar arrives."""

    def __init__(
        self,
        find_model: Callable[[], Path],
        vocab_size: int,
        eos_token_ids: Sequence[int],
        *,
        timeout: float,
        cache_size: int,
        closes: bool = True,
    ) -> None:
        """timeout: the limit for compiling, in seconds. cache_size: the number of grammars that are kept.

        closes: objects have no properties besides those that a schema declares, unless it says so.
        """
        self._find_model = find_model
        self._vocabulary = (vocab_size, tuple(eos_token_ids))
        self._timeout = timeout
        self._cache_size = cache_size
        self._closes = closes
        self._compiled: OrderedDict[bytes, asyncio.Future[LLMatcher]] = OrderedDict()  # the latest used last
        self._tried: OrderedDict[bytes, None] = OrderedDict()  # digests of grammars that can be compiled
        self._waiters: Counter[asyncio.Future[LLMatcher]] = Counter()  # requests
        self._turns = Turns()
        self._slow: OrderedDict[bytes, float] = OrderedDict()  # digests of grammars, until when they are refused
        self._thread: ThreadPoolExecutor | None = None  # that compiles
        self._steps: ThreadPoolExecutor | None = None  # for what steps wait for: it compiles only what was tried
        self._compiler: Compiler | None = None  # made by the thread
        self._trial: WorkerProcess | None = None
        self._started: int | None = None  # id of the process that has read the vocabulary

    async def compile(self, grammar: Grammar) -> LLMatcher:
        """Returns the compiled grammar at its start; do not change it. Raises GrammarError."""
        key = grammar.SerializeToString(deterministic=True)
        found = self._compiled.get(key)
        stats.GRAMMARS.labels("compiled" if found is None else "cached").inc()
        if found is None:
            found = self._kept(key, self._compile_in_turn(key))
        else:
            self._compiled.move_to_end(key)
        self._waiters[found] += 1
        try:
            return await asyncio.shield(found)
        finally:
            self._waiters[found] -= 1
            if not self._waiters[found]:
                del self._waiters[found]
                self._abandon(key, found)

    def _abandon(self, key: bytes, compiling: asyncio.Future[LLMatcher]) -> None:
        """Does not compile what waits for its turn, as its requests have left."""
        if compiling.cancel() and self._compiled.get(key) is compiling:
            del self._compiled[key]

    async def _compile_in_turn(self, key: bytes) -> LLMatcher:
        if self._slow.get(_digest(key), 0.0) > time.monotonic():
            raise self._too_slow()
        async with self._turns.of(len(key)):
            return await self._run(partial(self._compile, key))

    def _too_slow(self) -> SlowGrammarError:
        return SlowGrammarError(
            f"the grammar takes longer than {self._timeout:g} s to compile; simplify it, or raise the executor's "
            "--grammar-compile-timeout"
        )

    async def _compiled_for_step(self, grammar: Grammar) -> LLMatcher:
        """Returns the compiled grammar at its start. One that was tried, and is no longer kept, is compiled on the
        thread of steps: they do not wait behind those that are being tried. Raises GrammarError."""
        key = grammar.SerializeToString(deterministic=True)
        found = self._compiled.get(key)
        if (found is not None and found.done()) or _digest(key) not in self._tried or self._compiler is None:
            return await self.compile(grammar)
        stats.GRAMMARS.labels("compiled").inc()
        return await asyncio.shield(self._kept(key, self._run_for_step(partial(self._compiler.compile, grammar))))

    def _kept(self, key: bytes, compiling: Coroutine[Any, Any, LLMatcher]) -> asyncio.Future[LLMatcher]:
        kept = self._compiled[key] = asyncio.ensure_future(compiling)
        self._compiled.move_to_end(key)
        kept.add_done_callback(partial(self._keep_or_forget, key))
        while len(self._compiled) > self._cache_size or (len(self._compiled) > 1 and self._exceeds_bytes()):
            self._compiled.popitem(last=False)
        return kept

    async def check(self, grammar: Grammar) -> None:
        try:
            await self.compile(grammar)
        except GrammarError as error:
            raise RpcError(grpc.StatusCode.INVALID_ARGUMENT, str(error)) from error

    async def attach(self, step: Step) -> Step:
        if not any(is_restricted(request.sampling) for request in step.new_requests):
            return step
        return replace(step, new_requests=[await self._attach_to(request) for request in step.new_requests])

    async def _attach_to(self, request: NewRequest) -> NewRequest:
        params = request.sampling
        if not is_restricted(params) or request.yields_vector or request.failure:
            return request
        try:
            compiled = await self._compiled_for_step(params.grammar) if params.HasField("grammar") else None
        except GrammarError as error:
            return replace(request, failure=Failure(Cause.GRAMMAR, str(error)))
        output = request.token_ids[request.num_prompt_tokens :].tolist()
        matcher = await self._run_for_step(partial(self._make_matcher, params, compiled, output))
        failure = Failure(Cause.GRAMMAR, matcher.error) if matcher.error else None
        return replace(request, matcher=matcher, failure=failure)

    def _make_matcher(self, params: SamplingParams, compiled: LLMatcher | None, output: list[int]) -> Matcher:
        """Makes a matcher and advances it over the output. On the thread of steps. compiled: the grammar, if any."""
        vocab_size, eos_token_ids = self._vocabulary
        grammar = None if compiled is None else GrammarMatcher(compiled, params, eos_token_ids)
        matcher: Matcher | None = grammar
        if params.HasField("thinking"):
            matcher = ThinkingMatcher(params, grammar, eos_token_ids, vocab_size)
        assert matcher is not None
        matcher.advance(output)
        return matcher

    def _exceeds_bytes(self) -> bool:
        return sum(map(len, self._compiled)) > _CACHED_BYTES

    def _keep_or_forget(self, key: bytes, compiled: asyncio.Future[LLMatcher]) -> None:
        """Keeps the grammar's own errors, which are permanent, and forgets others, which may be temporary."""
        error = None if compiled.cancelled() else compiled.exception()
        is_lasting = not compiled.cancelled() and (error is None or type(error) is GrammarError)
        if not is_lasting and self._compiled.get(key) is compiled:
            del self._compiled[key]

    async def _run_for_step(self, function: Callable[[], Any]) -> Any:
        if self._steps is None:
            self._steps = grammar_thread("matchers")
        return await asyncio.get_running_loop().run_in_executor(self._steps, function)

    async def _run(self, function: Callable[[], Any]) -> Any:
        if self._thread is None:
            self._thread = grammar_thread("grammars")
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    def _compile(self, grammar: bytes) -> LLMatcher:
        """Tries and compiles a grammar. On the thread."""
        self._start()
        assert self._trial is not None and self._compiler is not None
        start = time.perf_counter()
        try:
            if (digest := _digest(grammar)) not in self._tried:
                self._trial.call("check", (grammar,), self._timeout)
            self._tried[digest] = None
            self._tried.move_to_end(digest)
            if len(self._tried) > _MOST_TRIED:
                self._tried.popitem(last=False)
            return self._compiler.compile(Grammar.FromString(grammar))
        except WorkerTooSlowError as error:
            self._slow[_digest(grammar)] = time.monotonic() + _SLOW_SECONDS
            if len(self._slow) > _MOST_SLOW:
                self._slow.popitem(last=False)
            raise self._too_slow() from error
        except WorkerDiedError as error:
            logger.warning("a grammar of %d bytes ended the process that tried it: %s", len(grammar), error)
            raise GrammarError("the grammar is too large or too deeply nested to compile; simplify it") from error
        finally:
            stats.GRAMMAR_COMPILE_SECONDS.observe(time.perf_counter() - start)

    def _start(self) -> None:
        if self._compiler is None or self._trial is None:
            path = self._find_model()
            self._compiler = Compiler(path, *self._vocabulary, closes=self._closes)
            make = partial(trial_compiler, path, *self._vocabulary, closes=self._closes)
            self._trial = WorkerProcess(make, "grammar compiler")
        if not self._trial.is_alive or self._started != self._trial.pid:
            self._trial.call("started", (), _START_SECONDS)
            self._started = self._trial.pid

    def close(self) -> None:
        """Ends the thread and the process."""
        for thread in (self._thread, self._steps):
            if thread is not None:
                thread.shutdown(wait=False, cancel_futures=True)
        if self._trial is not None:
            self._trial.close()
