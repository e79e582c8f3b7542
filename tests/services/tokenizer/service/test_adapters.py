"""Adapters by name: what a request's model stands for, and that its contents stay the same."""

import asyncio
from typing import Any

import grpc
import pytest

from pagewire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2
from pagewire.v1.inference_link_pb2 import GenerateSubmission
from tests.services.tokenizer.service.answers import code_of
from tests.services.tokenizer.service_line import Gateway, TokenizerLine


@pytest.fixture
def line_of(make_line) -> Any:
    def make(**adapters: str) -> TokenizerLine:
        made = make_line(
            config={"served_model_name": "m"}, adapters=adapters, adapter_files={"found": "ff", "/b": "bb"}
        )
        assert isinstance(made, TokenizerLine)
        return made

    return make


def admin(line: TokenizerLine) -> admin_pb2_grpc.AdminServiceStub:
    return admin_pb2_grpc.AdminServiceStub(line.channel)


@pytest.mark.parametrize(
    ("model", "adapter", "digest"),
    [("", "", ""), ("m", "", ""), ("x", "x", "xx"), ("m:x", "x", "xx"), ("found", "found", "ff")],
)
async def test_the_model_names_the_adapter(line_of, pool, model: str, adapter: str, digest: str) -> None:
    async with line_of(x="xx").running(pool=pool) as line:
        result = await line.generate(text="Say", model=model)
    (submission,) = line.scheduler.submissions
    assert (submission.request.adapter, submission.adapter_digest) == (adapter, digest)
    assert [response.adapter_digest for response in result.responses] == [digest, *[""] * (len(result.responses) - 1)]


async def test_an_unknown_name_is_not_found(line_of, pool) -> None:
    async with line_of(x="xx").running(pool=pool) as line:
        for call in (
            line.generate(text="x", model="other"),
            line.stub.Tokenize(inference_pb2.TokenizeRequest(text="x", model="m:other")),
        ):
            code, details = await code_of(call)
            assert code is grpc.StatusCode.NOT_FOUND and "served here: m, x" in details


async def test_only_what_was_read_is_named_as_served(line_of, pool) -> None:
    line = line_of(x="xx")
    line.scheduler.adapter_problems = {"bad": "it has rank 64"}
    async with line.running(pool=pool):
        code, details = await code_of(line.generate(text="x", model="other"))
        assert code is grpc.StatusCode.NOT_FOUND and details.endswith("served here: m, x")
        for name in ("bad", "m:bad"):
            code, details = await code_of(line.generate(text="x", model=name))
            assert (code, details) == (
                grpc.StatusCode.NOT_FOUND,
                "the adapter 'bad' cannot be served: it has rank 64",
            )
        models = (await line.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert [model.id for model in models] == ["m", "x", "found"]
    assert not line.scheduler.adapters_asked_for


async def test_unknown_names_cost_schedulers_nothing(line_of, pool) -> None:
    async with line_of(x="xx").running(pool=pool) as line:
        for name in ("other", "../x", "x" * 10_000, "m:", "x:m", "\n"):
            code, details = await code_of(line.generate(text="x", model=name))
            assert code is grpc.StatusCode.NOT_FOUND and len(details) < 300
        await line.generate(text="x", model="found")
    assert line.scheduler.adapters_asked_for == ["found"]


async def test_tokens_are_those_of_the_model(line_of, pool) -> None:
    async with line_of(x="xx").running(pool=pool) as line:
        of_model, of_adapter = [
            await line.stub.Tokenize(inference_pb2.TokenizeRequest(text="Say", model=model)) for model in ("m", "x")
        ]
    assert of_adapter.token_ids == of_model.token_ids


async def test_adapters_compute_no_vectors(line_of, pool) -> None:
    async with line_of(x="xx").running(pool=pool) as line:
        request = inference_pb2.EmbedRequest(model="x", inputs=[inference_pb2.InputText(text="a")])
        code, details = await code_of(line.stub.Embed(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT and details.startswith("x is an adapter")


async def test_adapters_are_listed(line_of, pool) -> None:
    async with line_of(x="xx").running(pool=pool) as line:
        await line.generate(text="x")
        models = (await line.stub.ListModels(inference_pb2.ListModelsRequest())).models
        page = await line.stub.ListModels(inference_pb2.ListModelsRequest(page_size=1))
        assert page.next_page_token == "x"
    assert [(model.id, model.parent) for model in models] == [("m", ""), ("x", "m"), ("found", "m")]
    assert models[1].root == "/adapters/x"
    assert models[1].max_model_len == models[0].max_model_len


async def test_a_gateway_resubmits_with_the_contents_of_before(line_of, pool) -> None:
    async with line_of(x="new").running(pool=pool) as line:
        gateway = Gateway(line)
        request = inference_pb2.GenerateRequest(text="Say", model="x")
        await gateway.send({1: GenerateSubmission(request=request, adapter_digest="old", resubmitted=True)})
        await gateway.read_until_finished(1)
    (submission,) = line.scheduler.submissions
    assert (submission.request.adapter, submission.adapter_digest) == ("x", "old")


async def test_the_contents_stay_when_the_scheduler_dies(line_of, pool) -> None:
    async with line_of(x="old").running(pool=pool) as line:
        line.scheduler.auto = False
        running = asyncio.create_task(line.generate(text="Say", model="x"))
        async with asyncio.timeout(10):
            while not line.scheduler.submissions:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await line.kill_scheduler()
        line.scheduler.adapters["x"] = "new"
        line.scheduler.auto = True
        await line.start_scheduler()
        result = await running
        assert (await line.generate(text="Say", model="x")).responses[0].adapter_digest == "new"
    assert result.responses[0].adapter_digest == "old"
    assert [one.adapter_digest for one in line.scheduler.submissions] == ["old", "old", "new"]


async def test_adapters_are_loaded_and_unloaded_at_the_scheduler(line_of, pool) -> None:
    async with line_of(x="xx").running(pool=pool) as line:
        await line.generate(text="Say")
        loaded = await admin(line).LoadAdapter(admin_pb2.AdminServiceLoadAdapterRequest(name="b", path="/b"))
        assert loaded.adapter.digest == "bb" and line.scheduler.adapters == {"x": "xx", "b": "bb"}
        await admin(line).UnloadAdapter(admin_pb2.AdminServiceUnloadAdapterRequest(name="b"))
        assert line.scheduler.adapters == {"x": "xx"}
        code, _ = await code_of(admin(line).UnloadAdapter(admin_pb2.AdminServiceUnloadAdapterRequest(name="b")))
        assert code is grpc.StatusCode.NOT_FOUND
        code, details = await code_of(
            admin(line).LoadAdapter(admin_pb2.AdminServiceLoadAdapterRequest(name="m", path="/b"))
        )
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "m is the name of the model" in details


@pytest.mark.parametrize("path", ["/nothing", ""])
async def test_a_refusal_of_the_scheduler_is_passed_on(line_of, pool, path: str) -> None:
    async with line_of(x="xx").running(pool=pool) as line:
        request = admin_pb2.AdminServiceLoadAdapterRequest(name="other", path=path)
        code, details = await code_of(admin(line).LoadAdapter(request))
    assert code is grpc.StatusCode.NOT_FOUND and details == "there is no adapter other"
