"""Beam search over gRPC, before a scheduler that knows the most probable tokens after any beginning."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.client import Client
from pagewire.services.tokenizer.generation.choices.beam_search import BeamSearch
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.v1 import common_pb2, inference_pb2, scheduler_pb2
from tests.services.tokenizer.service_line import EOS, FakeScheduler, Gateway, TokenizerLine

STOP, LENGTH = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_LENGTH
PROMPT = [100, 200, 300]


def most_probable(token_ids: Sequence[int], count: int) -> list[tuple[int, float]]:
    """Words and now and then an end, most probable first."""
    start = zlib.crc32(repr(list(token_ids)).encode())
    others = [(1000 + (start + 7919 * i) % 40_000, -0.4 * (i + 1) - start % 97 / 300) for i in range(count)]
    return [*others[:1], (EOS, others[0][1] - 0.1), *others[1 : count - 1]] if start % 5 == 0 else others


def wanted(width: int, max_tokens: int, **settings: Any) -> BeamSearch:
    search = BeamSearch(width, [EOS], max_tokens, **settings)
    while search.running:
        search.advance([most_probable([*PROMPT, *one.token_ids], search.num_continuations) for one in search.running])
    return search


class Scheduler(FakeScheduler):
    """The sampled token does not matter, and is not among the most probable ones."""

    def logprobs_of(self, request: scheduler_pb2.TokenRequest, new: Sequence[int]) -> common_pb2.Logprobs:
        top = most_probable(request.prompt_token_ids, request.sampling_params.logprobs)
        return common_pb2.Logprobs(
            entries_per_token=1 + len(top),
            token_ids=[*new, *(token_id for token_id, _ in top)],
            logprobs=[-20.0, *(logprob for _, logprob in top)],
            ranks=[4000],
        )


@pytest.fixture
def line(tmp_path: Path, smollm2_gguf: Path) -> TokenizerLine:
    return TokenizerLine(tmp_path, Scheduler(lambda request: [49_000]), smollm2_gguf)


async def search(
    line: TokenizerLine, *, n: int = 3, beam_search: inference_pb2.BeamSearch | None = None, **fields: Any
) -> list[inference_pb2.GenerateResponse]:
    params = fields.pop("sampling_params", common_pb2.SamplingParams(max_tokens=8))
    request = inference_pb2.GenerateRequest(
        n=n,
        sampling_params=params,
        beam_search=beam_search or inference_pb2.BeamSearch(),
        **({"token_ids": inference_pb2.TokenIds(ids=PROMPT)} | fields),
    )
    return [response async for response in line.stub.Generate(request)]


async def test_outputs_come_whole_and_the_best_first(line: TokenizerLine, pool: TokenizerPool) -> None:
    async with line.running(pool=pool):
        outputs = await search(line)
        single = await line.generate(token_ids=inference_pb2.TokenIds(ids=PROMPT))
    best = [output.token_ids for output in wanted(3, 8).outputs]
    assert [list(output.token_ids) for output in outputs] == best
    assert [output.index for output in outputs] == [0, 1, 2]
    assert [output.finish_reason for output in outputs] == [STOP if ids[-1] == EOS else LENGTH for ids in best]
    assert {output.finish_reason for output in outputs} == {STOP, LENGTH}
    assert [output.text for output in outputs] == [
        pool.codec.decode(ids[: -1 if ids[-1] == EOS else None], skip_special_tokens=True) for ids in best
    ]
    assert all(list(output.prompt_token_ids) == PROMPT for output in outputs)
    assert outputs[0].usage.cached_tokens == single.usage.cached_tokens
    asked = line.scheduler.requests[0].sampling_params
    assert (asked.max_tokens, asked.logprobs) == (1, 4), "n tokens that go on, and the one that ends"


@pytest.mark.parametrize("settings", [{"length_penalty": 0.0}, {"length_penalty": 3.0}, {"early_stopping": True}])
async def test_settings(line: TokenizerLine, pool: TokenizerPool, settings: dict[str, Any]) -> None:
    async with line.running(pool=pool):
        outputs = await search(line, beam_search=inference_pb2.BeamSearch(**settings))
    assert [list(output.token_ids) for output in outputs] == [o.token_ids for o in wanted(3, 8, **settings).outputs]


async def test_logprobs_are_those_of_the_output(line: TokenizerLine, pool: TokenizerPool) -> None:
    params = common_pb2.SamplingParams(max_tokens=8, logprobs=2, temperature=0.1, top_p=0.2, seed=9)
    async with line.running(pool=pool):
        outputs = await search(line, sampling_params=params)
    for output, expected in zip(outputs, wanted(3, 8).outputs, strict=True):
        assert [token.token_id for token in output.logprobs] == expected.token_ids
        assert sum(token.logprob for token in output.logprobs) == pytest.approx(expected.logprob, rel=1e-5)
        beginnings = [[*PROMPT, *expected.token_ids[:index]] for index in range(len(expected.token_ids))]
        tops = [[token_id for token_id, _ in most_probable(beginning, 4)[:2]] for beginning in beginnings]
        assert [[top.token_id for top in token.top_logprobs] for token in output.logprobs] == tops


async def test_what_ends_an_output(line: TokenizerLine, pool: TokenizerPool) -> None:
    (first, *_), _ = most_probable(PROMPT, 2)
    async with line.running(pool=pool):
        endless = await search(line, sampling_params=common_pb2.SamplingParams(max_tokens=8, ignore_eos=True))
        params = common_pb2.SamplingParams(max_tokens=8, stop_token_ids=[first])
        (stopped,) = await search(
            line, n=1, beam_search=inference_pb2.BeamSearch(early_stopping=True), sampling_params=params
        )
    assert all(output.finish_reason == LENGTH and len(output.token_ids) == 8 for output in endless)
    assert (list(stopped.token_ids), stopped.finish_reason, stopped.stop_token_id) == ([first], STOP, first)


async def test_a_search_ends_where_the_model_does(line: TokenizerLine, pool: TokenizerPool) -> None:
    line.scheduler.max_model_len = len(PROMPT) + 5
    async with line.running(pool=pool):
        outputs = await search(line, sampling_params=common_pb2.SamplingParams(ignore_eos=True))
    assert [len(output.token_ids) for output in outputs] == [5, 5, 5]


async def test_it_survives_the_schedulers_death(line: TokenizerLine, pool: TokenizerPool) -> None:
    line.scheduler.auto = False
    async with line.running(pool=pool):
        task = asyncio.create_task(search(line))
        for num_requests in (1, 4):
            await line.scheduler.until(lambda count=num_requests: len(line.scheduler.requests) == count)
            line.scheduler.step()
        await line.scheduler.until(lambda: line.scheduler.num_running == 3)
        await line.kill_scheduler()
        line.scheduler.auto = True
        await line.start_scheduler()
        outputs = await task
    assert [list(output.token_ids) for output in outputs] == [output.token_ids for output in wanted(3, 8).outputs]


async def test_only_its_first_request_is_turned_away(line: TokenizerLine, pool: TokenizerPool) -> None:
    line.scheduler.max_running = 1
    async with line.running(pool=pool):
        assert len(await search(line)) == 3
        line.scheduler.max_running = 0
        with pytest.raises(grpc.aio.AioRpcError, match="too many wait"):
            await search(line)


async def test_a_cancelled_search_leaves_nothing(line: TokenizerLine, pool: TokenizerPool) -> None:
    line.scheduler.auto = False
    async with line.running(pool=pool):
        task = asyncio.create_task(search(line))
        await line.scheduler.until(lambda: line.scheduler.num_running == 1)
        line.scheduler.step()
        await line.scheduler.until(lambda: line.scheduler.num_running == 3)
        task.cancel()
        await line.scheduler.until(lambda: line.scheduler.num_running == 0)
        await asyncio.wait_for(line.generator.live.drained(), 10)


async def test_a_search_is_ended_by_its_id(line: TokenizerLine, pool: TokenizerPool) -> None:
    line.scheduler.auto = False
    async with line.running(pool=pool):
        task = asyncio.create_task(search(line, request_id="mine"))
        await line.scheduler.until(lambda: line.scheduler.num_running == 1)
        answers = [
            await line.stub.AbortRequests(inference_pb2.AbortRequestsRequest(request_ids=["mine"])) for _ in range(2)
        ]
        with pytest.raises(grpc.aio.AioRpcError, match="ended by its id"):
            await task
        await line.scheduler.until(lambda: line.scheduler.num_running == 0)
    assert [answer.num_aborted for answer in answers] == [1, 0]


PARAMS = common_pb2.SamplingParams
FORCED = inference_pb2.OutputParsing(named="f")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"sampling_params": PARAMS(presence_penalty=1)}, "presence_penalty cannot be combined"),
        ({"sampling_params": PARAMS(min_tokens=2)}, "min_tokens"),
        ({"sampling_params": PARAMS(grammar=common_pb2.Grammar(regex="a"))}, "grammar"),
        ({"sampling_params": PARAMS(allowed_token_ids=[3])}, "allowed_token_ids"),
        ({"sampling_params": PARAMS(prompt_logprobs=1)}, "prompt_logprobs"),
        ({"sampling_params": PARAMS(max_tokens=0)}, "max_tokens is 0"),
        ({"stop": ["x"], "bad_words": ["y"]}, "stop, bad_words"),
        ({"output_parsing": FORCED}, "tool_choice"),
        ({"best_of": 5}, "leave out best_of"),
        ({"n": 130}, "within 1..128"),
        ({"n": 20}, "21 most probable tokens, and this model returns at most 20: lower n"),
        ({"beam_search": inference_pb2.BeamSearch(length_penalty=20)}, "length_penalty is 20"),
        ({"beam_search": inference_pb2.BeamSearch(length_penalty=float("nan"))}, "length_penalty is nan"),
    ],
)
async def test_what_does_not_go_together_is_refused(
    line: TokenizerLine, pool: TokenizerPool, fields: dict[str, Any], message: str
) -> None:
    async with line.running(pool=pool):
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await search(line, **fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_others_go_on_beside_it(line: TokenizerLine, pool: TokenizerPool) -> None:
    async with line.running(pool=pool), Client(line.config.listen) as client:
        gateway = Gateway(line)
        await gateway.send({1: inference_pb2.GenerateRequest(text="Say")})
        beams = client.generate(PROMPT, n=2, beam_search=inference_pb2.BeamSearch(), max_tokens=8)
        outputs = [list(response.token_ids) async for response in beams]
        await gateway.read_until_finished(1)
    assert outputs == [output.token_ids for output in wanted(2, 8).outputs]
