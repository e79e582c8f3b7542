"""Responses in the background: they need no client and no particular gateway, and their events can be read again."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import httpx
import openai
import pytest

from pagewire.config import GatewayConfig
from pagewire.gateway import main
from pagewire.gateway.store import Jobs, Lease, Store
from pagewire.wire.rpc import RpcError
from tests.gateway.conftest import eventually, running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer, expected_text
from tests.gateway.responses.test_responses import RESPONSES, THINKS_SAYS_CALLS, TOOL, events_of

BODY: dict[str, Any] = {"input": "hi", "background": True, "seed": 3}
PROMPT = "<user>hi<assistant>"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The data directory of all gateways."""
    return tmp_path / "data"


async def ended(client: httpx.AsyncClient, id: str) -> dict[str, Any]:
    async with asyncio.timeout(20):
        while True:
            response = (await client.get(f"{RESPONSES}/{id}")).json()
            if response["status"] not in ("queued", "in_progress"):
                return response
            await asyncio.sleep(0.02)


def text_of(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def text_in(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


async def test_no_client_needs_to_wait(ai: openai.AsyncOpenAI, client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    response = await ai.responses.create(model="fake", input="hi", background=True, extra_body={"seed": 3})
    assert (response.status, response.output, response.background) == ("queued", [], True)
    await ended(client, response.id)
    response = await ai.responses.retrieve(response.id)
    assert (response.status, response.output_text) == ("incomplete", expected_text(PROMPT, 3))
    assert (response.usage.input_tokens, response.usage.output_tokens) == (len(PROMPT), 24)
    follow_up = await ai.responses.create(model="fake", input="and?", previous_response_id=response.id)
    assert follow_up.previous_response_id == response.id


async def test_events_may_be_had_again_from_any_on(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.script = THINKS_SAYS_CALLS
    body = BODY | {"stream": True, "tools": [TOOL]}
    events = events_of((await client.post(RESPONSES, json=body)).text)
    assert [event["type"] for event in events[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    *_, last = events
    assert last["type"] == "response.completed"
    path = f"{RESPONSES}/{last['response']['id']}"
    assert (await client.get(path)).json() == last["response"]
    again = await client.get(path, params={"stream": "true"})
    assert events_of(again.text) == events
    rest = await client.get(path, params={"stream": "true", "starting_after": 6})
    assert again.text.endswith(rest.text)
    assert '"sequence_number":7}' in rest.text.split("\n\n")[0]


async def test_a_stream_is_taken_up_where_it_broke(
    ai: openai.AsyncOpenAI, client: httpx.AsyncClient, fake: FakeTokenizer
) -> None:
    fake.steps_left = 5
    first, rest = [], []
    seeded = {"seed": 3}
    async for event in await ai.responses.create(
        model="fake", input="hi", background=True, stream=True, extra_body=seeded
    ):
        first.append(event)
        if event.type == "response.output_text.delta":
            break  # the connection is gone
    fake.steps_left = None
    id = first[0].response.id
    async for event in await ai.responses.retrieve(id, stream=True, starting_after=first[-1].sequence_number):
        rest.append(event)
    events = [*first, *rest]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == rest[-1].response.output_text == expected_text(PROMPT, 3)


async def test_another_gateway_goes_on_where_one_stopped(fake: FakeTokenizer, address: str) -> None:
    """The second gateway continues after the tokens in the log, which clients may have seen."""
    fake.steps_left = 6
    async with running_gateway(address) as first:
        await wait_ready(first)
        id = (await first.post(RESPONSES, json=BODY)).json()["id"]
        await eventually(lambda: fake.steps_left == 0)
        async with first.stream("GET", f"{RESPONSES}/{id}", params={"stream": "true"}) as stream:
            before = []
            async for line in stream.aiter_lines():
                before.append(line)
                if "output_text.delta" in line and line.startswith("data"):
                    break
    fake.steps_left = None
    async with running_gateway(address) as second:
        await wait_ready(second)
        response = await ended(second, id)
        assert text_of(response) == expected_text(PROMPT, 3)
        assert fake.submissions[-1].resume_token_ids
        assert fake.submissions[-1].resubmitted
        stream = (await second.get(f"{RESPONSES}/{id}", params={"stream": "true"})).text
        assert stream.startswith("\n".join(before))
        assert text_in(events_of(stream)) == expected_text(PROMPT, 3)
        usage = response["usage"]
        assert (usage["output_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (24, 3)


async def test_any_gateway_cancels(fake: FakeTokenizer, address: str) -> None:
    fake.steps_left = 6
    async with running_gateway(address) as owner, running_gateway(address) as other:
        await wait_ready(owner)
        await wait_ready(other)
        id = (await owner.post(RESPONSES, json=BODY)).json()["id"]
        await eventually(lambda: fake.steps_left == 0)
        response = (await other.post(f"{RESPONSES}/{id}/cancel")).json()
        assert response["status"] == "cancelled"
        assert expected_text(PROMPT, 3).startswith(text_of(response))
        assert fake.aborted == [id]
        assert response["usage"]["output_tokens"] == 6
        assert (await owner.post(f"{RESPONSES}/{id}/cancel")).json() == response
        events = events_of((await owner.get(f"{RESPONSES}/{id}", params={"stream": "true"})).text)
        assert (events[-1]["type"], events[-1]["response"]) == ("response.incomplete", response)


async def test_what_is_cancelled_as_it_begins_stays_so(fake: FakeTokenizer, address: str, data: Path) -> None:
    fake.running.clear()
    fake.steps_left = 6
    async with running_gateway(address) as owner, running_gateway(address) as other:
        await wait_ready(owner)
        await wait_ready(other)
        id = (await owner.post(RESPONSES, json=BODY)).json()["id"]
        await eventually(lambda: fake.received)
        cancelling = [asyncio.create_task(other.post(f"{RESPONSES}/{id}/cancel")) for _ in range(3)]
        store = Store(data)
        while await store.jobs("response").log.cancelled_at(id) is None:  # noqa: ASYNC110 - the job is there
            await asyncio.sleep(0.005)
        await store.close()
        fake.running.set()
        answers = [(await cancelled).json() for cancelled in cancelling]
        assert answers[0]["status"] == "cancelled"
        await eventually(lambda: fake.aborted)
        assert answers == 3 * [await ended(owner, id)]


async def test_a_queued_response_is_cancelled(
    fake: FakeTokenizer, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pagewire.gateway.responses.background.MAX_RUNNING", 1)
    fake.running.clear()
    async with running_gateway(address) as http:
        await wait_ready(http)
        ids = [(await http.post(RESPONSES, json=BODY)).json()["id"] for _ in range(2)]
        await eventually(lambda: fake.received)
        response = (await http.post(f"{RESPONSES}/{ids[1]}/cancel")).json()
        assert (response["status"], response["output"]) == ("cancelled", [])
        fake.running.set()
        assert (await ended(http, ids[0]))["status"] == "incomplete"
        assert (await http.get(f"{RESPONSES}/{ids[1]}")).json() == response
    assert [request.request_id for request in fake.received] == ids[:1]


async def test_what_is_deleted_ends(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.running.clear()
    id = (await client.post(RESPONSES, json=BODY)).json()["id"]
    await eventually(lambda: fake.received)
    assert (await client.delete(f"{RESPONSES}/{id}")).json()["deleted"] is True
    fake.running.set()
    await eventually(lambda: fake.aborted)
    assert (await client.get(f"{RESPONSES}/{id}")).status_code == 404


async def test_what_is_deleted_does_not_come_back(fake: FakeTokenizer, address: str, data: Path) -> None:
    """Another gateway deletes it, and its owner, which has more outputs by then, notices that late."""
    fake.running.clear()
    async with running_gateway(address) as owner:
        await wait_ready(owner)
        id = (await owner.post(RESPONSES, json=BODY)).json()["id"]
        await eventually(lambda: fake.received)
        store = Store(data)
        log = store.jobs("response").log
        assert await store.documents("response").delete(id, first=lambda connection: log.remove(connection, id))
        fake.running.set()
        await eventually(lambda: fake.aborted)
        assert await log.read(id, 0) is None
        assert (await owner.get(f"{RESPONSES}/{id}")).status_code == 404
        await store.close()


@pytest.mark.parametrize("kind", ["response", "batch"])
async def test_a_gateway_that_takes_no_jobs_ends(address: str, data: Path, monkeypatch: Any, kind: str) -> None:
    """The supervisor starts another one. If the process stayed, unfinished jobs would wait for ever."""

    class Broken(Jobs):
        async def next(self) -> Lease:
            raise RuntimeError("broken")

    make = Store.jobs
    monkeypatch.setattr(
        Store,
        "jobs",
        lambda store, name, *bounds: Broken(make(store, name).log) if name == kind else make(store, name, *bounds),
    )
    config = GatewayConfig(port=0, tokenizer_address=address, data_dir=str(data))
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(10):
            await main.serve(config, main.listen(config), asyncio.Event().wait())
    assert str(ended.value.exceptions[0]) == "broken"


async def test_a_full_engine_is_waited_for(client: httpx.AsyncClient, fake: FakeTokenizer, monkeypatch: Any) -> None:
    monkeypatch.setattr("pagewire.gateway.responses.background.PAUSE_S", 0.05)
    fake.error = RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many")
    id = (await client.post(RESPONSES, json=BODY)).json()["id"]
    await eventually(lambda: len(fake.received) > 1)
    fake.error = None
    assert text_of(await ended(client, id)) == expected_text(PROMPT, 3)


async def test_an_error_is_its_end(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.error_at = (4, RpcError(grpc.StatusCode.INTERNAL, "broken"))
    id = (await client.post(RESPONSES, json=BODY)).json()["id"]
    response = await ended(client, id)
    assert (response["status"], response["error"]) == ("failed", {"code": "server_error", "message": "broken"})
    assert expected_text(PROMPT, 3).startswith(text_of(response))
    events = events_of((await client.get(f"{RESPONSES}/{id}", params={"stream": "true"})).text)
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]


async def test_what_gateways_die_of_is_given_up(fake: FakeTokenizer, address: str, data: Path) -> None:
    fake.running.clear()
    async with running_gateway(address) as client:
        await wait_ready(client)
        id = (await client.post(RESPONSES, json=BODY)).json()["id"]
        await eventually(lambda: fake.received)
    store = Store(data)
    jobs = store.jobs("response", lease_s=0.0)
    for _ in range(4):  # a process that dies releases nothing
        assert await jobs.log.claim() is not None
    await store.close()
    async with running_gateway(address) as client:
        await wait_ready(client)
        response = await ended(client, id)
        assert (response["status"], "died" in response["error"]["message"]) == ("failed", True)


async def test_what_cannot_be_read_is_given_up(
    client: httpx.AsyncClient, fake: FakeTokenizer, data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Store(data)
    await store.documents("response").put("resp_other", b"written by another version")
    await store.jobs("response").log.begin("resp_other", b"")
    await eventually(lambda: "cannot be read" in caplog.text)
    async with asyncio.timeout(10):
        while await store.jobs("response").cancel("resp_other"):  # noqa: ASYNC110 - the job is there
            await asyncio.sleep(0.01)
    await store.close()
    id = (await client.post(RESPONSES, json=BODY)).json()["id"]
    assert (await ended(client, id))["status"] == "incomplete"


async def test_events_of_others_are_not_kept(ai: openai.AsyncOpenAI, fake: FakeTokenizer) -> None:
    response = await ai.responses.create(model="fake", input="hi")
    with pytest.raises(openai.BadRequestError, match="background: true"):
        await ai.responses.retrieve(response.id, stream=True)
    with pytest.raises(openai.BadRequestError, match="background: true"):
        await ai.responses.cancel(response.id)


async def test_events_make_room_before_responses_do(client: httpx.AsyncClient, fake: FakeTokenizer, data: Path) -> None:
    id = (await client.post(RESPONSES, json=BODY)).json()["id"]
    response = await ended(client, id)
    store = Store(data)
    log = store.jobs("response").log
    await log.database.write(lambda connection: log.remove(connection, id))
    await store.close()
    answer = await client.get(f"{RESPONSES}/{id}", params={"stream": "true"})
    assert (answer.status_code, "no longer kept" in answer.text) == (404, True)
    assert (await client.get(f"{RESPONSES}/{id}")).json() == response


async def test_a_running_response_cannot_be_continued_from(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    fake.running.clear()
    id = (await client.post(RESPONSES, json=BODY)).json()["id"]
    answer = await client.post(RESPONSES, json={"input": "and?", "previous_response_id": id})
    assert (answer.status_code, "is still" in answer.text) == (400, True)


async def test_events_have_log_probabilities(client: httpx.AsyncClient, fake: FakeTokenizer) -> None:
    body = BODY | {"include": ["message.output_text.logprobs"], "max_output_tokens": 5, "stream": True}
    events = events_of((await client.post(RESPONSES, json=body)).text)
    [part] = events[-1]["response"]["output"][0]["content"]
    assert "".join(one["token"] for one in part["logprobs"]) == part["text"] == expected_text(PROMPT, 3, 5)
