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
from pagewire.services.executor.grammar.errors import GrammarError, NoTrialError, PassingGrammarError
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
_STARTS = 2  # attempts
# Of the grammars that are kept. A compiled one takes some 500 times its own bytes.
_CACHED_BYTES = 1024 * 1024
_MOST_TRIED = 100_000
# For which a grammar that took too much time or memory is refused without another trial. Afterwards the machine may be
# less busy.
_REFUSED_SECONDS, _MOST_REFUSED = 60.0, 1000


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
        # Digests of grammars that are refused: until when, and why.
        self._refused: OrderedDict[bytes, tuple[float, str]] = OrderedDict()
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
        until, reason = self._refused.get(_digest(key), (0.0, ""))
        if until > time.monotonic():
            raise PassingGrammarError(reason)
        async with self._turns.of(len(key)):
            return await self._run(partial(self._compile, key))

    def _refuse(self, grammar: bytes, reason: str) -> PassingGrammarError:
        """Refuses the grammar for a while, and returns the error for now."""
        self._refused[_digest(grammar)] = (time.monotonic() + _REFUSED_SECONDS, reason)
        if len(self._refused) > _MOST_REFUSED:
            self._refused.popitem(last=False)
        return PassingGrammarError(reason)

    def _on_complex(self, grammar: bytes, compiled: LLMatcher | None) -> None:
        """Forgets a compiled grammar that an output could not follow, with the memory that its outputs have filled. The
        next request compiles it, without another trial, for which steps would wait."""
        found = self._compiled.get(grammar)
        is_kept = found is not None and found.done() and not found.cancelled() and found.exception() is None
        if found is not None and is_kept and found.result() is compiled:
            del self._compiled[grammar]

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
        except NoTrialError as error:
            raise RpcError(grpc.StatusCode.UNAVAILABLE, str(error)) from error
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
        output, loop = request.token_ids[request.num_prompt_tokens :].tolist(), asyncio.get_running_loop()
        matcher = await self._run_for_step(partial(self._make_matcher, params, compiled, output, loop))
        failure = Failure(Cause.GRAMMAR, matcher.error) if matcher.error else None
        return replace(request, matcher=matcher, failure=failure)

    def _make_matcher(
        self, params: SamplingParams, compiled: LLMatcher | None, output: list[int], loop: asyncio.AbstractEventLoop
    ) -> Matcher:
        """Makes a matcher and advances it over the output. On the thread of steps.

        compiled: the grammar, if any. loop: that of the service.
        """

        def forget() -> None:
            loop.call_soon_threadsafe(self._on_complex, params.grammar.SerializeToString(deterministic=True), compiled)

        vocab_size, eos_token_ids = self._vocabulary
        grammar = None if compiled is None else GrammarMatcher(compiled, params, eos_token_ids, forget)
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
        compiler, start = self._start(), time.perf_counter()
        try:
            if (digest := _digest(grammar)) not in self._tried:
                self._try(grammar)
            self._tried.pop(digest, None)  # not move_to_end(): the event loop may have forgotten it meanwhile
            self._tried[digest] = None
            if len(self._tried) > _MOST_TRIED:
                self._tried.popitem(last=False)
            return compiler.compile(Grammar.FromString(grammar))
        finally:
            stats.GRAMMAR_COMPILE_SECONDS.observe(time.perf_counter() - start)

    def _try(self, grammar: bytes) -> None:
        """Has the process try a grammar. A process that dies may have been killed for another reason, so the grammar is
        tried twice."""
        for is_last in (False, True):
            trial = self._started_trial()
            try:
                return trial.call("check", (grammar,), self._timeout)
            except WorkerTooSlowError as error:
                raise self._refuse(
                    grammar,
                    f"the grammar takes longer than {self._timeout:g} s to compile; simplify it, or raise the "
                    "executor's --grammar-compile-timeout",
                ) from error
            except WorkerDiedError as error:
                logger.warning("the process that tried a grammar of %d bytes ended: %s", len(grammar), error)
                if is_last:
                    reason = "the grammar is too large or too deeply nested to compile; simplify it"
                    raise self._refuse(grammar, reason) from error
        raise AssertionError

    def _start(self) -> Compiler:
        if self._compiler is None:
            path = self._find_model()
            compiler = Compiler(path, *self._vocabulary, closes=self._closes)
            make = partial(trial_compiler, path, *self._vocabulary, closes=self._closes)
            self._trial = WorkerProcess(make, "grammar compiler")
            self._compiler = compiler
        return self._compiler

    def _started_trial(self) -> WorkerProcess:
        """Returns the process with the vocabulary read. Raises NoTrialError."""
        assert self._trial is not None
        if self._trial.is_alive and self._started == self._trial.pid:
            return self._trial
        for _ in range(_STARTS):
            try:
                self._trial.call("started", (), _START_SECONDS)
                self._started = self._trial.pid
                return self._trial
            except (WorkerDiedError, WorkerTooSlowError) as error:
                logger.warning("the process that tries grammars does not start: %s", error)
        raise NoTrialError(
            "the executor's process that tries grammars does not start, as its log says; try again later, or send the "
            "request without a grammar"
        )

    def close(self) -> None:
        """Ends the thread and the process."""
        for thread in (self._thread, self._steps):
            if thread is not None:
                thread.shutdown(wait=False, cancel_futures=True)
        if self._trial is not None:
            self._trial.close()
