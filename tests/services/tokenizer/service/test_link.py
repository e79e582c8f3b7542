"""A gateway's stream: many requests, their ends, and errors of the stream itself."""

import asyncio

import grpc

from pagewire.v1 import common_pb2, inference_pb2
from pagewire.v1.inference_link_pb2 import ConnectResponse
from pagewire.v1.inference_link_pb2_grpc import InferenceLinkServiceStub
from pagewire.v1.inference_pb2_grpc import InferenceServiceStub
from pagewire.wire import rpc
from tests.services.tokenizer.service.answers import TEXT, code_of
from tests.services.tokenizer.service_line import EOS, Collected, Gateway


async def test_connect_carries_many_requests(make_line, pool, tokens) -> None:
    def script(request) -> list[int]:
        return [*tokens(f"answer {len(request.prompt_token_ids)}"), EOS]

    async with make_line(script=script, errors={1: common_pb2.RequestError(code=8, message="full")}).running(
        pool=pool
    ) as line:
        gateway = Gateway(line)
        await gateway.send({7: inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5] * 3))})
        await gateway.read_until_finished(7)
        await gateway.send({8: inference_pb2.GenerateRequest(text="x")})
        await gateway.read_until_finished(8)
        await gateway.send(
            {n: inference_pb2.GenerateRequest(token_ids=inference_pb2.TokenIds(ids=[5] * n)) for n in range(10, 40)}
            | {50: inference_pb2.GenerateRequest(text="")}
        )
        await gateway.read_until_finished(*range(10, 40), 50)
        await gateway.call.done_writing()
        assert await gateway.call.read() is grpc.aio.EOF
    assert gateway.requests[7].text == "answer 3"
    assert (gateway.requests[8].error.code, gateway.requests[8].error.message) == (8, "full")
    for n in range(10, 40):
        assert gateway.requests[n].text == f"answer {n}"
    assert gateway.requests[50].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


async def test_outputs_in_columns_say_the_same(make_line, pool) -> None:
    """Covers requests with and without logprobs; first and last outputs are messages of their own."""
    async with make_line().running(pool=pool) as line:
        gateway = Gateway(line)
        requests = {
            n: inference_pb2.GenerateRequest(
                text="x", stop=["END"] if n % 2 else [], sampling_params=common_pb2.SamplingParams(logprobs=logprobs)
            )
            for n, logprobs in enumerate([None, None, 1])
        }
        await gateway.send(requests)
        await gateway.read_until_finished(*requests)
        alone = []
        for request in requests.values():
            alone.append(Collected())
            async for response in line.stub.Generate(request):
                alone[-1].add(response)
    assert gateway.num_in_columns > 0
    for request, expected in zip(gateway.requests.values(), alone, strict=True):
        assert (request.text, request.token_ids, request.usage) == (expected.text, expected.token_ids, expected.usage)
        assert (request.logprobs, request.stop_string) == (expected.logprobs, expected.stop_string)
        assert request.prompt_token_ids == expected.prompt_token_ids


async def test_half_closed_stream_still_gets_its_answers(make_line, pool) -> None:
    async with make_line().running(pool=pool) as line:
        gateway = Gateway(line)
        await gateway.send({1: inference_pb2.GenerateRequest(text="x")})
        await gateway.call.done_writing()
        await gateway.read_until_finished(1)
        assert await gateway.call.read() is grpc.aio.EOF
    assert gateway.requests[1].text == TEXT


async def test_gateway_abort_reaches_the_scheduler_and_is_not_answered(make_line, pool) -> None:
    line = make_line(auto=False)
    async with line.running(pool=pool):
        gateway = Gateway(line)
        await gateway.send({n: inference_pb2.GenerateRequest(text="x", request_id=str(n)) for n in (1, 2)})
        await line.scheduler.until(lambda: line.scheduler.num_running == 2)
        first = next(one for one in line.scheduler.submissions if one.request.external_id == "1")
        await gateway.send(aborts=[1, 99])
        await line.scheduler.until(lambda: line.scheduler.aborted == [first.request_id])
        line.scheduler.auto = True
        line.scheduler.step()
        await gateway.read_until_finished(2)
    assert gateway.requests[1].responses == []
    assert gateway.requests[2].text == TEXT


async def test_a_vanished_gateway_ends_all_its_requests(make_line, pool) -> None:
    line = make_line(auto=False)
    async with line.running(pool=pool):
        gateway, other = Gateway(line), Gateway(line)
        await gateway.send({n: inference_pb2.GenerateRequest(text="x") for n in range(5)})
        await other.send({1: inference_pb2.GenerateRequest(text="x")})
        await line.scheduler.until(lambda: line.scheduler.num_running == 6)
        gateway.call.cancel()
        await line.scheduler.until(lambda: len(line.scheduler.aborted) == 5)
        assert line.link.num_live == 1


async def test_a_cancelled_call_is_aborted(make_line, pool) -> None:
    line = make_line(auto=False)
    async with line.running(pool=pool):
        call = line.stub.Generate(inference_pb2.GenerateRequest(text="x"))
        await line.scheduler.until(lambda: line.scheduler.num_running == 1)
        line.scheduler.step()
        assert (await call.read()).token_ids
        call.cancel()
        await line.scheduler.until(lambda: line.scheduler.aborted != [])
        assert line.link.num_live == 0


async def test_a_number_in_use_is_an_error_of_the_stream(make_line, pool) -> None:
    async with make_line(auto=False).running(pool=pool) as line:
        gateway = Gateway(line)
        await gateway.send({1: inference_pb2.GenerateRequest(text="x")})
        await gateway.send({1: inference_pb2.GenerateRequest(text="x")})
        code, details = await code_of(gateway.read())
        assert code == grpc.StatusCode.INVALID_ARGUMENT
        assert "number 1" in details


async def test_the_port_for_clients_has_no_link(make_line, pool, tmp_path) -> None:
    address = f"unix:{tmp_path}/public.sock"
    async with make_line(config={"public_listen": address}).running(pool=pool), rpc.channel(address) as channel:
        stub = InferenceServiceStub(channel)
        texts = [response.text async for response in stub.Generate(inference_pb2.GenerateRequest(text="Say"))]
        code, _ = await code_of(InferenceLinkServiceStub(channel).Connect(iter([])).read())
    assert "".join(texts) == TEXT
    assert code == grpc.StatusCode.UNIMPLEMENTED


async def test_bytes_that_are_no_message_end_the_stream(make_line, pool) -> None:
    async with make_line().running(pool=pool) as line:
        call = line.channel.stream_stream("/pagewire.v1.InferenceLinkService/Connect")()
        assert ConnectResponse.FromString(await call.read()).model
        await call.write(b"\xff\xff\xff")
        code, _ = await code_of(asyncio.wait_for(call.read(), 30))
        assert code == grpc.StatusCode.INTERNAL
