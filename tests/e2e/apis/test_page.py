"""The page in headless Chromium, as its users meet it. Skipped where playwright or Chromium is missing:
`pip install -e ".[browser]"`, and `apt install chromium` or `playwright install chromium`."""

import asyncio
import json
import os
import re
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pagewire.v1 import common_pb2, inference_pb2
from tests.e2e.line import Line
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer

playwright = pytest.importorskip("playwright.async_api", reason='no playwright: pip install -e ".[browser]"')
expect = playwright.expect

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = os.environ.get("PAGEWIRE_TEST_CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
# What the browser itself says of an answer that is an error, and of a gateway that is away.
_REFUSED = re.compile(
    r"Failed to load resource: (the server responded with a status of (4|503)|net::ERR_(CONN|INC|EMPTY))"
)
PROMPT = "Count from one to fifty in words."
ANSWER = "#messages .assistant:last-child > .prose"


@asynccontextmanager
async def browsing(url: str, **options: Any) -> AsyncIterator[Any]:
    """A page that must not have written an error to its console, nor asked another host."""
    async with playwright.async_playwright() as tools:
        try:
            browser = await tools.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        except playwright.Error as error:
            pytest.skip(f"no Chromium: {str(error).splitlines()[0]}")
        page = await browser.new_page(**options)
        problems: list[str] = []
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda asked: None if asked.url.startswith(url) else problems.append(asked.url))
        page.set_default_timeout(20_000)
        expect.set_options(timeout=20_000)
        await page.goto(url)
        yield page
        await browser.close()
        assert not [text for text in problems if not _REFUSED.match(text)]


@pytest.fixture
async def page(line: Line) -> AsyncIterator[Any]:
    async with browsing(line.base_url) as page:
        await expect(page.locator("#model")).to_have_value("m")
        yield page


class ChatTokenizer(FakeTokenizer):
    """Has a model that chats."""

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        answer = await super().ListModels(request, context)
        for model in answer.models:
            model.kind, model.has_chat_template = common_pb2.MODEL_KIND_UNSPECIFIED, True
        return answer


@pytest.fixture
async def fake(tmp_path: Path) -> AsyncIterator[FakeTokenizer]:
    service = ChatTokenizer()
    await service.start(f"unix:{tmp_path}/t.sock")
    yield service
    await service.stop()


async def choose(page: Any, **settings: Any) -> None:
    await page.click("#open-settings")
    for name, value in settings.items():
        await page.fill(f"#{name}", str(value))
    await page.click("#close-settings")


async def ask(page: Any, text: str) -> None:
    await page.fill("#prompt", text)
    await page.press("#prompt", "Enter")
    await expect(page.locator("#stop")).to_be_visible()


async def wait_for_end(page: Any) -> str:
    await expect(page.locator("#send")).to_be_visible(timeout=60_000)
    return str(await page.locator(ANSWER).inner_text())


async def test_a_conversation(page: Any) -> None:
    await choose(page, temperature=0, max_tokens=40)
    await page.fill("#prompt", "Count")
    await page.press("#prompt", "Shift+Enter")
    assert await page.input_value("#prompt") == "Count\n", "Shift+Enter starts a line"
    await ask(page, PROMPT)
    await expect(page.locator(ANSWER)).not_to_be_empty()
    first = await wait_for_end(page)
    figures = page.locator("#messages .assistant:last-child .figures")
    await expect(figures).to_have_text(re.compile(r"\d+ tokens · [\d.]+ tokens/s · first after \d+"))

    await page.click("text=Regenerate")
    assert await wait_for_end(page) == first, "greedy, it says the same"
    await expect(page.locator("#messages > li")).to_have_count(2)

    await page.hover("#messages .user")
    await page.click("text=Edit")
    await page.fill("[aria-label='Edit message']", "Say hello.")
    await page.press("[aria-label='Edit message']", "Enter")
    assert await wait_for_end(page) != first
    await expect(page.locator("#messages .user > .prose")).to_have_text("Say hello.")

    await page.reload()
    await expect(page.locator("#messages > li")).to_have_count(2)
    await page.click("#new-chat")
    await expect(page.locator("#messages > li")).to_have_count(0)


async def test_escape_stops_an_answer_everywhere(page: Any, line: Line) -> None:
    await choose(page, max_tokens=3000, temperature=0)
    await ask(page, PROMPT)
    await expect(page.locator(ANSWER)).not_to_be_empty()
    await page.keyboard.press("Escape")
    assert await wait_for_end(page)
    await expect(page.locator(".figures").last).to_contain_text("stopped")
    assert (await line.wait_idle()).num_running == 0


async def test_an_answer_goes_on_when_the_executor_is_killed(page: Any, line: Line) -> None:
    messages = [{"role": "user", "content": PROMPT}]
    async with line.openai() as client:
        whole = await client.chat.completions.create(model="m", messages=messages, temperature=0, max_tokens=300)
    expected = whole.choices[0].message.content
    await choose(page, temperature=0, max_tokens=300)
    await ask(page, PROMPT)
    await expect(page.locator(ANSWER)).not_to_be_empty()
    line.kill("executor")
    await expect(page.locator("#health-text")).to_have_text("Executor not reachable")
    assert await page.locator("#stop").is_visible(), "the answer is not over"
    await page.click("#to-engine")
    await expect(page.locator("#services")).to_contain_text("Unreachable")
    line.start("executor")
    await line.wait_ready()
    await page.click("#to-chat")
    await wait_for_end(page)
    await expect(page.locator("#health-text")).to_have_text("Ready")
    said = json.loads(await page.evaluate("sessionStorage.getItem('pagewire.messages')"))
    assert said[-1]["content"] == expected and not said[-1].get("error")


async def test_the_engine_at_work(page: Any, line: Line) -> None:
    await page.click("#to-engine")
    pages = page.locator(".page-map canvas")
    await expect(pages).to_have_attribute("aria-label", re.compile("pages of 16 tokens: .* free, .* cached, 0 used"))
    await expect(page.locator("#services tr")).to_have_count(4)
    await expect(page.locator("#services")).not_to_contain_text("Unreachable")
    async with line.openai() as client:
        messages = [{"role": "user", "content": PROMPT}]
        stream = await client.chat.completions.create(
            model="m", messages=messages, max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        await expect(page.locator("#tiles")).to_contain_text("1 running")
        await expect(pages).to_have_attribute("aria-label", re.compile("[1-9][0-9]* used, 0 shared"))
        await expect(page.locator("#tiles .figure").first).not_to_have_text("0.0 tokens/s")
        await stream.close()
    await expect(page.locator("#tiles")).to_contain_text("0 running")


async def test_the_oldest_turns_make_room(page: Any) -> None:
    turns = [{"role": role, "content": f"{n} " + "word " * 480} for n in range(6) for role in ("user", "assistant")]
    await page.evaluate("turns => sessionStorage.setItem('pagewire.messages', JSON.stringify(turns))", turns)
    await page.reload()
    await choose(page, max_tokens=8)
    asked: list[Any] = []
    page.on("request", lambda request: asked.append(request) if request.url.endswith("/chat/completions") else None)
    await ask(page, "And now?")
    assert await wait_for_end(page)
    # Of 4096 tokens 8 are for the answer; of 12 turns with about 490 each, 8 fit beside the question.
    sent = json.loads(asked[-1].post_data)["messages"]
    assert [message["content"].split()[0] for message in sent] == [*"22334455", "And"]
    note = page.locator("#messages .assistant:last-child .left-out")
    await expect(note).to_have_text("The model takes 4,096 tokens: the oldest 4 messages are left out.")
    await expect(page.locator("#messages > li")).to_have_count(14)

    await ask(page, "word " * 5000)
    await expect(page.locator(".assistant:last-child .error")).to_contain_text("4096")
    assert len(json.loads(asked[-1].post_data)["messages"]) == 15, "nothing makes room for it: the server refuses it"


async def test_keys_are_enough(page: Any) -> None:
    async def press_until_focused(selector: str, key: str = "Tab") -> None:
        for _ in range(20):
            if await page.evaluate("selector => document.activeElement.matches(selector)", selector):
                return
            await page.keyboard.press(key)
        raise AssertionError(f"no {selector} by {key}")

    async def outline() -> str:
        return str(await page.evaluate("getComputedStyle(document.activeElement).outlineStyle"))

    await choose(page, max_tokens=3000, temperature=0)
    await press_until_focused("#prompt", "Shift+Tab")
    await page.keyboard.type(PROMPT)
    await press_until_focused("#send")
    assert await outline() == "solid"
    await page.keyboard.press("Enter")
    await expect(page.locator("#prompt")).to_be_focused()
    await expect(page.locator(ANSWER)).not_to_be_empty()
    await press_until_focused("#stop")
    await page.keyboard.press("Enter")
    await expect(page.locator("#prompt")).to_be_focused()
    await press_until_focused(".user .actions button:last-child", "Shift+Tab")
    await page.keyboard.press("Enter")
    await page.keyboard.press("Escape")
    await expect(page.locator(".user .actions button:last-child")).to_be_focused()
    await press_until_focused("#to-engine", "Shift+Tab")
    await page.keyboard.press("Enter")
    await press_until_focused("#engine")
    assert await outline() == "solid"


async def test_charts_go_on_when_the_gateway_is_back(page: Any, line: Line) -> None:
    await page.click("#to-engine")
    chart = page.locator("#tiles .sparkline .line").first
    await expect(chart).to_have_attribute("d", re.compile("^M.*L"))
    line.kill("gateway")
    await expect(page.locator("#health-text")).to_have_text("Gateway not reachable")
    await expect(page.locator("#engine")).to_have_class(re.compile("stale"))
    line.start("gateway")
    await line.wait_ready()
    await expect(page.locator("#health-text")).to_have_text("Ready")
    await expect(page.locator("#engine")).not_to_have_class(re.compile("stale"))
    await expect(chart).to_have_attribute("d", re.compile("^M[^M]*M.*L"))


async def test_what_a_model_says_is_not_trusted(page: Any) -> None:
    evil = (
        '<img src="https://example.com/x.png" onerror="alert(1)"><script>alert(2)</script>\n\n'
        "[a](javascript:alert(3)) ![picture](https://example.com/y.png) [b](https://example.com)\n\n"
        "```python\nprint('<b>')\n```\n\n| a | b |\n|---|---|\n| 1 | 2 |"
    )
    delta = {"choices": [{"index": 0, "delta": {"reasoning": "<i>hm</i>", "content": evil}}]}
    events = f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n"
    await page.route(
        "**/v1/chat/completions", lambda route: route.fulfill(body=events, content_type="text/event-stream")
    )
    await page.fill("#prompt", "?")
    await page.press("#prompt", "Enter")
    answer = page.locator(ANSWER)
    await expect(answer.locator(".code pre")).to_have_text("print('<b>')\n")
    await expect(answer.locator(".code button")).to_have_text("Copy")
    await expect(answer.locator("td")).to_have_count(2)
    await expect(answer.locator("img, script, [onerror]")).to_have_count(0)
    await expect(answer).to_contain_text('<img src="https://example.com/x.png" onerror="alert(1)">')
    links = await answer.locator("a").evaluate_all("links => links.map((link) => link.getAttribute('href'))")
    assert [link for link in links if link] == ["https://example.com/y.png", "https://example.com"]
    folded = page.locator(".assistant details.reasoning")
    assert await folded.get_attribute("open") is None
    await folded.locator("summary").click()
    await expect(folded).to_contain_text("<i>hm</i>")


async def test_errors_are_shown_as_they_are(page: Any) -> None:
    await choose(page, top_p=7)
    await page.fill("#prompt", "Hello")
    await page.press("#prompt", "Enter")
    await expect(page.locator(".assistant .error")).to_contain_text("top_p")


async def test_a_key_is_asked_for_once_and_kept(fake: FakeTokenizer, tmp_path: Path) -> None:
    async with running_gateway(f"unix:{tmp_path}/t.sock", api_key="secret") as client:
        await wait_ready(client)
        async with browsing(str(client.base_url)) as page:
            await page.fill("#key", "wrong")
            await page.press("#key", "Enter")
            await expect(page.locator("#key-message")).to_contain_text("wrong")
            await page.fill("#key", "secret")
            await page.press("#key", "Enter")
            await expect(page.locator("#model")).to_have_value("fake")
            await page.reload()
            await expect(page.locator("#model")).to_have_value("fake")
            assert not await page.locator("#key-dialog").is_visible()
            await page.click("text=API")
            await expect(page.locator("#swagger-ui")).to_contain_text("/v1/chat/completions")


@asynccontextmanager
async def browsing_models(models: list[dict[str, Any]], tmp_path: Path) -> AsyncIterator[Any]:
    """Yields a page of a server that lists these models, which the test may change."""
    async with running_gateway(f"unix:{tmp_path}/t.sock") as client:
        await wait_ready(client)
        async with browsing(str(client.base_url)) as page:
            await page.route("**/v1/models", lambda route: route.fulfill(json={"data": models}))
            await page.reload()
            yield page


async def test_a_model_that_is_not_loaded_is_shown_until_it_answers(fake: FakeTokenizer, tmp_path: Path) -> None:
    models: list[dict[str, Any]] = [
        {"id": "fake", "state": "ready", "capabilities": ["chat", "completions"]},
        {"id": "big", "state": "absent", "size": 3_000_000_000, "capabilities": ["chat"]},
        {"id": "bad", "state": "absent", "problem": "its file is damaged", "capabilities": ["chat"]},
        {"id": "vec", "state": "asleep", "capabilities": ["embeddings"]},
    ]
    loaded = asyncio.Event()

    async def answer(route: Any) -> None:
        if json.loads(route.request.post_data)["model"] == "bad":
            await route.fulfill(status=503, json={"error": {"message": "bad: its file is damaged"}})
            return
        await loaded.wait()
        delta = {"choices": [{"index": 0, "delta": {"content": "Here I am."}}]}
        await route.fulfill(body=f"data: {json.dumps(delta)}\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    async with browsing_models(models, tmp_path) as page:
        await page.route("**/v1/chat/completions", answer)
        picker, state = page.locator("#model"), page.locator("#model-state")
        await expect(picker.locator("option")).to_have_text(
            ["fake", "big (not loaded)", "bad (failed)", "vec (embeddings, asleep)"]
        )
        await expect(picker.locator("option:disabled")).to_have_count(1)
        await expect(state).to_be_empty()
        await picker.select_option("big")
        await expect(state).to_have_text("Not loaded (3.0 GB): the next request loads it.")
        await ask(page, "Hello")
        figures = page.locator("#messages .assistant:last-child .figures")
        await expect(figures).to_have_text(re.compile(r"^Loading big, \d+ s$"))
        models[1] |= {"state": "loading", "progress": "reads weights"}
        await expect(figures).to_have_text(re.compile(r"^Loading big \(reads weights\), \d+ s$"))
        await expect(picker.locator("option").nth(1)).to_have_text("big (loading)")
        models[1] |= {"state": "ready", "progress": ""}
        await expect(figures).to_be_empty()
        loaded.set()
        assert await wait_for_end(page) == "Here I am."
        await expect(picker.locator("option").nth(1)).to_have_text("big")
        await page.reload()
        await expect(picker).to_have_value("big")
        await page.click("#new-chat")
        await picker.select_option("bad")
        await expect(state).to_have_text("It could not be loaded: its file is damaged")
        await page.fill("#prompt", "Hello")
        await page.press("#prompt", "Enter")
        await expect(page.locator(".assistant:last-child .error")).to_have_text("bad: its file is damaged")


async def test_models_for_embeddings_have_a_view_of_their_own(fake: FakeTokenizer, tmp_path: Path) -> None:
    models: list[dict[str, Any]] = [
        {"id": "vec", "state": "ready", "capabilities": ["embeddings", "score"]},
        {"id": "text", "state": "ready", "capabilities": ["completions"]},
    ]
    vectors = {"data": [{"embedding": [0.6, 0.8]}, {"embedding": [0.8, 0.6]}], "usage": {"prompt_tokens": 4}}
    async with browsing_models(models, tmp_path) as page:
        await page.route("**/v1/embeddings", lambda route: route.fulfill(json=vectors))
        await expect(page.locator("#vectors")).to_be_visible()
        await expect(page.locator("#to-chat")).to_be_hidden()
        await expect(page.locator("#vectors-model option")).to_have_text(["vec"])
        await page.fill("#first-text", "one")
        await page.fill("#second-text", "two")
        await page.click("#embed")
        await expect(page.locator("#vectors-result h2").first).to_have_text("Similarity 0.9600")
        models[0]["capabilities"] = ["chat"]
        await page.reload()
        await expect(page.locator("#chat")).to_be_visible()
        await expect(page.locator("#to-vectors")).to_be_hidden()
        await expect(page.locator("#model option")).to_have_text(["vec", "text (completions)"])


async def test_without_a_model_that_chats_the_page_says_so(fake: FakeTokenizer, tmp_path: Path) -> None:
    models = [{"id": "text", "state": "ready", "capabilities": ["completions"]}]
    async with browsing_models(models, tmp_path) as page:
        await expect(page.locator("#model-state")).to_have_text("No model of this server can chat.")
        await page.fill("#prompt", "Hello")
        await page.press("#prompt", "Enter")
        await expect(page.locator("#messages > li")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_narrow_screens_need_no_sideways_scrolling(fake: FakeTokenizer, tmp_path: Path, scheme: str) -> None:
    async with running_gateway(f"unix:{tmp_path}/t.sock") as client:
        await wait_ready(client)
        size = {"width": 360, "height": 640}
        async with browsing(str(client.base_url), viewport=size, color_scheme=scheme) as page:
            await ask(page, "x" * 300)
            await wait_for_end(page)
            for view in ("#to-chat", "#to-engine"):
                await page.click(view)
                assert await page.evaluate("document.documentElement.scrollWidth") <= size["width"]


async def test_where_the_status_is_on_a_port_for_operators_the_page_still_chats(
    fake: FakeTokenizer, tmp_path: Path
) -> None:
    async with running_gateway(f"unix:{tmp_path}/t.sock", admin_port=0) as client:
        await wait_ready(client)
        async with browsing(str(client.base_url)) as page:
            await expect(page.locator("#health-text")).to_have_text("Ready")
            await expect(page.locator("#to-engine")).to_be_hidden()
            await ask(page, "hello")
            assert await wait_for_end(page)
