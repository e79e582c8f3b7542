"""Outputs with a grammar, from the real scheduler and the real executor with a tiny model of random weights."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from pagewire.config import ExecutorConfig
from pagewire.files.tokenizer_files.loaded_tokenizer import LoadedTokenizer
from pagewire.services.executor.grammar import grammars
from pagewire.services.executor.grammar.compiler import Compiler
from pagewire.services.executor.grammar.grammars import Grammars
from pagewire.services.executor.runner.executor_info import ExecutorInfo
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.service.worker import Worker
from pagewire.v1 import executor_pb2_grpc, scheduler_pb2
from pagewire.v1.common_pb2 import FinishReason, Grammar, SamplingParams
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from pagewire.wire import rpc
from tests.e2e.stack.test_scheduler_and_executor import Stub, scheduler
from tests.services.executor.grammar.schemas import SCHEMAS
from tests.services.executor.helpers.constrained import (
    CHOICES,
    DIGITS,
    EBNF,
    EOS,
    LARK,
    PERSON,
    constrained_runner,
    fits,
    one_of,
    save_constrained,
)
from tests.services.executor.helpers.servicers import servicer_of
from tests.services.executor.helpers.stepping import BLOCK_SIZE

GRAMMARS = {
    "schema": Grammar(json_schema=json.dumps(PERSON)),
    "dense schema": Grammar(json_schema=json.dumps(PERSON), disable_any_whitespace=True),
    "regex": Grammar(regex=DIGITS),
    "choice": one_of(CHOICES),
    "gbnf": Grammar(ebnf=EBNF),
    "lark": Grammar(ebnf=LARK),
}
# Its outputs are short: steps of different sizes round differently, and the longer an output, the likelier that one of
# its tokens depends on that.
DENSE = GRAMMARS["dense schema"]
PROMPT = list(range(5, 25))
pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass(frozen=True)
class Tiny:
    path: Path
    tokenizer: LoadedTokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    path = tmp_path_factory.mktemp("constrained")
    return Tiny(path, save_constrained(path))


@dataclass
class Output:
    token_ids: list[int] = field(default_factory=list)
    reason: int = 0

    def text(self, tiny: Tiny) -> str:
        return tiny.tokenizer.decode(self.token_ids, skip_special_tokens=True)


@asynccontextmanager
async def executor(address: str, tiny: Tiny, num_blocks: int = 320, timeout: float = 20.0) -> AsyncIterator[Worker]:
    worker = Worker(lambda: constrained_runner(tiny.path, num_blocks), on_cuda=False)

    def make_grammars(info: ExecutorInfo) -> Grammars:
        return Grammars(lambda: tiny.path, info.vocab_size, info.eos_token_ids, timeout=timeout, cache_size=16)

    servicer = servicer_of(worker, ExecutorConfig(), make_grammars)
    server = rpc.Server([address], shutdown_timeout=1.0)
    add = executor_pb2_grpc.add_ExecutorServiceServicer_to_server
    server.add(servicer, add, "pagewire.v1.ExecutorService")
    await server.start()
    worker.start()
    try:
        yield worker
    finally:
        await server.stop()
        await asyncio.to_thread(worker.stop)
        await servicer.close()


@asynccontextmanager
async def served(tmp_path: Path, tiny: Tiny, **options: Any) -> AsyncIterator[Stub]:
    address = f"unix:{tmp_path}/executor.sock"
    async with executor(address, tiny, **options), scheduler(tmp_path, "scheduler", address) as stub:
        yield stub


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stub(tmp_path_factory: pytest.TempPathFactory, tiny: Tiny) -> AsyncIterator[Stub]:
    async with served(tmp_path_factory.mktemp("line"), tiny) as stub:
        yield stub


async def generate(
    stub: Stub,
    grammar: Grammar | None = None,
    prompt: list[int] = PROMPT,
    resumed: list[int] | None = None,
    **params: Any,
) -> Output:
    request = scheduler_pb2.TokenRequest(
        prompt_token_ids=prompt,
        sampling_params=SamplingParams(grammar=grammar, **{"seed": 1, "max_tokens": 400} | params),
    )
    output = Output(list(resumed or ()))
    if resumed:
        collected = await stub.submit(TokenSubmission(request=request, resume_token_ids=resumed))
        output.token_ids += collected.token_ids[0]
        (output.reason,) = collected.finish_reasons[0]
        return output
    async for response in stub.Generate(scheduler_pb2.SchedulerServiceGenerateRequest(request=request)):
        output.token_ids += response.token_ids
        output.reason = response.finish_reason
    return output


@pytest.mark.parametrize("name", GRAMMARS)
async def test_whatever_a_model_says_fits_the_grammar(stub: Stub, tiny: Tiny, name: str) -> None:
    grammar = GRAMMARS[name]
    outputs = await asyncio.gather(
        *(
            generate(stub, grammar, [*PROMPT, 30 + seed], seed=seed, temperature=temperature)
            for seed in range(2)
            for temperature in (0, 1.5)
        )
    )
    ended = [output for output in outputs if output.reason == FinishReason.FINISH_REASON_STOP]
    assert len(ended) >= len(outputs) // 2
    for output in ended:
        assert output.token_ids[-1] == EOS
        assert fits(grammar, output.text(tiny)), output.text(tiny)
    assert len({output.text(tiny) for output in outputs}) > 1, "it is the model that chooses"


async def test_every_schema_is_kept_to(stub: Stub, tiny: Tiny) -> None:
    grammars = [Grammar(json_schema=json.dumps(schema)) for schema in SCHEMAS.values()]
    outputs = await asyncio.gather(*(generate(stub, grammar, temperature=1.5) for grammar in grammars))
    for name, grammar, output in zip(SCHEMAS, grammars, outputs, strict=True):
        assert output.reason == FinishReason.FINISH_REASON_STOP, (name, output.text(tiny))
        assert fits(grammar, output.text(tiny)), (name, output.text(tiny))


async def test_neighbours_without_a_grammar_are_as_alone(stub: Stub) -> None:
    free = {"temperature": 1.0, "max_tokens": 40}
    prompts = [[*PROMPT, 60 + index] for index in range(3)]
    grammars = [grammar for name, grammar in GRAMMARS.items() if name != "schema"]  # of which outputs are long
    alone = [await generate(stub, None, prompt, **free) for prompt in prompts]
    constrained = [await generate(stub, grammar, temperature=1.0) for grammar in grammars]
    mixed = await asyncio.gather(
        *(generate(stub, None, prompt, **free) for prompt in prompts),
        *(generate(stub, grammar, temperature=1.0) for grammar in grammars),
    )
    assert mixed == [*alone, *constrained]


SAMPLING: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "biased against the grammar": {"logit_bias_ids": [EOS], "logit_bias_values": [100.0]},
    "truncated": {"top_k": 3, "top_p": 0.5, "min_p": 0.1},
    "log probabilities": {"logprobs": 5},
    "no end": {"ignore_eos": True},
    "many tokens at least": {"min_tokens": 300},
}


@pytest.mark.parametrize("name", SAMPLING)
async def test_every_sampling_parameter_keeps_to_the_grammar(stub: Stub, tiny: Tiny, name: str) -> None:
    grammars = [GRAMMARS["dense schema"], GRAMMARS["regex"], GRAMMARS["choice"]]
    wanted = (generate(stub, grammar, temperature=0.8, **SAMPLING[name]) for grammar in grammars)
    for grammar, output in zip(grammars, await asyncio.gather(*wanted), strict=True):
        assert output.reason == FinishReason.FINISH_REASON_STOP
        assert fits(grammar, output.text(tiny)), output.text(tiny)


async def test_the_end_is_put_off_as_far_as_the_grammar_goes(stub: Stub, tiny: Tiny) -> None:
    """EOS is what this request wants most, wherever it may have it."""
    eager: dict[str, Any] = {"logit_bias_ids": [EOS], "logit_bias_values": [100.0], "temperature": 0}
    grammar = Grammar(regex="[ab]{2,9}")
    assert len((await generate(stub, grammar, **eager)).text(tiny)) == 2
    assert len((await generate(stub, grammar, **eager, ignore_eos=True)).text(tiny)) == 9
    assert 5 <= len((await generate(stub, grammar, **eager, min_tokens=5)).text(tiny)) < 9
    assert len((await generate(stub, grammar, **eager, min_tokens=200)).text(tiny)) == 9


async def test_only_tokens_that_are_allowed_besides(stub: Stub, tiny: Tiny) -> None:
    token_ids = {digit: tiny.tokenizer.backend.token_to_id(digit) for digit in "0123456789-a"}
    grammar = Grammar(regex="[0-9]{3}-[0-9]{4}")
    for temperature in (0, 1.5):
        allowed = [token_ids[char] for char in "357-"]
        output = await generate(stub, grammar, temperature=temperature, allowed_token_ids=allowed)
        assert re.fullmatch("[357]{3}-[357]{4}", output.text(tiny))
        assert output.reason == FinishReason.FINISH_REASON_STOP
    with pytest.raises(grpc.aio.AioRpcError, match="none of allowed_token_ids may follow"):
        await generate(stub, grammar, allowed_token_ids=[token_ids["3"]])


async def test_a_resumed_output_goes_on_where_it_was(stub: Stub) -> None:
    grammar = DENSE
    whole = await generate(stub, grammar, temperature=0.7)
    assert whole.reason == FinishReason.FINISH_REASON_STOP
    beginnings = [whole.token_ids[:known] for known in range(1, len(whole.token_ids), 5)]
    resumed = (generate(stub, grammar, resumed=known, temperature=0.7) for known in beginnings)
    assert await asyncio.gather(*resumed) == [whole] * len(beginnings)
    with pytest.raises(rpc.RpcError, match="does not fit") as raised:
        await generate(stub, grammar, resumed=[*whole.token_ids[:4], 9, 9, 9])
    assert raised.value.code == grpc.StatusCode.INVALID_ARGUMENT


async def test_preemption_changes_nothing(tmp_path: Path, tiny: Tiny, stub: Stub) -> None:
    prompts = [[*PROMPT, 100 + index] for index in range(5)]

    async def outputs(stub: Stub, max_tokens: int) -> list[Output]:
        wanted = (generate(stub, DENSE, prompt, temperature=0.7, max_tokens=max_tokens) for prompt in prompts)
        return await asyncio.gather(*wanted)

    expected = await outputs(stub, 400)
    most = max(len(output.token_ids) for output in expected) + 1  # more is refused where the context is smaller
    async with served(tmp_path, tiny, num_blocks=(len(prompts[0]) + most) // BLOCK_SIZE + 4) as cramped:
        assert await outputs(cramped, most) == expected


async def test_an_executor_that_dies_takes_no_output_along(tmp_path: Path, tiny: Tiny) -> None:
    address = f"unix:{tmp_path}/executor.sock"
    prompts = [[*PROMPT, 100 + index] for index in range(4)]
    async with scheduler(tmp_path, "scheduler", address) as stub:

        async def outputs() -> list[Output]:
            wanted = (generate(stub, DENSE, prompt, temperature=0.7) for prompt in prompts)
            return await asyncio.gather(*wanted)

        async with executor(address, tiny):
            expected = await outputs()
        interrupted = asyncio.create_task(outputs())
        for num_steps in (3, 9, 14):
            async with dying_executor(address, tiny, num_steps):
                pass
        async with executor(address, tiny):
            assert await asyncio.wait_for(interrupted, 60) == expected


@asynccontextmanager
async def dying_executor(address: str, tiny: Tiny, num_steps: int) -> AsyncIterator[None]:
    """Serves until its device fails, after so many steps, in one of several requests, so that no request is a suspect:
    all it knew is lost."""
    done, loop = asyncio.Event(), asyncio.get_running_loop()
    runner_of = ModelRunner.execute
    count, is_gone = 0, False

    def execute(self: ModelRunner, step: Any, *args: Any) -> Any:
        nonlocal count, is_gone
        count += bool(step.request_ids)
        is_gone |= count >= num_steps and len(step.request_ids) > 1
        if is_gone:
            loop.call_soon_threadsafe(done.set)
            raise RuntimeError("the device is gone")
        return runner_of(self, step, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelRunner, "execute", execute)
        async with executor(address, tiny):
            await asyncio.wait_for(done.wait(), 20)
            yield


REFUSED = {
    "no regex": (Grammar(regex="(a"), "regex: .*unclosed group"),
    "look-ahead": (Grammar(regex="(?=a)b"), "regex: .*look-around"),
    "no JSON": (Grammar(json_schema="{"), "json_schema is not JSON"),
    "no schema": (Grammar(json_schema="[1]"), "must be an object"),
    "unknown type": (
        Grammar(json_schema='{"properties": {"a": {"items": {"type": "strin"}}}}'),
        "#/properties/a/items/type: Invalid type: strin",
    ),
    "not guaranteed": (
        Grammar(json_schema='{"properties": {"a/b": {"type": "array", "uniqueItems": true}}}'),
        "json_schema at #/properties/a~1b/uniqueItems",
    ),
    "bad pattern": (Grammar(json_schema='{"properties": {"a": {"pattern": "(a"}}}'), "#/properties/a/pattern"),
    "dangling reference": (Grammar(json_schema='{"items": {"$ref": "#/nowhere"}}'), r"#/items/\$ref"),
    "references itself": (Grammar(json_schema='{"$ref": "#"}'), "nothing matches"),
    "no EBNF": (Grammar(ebnf="root ::= nowhere"), "ebnf: .*nowhere"),
    "no tag": (Grammar(structural_tag="{}"), "structural_tag: it must be"),
    "nothing": (Grammar(), "grammar is empty"),
    "no choice": (one_of([]), "grammar is empty"),
    "whitespace of what": (Grammar(regex="a", disable_any_whitespace=True), "are for json_schema, not for regex"),
    "too large": (Grammar(regex="a" * (2**20 + 1)), "1048576 are possible"),
    "too deep": (
        Grammar(ebnf="start: r0\n" + "".join(f'r{i}: "x" r{i + 1} | r{i + 1}\n' for i in range(20000)) + 'r20000: "y"'),
        "too large or too deeply nested",
    ),
    "a schema of 50000 levels": (Grammar(json_schema='{"items":' * 50000 + "{}" + "}" * 50000), "json_schema"),
    "explosive": (Grammar(regex="a?" * 2000 + "a" * 2000), "regex: it is too complex; give it fewer"),
}


class StuckCompiler(Compiler):
    def check(self, grammar: bytes) -> None:
        time.sleep(600)


async def test_a_grammar_that_takes_too_long_ends_alone(
    tmp_path: Path, tiny: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars, "trial_compiler", StuckCompiler)
    message = r"takes longer than 0.2 s to compile; simplify it, or raise .*--grammar-compile-timeout"
    async with served(tmp_path, tiny, timeout=0.2) as stub:
        other = asyncio.create_task(generate(stub, None, max_tokens=40))
        with pytest.raises(grpc.aio.AioRpcError, match=message) as raised:
            await generate(stub, DENSE)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert len((await other).token_ids) == 40


async def test_what_cannot_be_compiled_ends_alone(stub: Stub, tiny: Tiny) -> None:
    others = asyncio.gather(*(generate(stub, DENSE, seed=seed, temperature=0.7) for seed in range(8)))
    for name, (grammar, message) in REFUSED.items():
        with pytest.raises(grpc.aio.AioRpcError, match=message) as raised:
            await generate(stub, grammar)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT, name
        assert len(raised.value.details() or "") < 700
    assert all(fits(DENSE, output.text(tiny)) for output in await others)
