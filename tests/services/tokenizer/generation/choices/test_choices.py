"""Several outputs of one prompt over gRPC, with a scheduler that derives tokens from the seed."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from pagewire.client import Client
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.v1 import common_pb2, inference_pb2, scheduler_pb2
from pagewire.wire.rpc import RpcError
from tests.services.tokenizer.service_line import EOS, Collected, FakeScheduler, Gateway, TokenizerLine

# By seed.
TEXTS = {7: "one, two and so on", 8: "quite another text than that", 9: "short", 10: "the last of them"}


@pytest.fixture
def line(tmp_path: Path, smollm2_gguf: Path, pool: TokenizerPool) -> TokenizerLine:
    def script(request: scheduler_pb2.TokenRequest) -> list[int]:
        return [*pool.codec.encode_text(TEXTS[request.sampling_params.seed], add_special_tokens=False), EOS]

    return TokenizerLine(tmp_path, FakeScheduler(script, logprob=_logprob), smollm2_gguf)


def _logprob(request: scheduler_pb2.TokenRequest) -> float:
    """Of each token: the longest text has the highest mean and the lowest sum."""
    return {7: -0.9, 8: -0.5, 9: -1.1, 10: -2.0}[request.sampling_params.seed]


async def collect(line: TokenizerLine, **fields: object) -> dict[int, Collected]:
    outputs: dict[int, Collected] = {}
    async for response in line.stub.Generate(inference_pb2.GenerateRequest(text="Say", **fields)):  # type: ignore[arg-type]
        outputs.setdefault(response.index, Collected()).add(response)
    return outputs


SEEDED = common_pb2.SamplingParams(seed=7)


async def test_each_output_is_a_sample_of_its_own(line: TokenizerLine, pool: TokenizerPool) -> None:
    async with line.running(pool=pool):
        outputs = await collect(line, n=3, sampling_params=SEEDED)
    assert {index: output.text for index, output in outputs.items()} == {i: TEXTS[7 + i] for i in range(3)}
    assert all(output.finish_reason == common_pb2.FINISH_REASON_STOP for output in outputs.values())
    assert [len(output.responses) > 2 for output in outputs.values()] == [True, True, False], "as they are generated"
    assert len({tuple(output.prompt_token_ids) for output in outputs.values()}) == 1


async def test_the_prompt_is_encoded_once(
    line: TokenizerLine, pool: TokenizerPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TokenizerPool, "encodes_at_once", lambda self, text: False)
    encoded = []
    encode = pool.encode_text
    monkeypatch.setattr(pool, "encode_text", lambda text, **kwargs: encoded.append(text) or encode(text, **kwargs))
    async with line.running(pool=pool):
        await collect(line, n=4, sampling_params=SEEDED)
    assert encoded == ["Say"]


async def test_the_best_are_those_of_the_highest_mean_logprob(line: TokenizerLine, pool: TokenizerPool) -> None:
    async with line.running(pool=pool):
        outputs = await collect(line, n=2, best_of=4, sampling_params=SEEDED)
        with_logprobs = await collect(line, best_of=2, sampling_params=common_pb2.SamplingParams(seed=7, logprobs=1))
    assert [(index, output.text) for index, output in outputs.items()] == [(0, TEXTS[8]), (1, TEXTS[7])]
    assert not any(output.logprobs for output in outputs.values())
    num_generated = sum(len(line.scheduler.script(request)) for request in line.scheduler.requests[:4])
    assert sum(output.usage.completion_tokens for output in outputs.values()) == num_generated
    (best,) = with_logprobs.values()
    assert best.text == TEXTS[8] and len(best.logprobs) == len(best.token_ids)
    assert [len(token.top_logprobs) for token in best.logprobs] == [1] * len(best.token_ids)


async def test_a_cancelled_call_ends_all_outputs(line: TokenizerLine, pool: TokenizerPool) -> None:
    line.scheduler.auto = False
    async with line.running(pool=pool):
        call = line.stub.Generate(inference_pb2.GenerateRequest(text="Say", n=3, sampling_params=SEEDED))
        await line.scheduler.until(lambda: line.scheduler.num_running == 3)
        call.cancel()
        await line.scheduler.until(lambda: line.scheduler.num_running == 0)


async def test_an_error_of_one_output_ends_the_call(line: TokenizerLine, pool: TokenizerPool) -> None:
    line.scheduler.errors[1] = common_pb2.RequestError(code=8, message="too many wait")
    async with line.running(pool=pool):
        with pytest.raises(grpc.aio.AioRpcError, match="too many wait"):
            await collect(line, n=3, sampling_params=SEEDED)
        await line.scheduler.until(lambda: line.scheduler.num_running == 0)


async def test_outputs_survive_the_schedulers_death(line: TokenizerLine, pool: TokenizerPool) -> None:
    line.scheduler.auto = False
    async with line.running(pool=pool):
        task = asyncio.create_task(collect(line, n=2, best_of=3, sampling_params=SEEDED))
        await line.scheduler.until(lambda: line.scheduler.num_running == 3)
        line.scheduler.step()
        await line.kill_scheduler()
        line.scheduler.auto = True
        await line.start_scheduler()
        assert [output.text for output in (await task).values()] == [TEXTS[8], TEXTS[7]]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"n": 129}, "n is 129; it must be within 1..128"),
        ({"n": -1}, "n is -1"),
        ({"best_of": 200}, "best_of is 200"),
        ({"n": 3, "best_of": 2}, "best_of is 2, less than n, which is 3"),
    ],
)
async def test_impossible_counts_are_refused(
    line: TokenizerLine, pool: TokenizerPool, fields: dict[str, object], message: str
) -> None:
    async with line.running(pool=pool):
        with pytest.raises(grpc.aio.AioRpcError, match=message) as caught:
            await collect(line, **fields)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("fields", [{"n": 2}, {"best_of": 1}, {"beam_search": inference_pb2.BeamSearch()}])
async def test_a_gateways_request_is_for_one_output(
    line: TokenizerLine, pool: TokenizerPool, fields: dict[str, object]
) -> None:
    async with line.running(pool=pool):
        gateway = Gateway(line)
        await gateway.send({1: inference_pb2.GenerateRequest(text="Say", **fields)})  # type: ignore[arg-type]
        await gateway.read_until_finished(1)
    error = gateway.requests[1].error
    assert error is not None and "here each output is a separate request" in error.message


async def test_the_python_client_separates_outputs(line: TokenizerLine, pool: TokenizerPool) -> None:
    texts = {0: "", 1: ""}
    async with line.running(pool=pool), Client(line.config.listen) as client:
        async for response in client.generate("Say", n=2, seed=7):
            texts[response.index] += response.text
        best = [response.text async for response in client.generate("Say", best_of=3, seed=7)]
        with pytest.raises(RpcError, match="best_of is 1"):
            async for _ in client.generate("Say", n=2, best_of=1, seed=7):
                pass
    assert texts == {0: TEXTS[7], 1: TEXTS[8]} and best == [TEXTS[8]]
