"""The page's routes: everything is there, comes from here, and says how long it may be kept."""

import re
from pathlib import Path

import httpx
import pytest

from pagewire.gateway.page.routes import STATIC
from tests.gateway.conftest import running_gateway
from tests.gateway.fake_tokenizer import FakeTokenizer

# What a page or a module loads, and what a style does.
_LOADS = re.compile(r"""(?:\b(?:src|href)=|\bfrom |\bimport )["']([^"']+)["']|url\(["']?([^"')]+)["']?\)""")


BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


@pytest.fixture
async def client(client: httpx.AsyncClient) -> httpx.AsyncClient:
    client.headers.update(BROWSER)
    return client


def targets(path: Path) -> list[str]:
    found = [match[1] or match[2] for match in _LOADS.finditer(path.read_text())]
    return [target for target in found if target[0] not in "#$"]


OURS = [path for path in STATIC.rglob("*") if path.suffix in {".js", ".css", ".html"} and "vendor" not in path.parts]


@pytest.mark.parametrize(
    ("path", "styles"), [("/", "style-src 'self';"), ("/docs", "style-src 'self' 'unsafe-inline'")]
)
async def test_pages_may_load_nothing_of_other_hosts(client: httpx.AsyncClient, path: str, styles: str) -> None:
    answer = await client.get(path)
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script-src 'self'; connect-src 'self'" in policy and styles in policy
    assert "http:" not in policy and "https:" not in policy and "*" not in policy
    assert "<script>" not in answer.text and "style=" not in answer.text and " onclick" not in answer.text


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
async def test_what_files_load_is_there(client: httpx.AsyncClient, path: Path) -> None:
    base = "/" if path.suffix == ".html" else "/page/"
    for target in targets(path):
        assert "//" not in target
        answer = await client.get(base + target.removeprefix("./"))
        assert answer.status_code == 200, target


@pytest.mark.parametrize("path", ["/", "/docs", "/page/app.js"])
async def test_head_says_what_get_would(client: httpx.AsyncClient, path: str) -> None:
    head, whole = await client.head(path), await client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]


async def test_files_are_kept_and_asked_for_again(client: httpx.AsyncClient) -> None:
    module = await client.get("/page/app.js")
    assert module.headers["content-type"].startswith("text/javascript")
    assert module.headers["cache-control"] == "no-cache" and module.headers["x-content-type-options"] == "nosniff"
    again = await client.get("/page/app.js", headers={"If-None-Match": module.headers["etag"]})
    assert again.status_code == 304 and not again.content
    (library,) = STATIC.glob("vendor/dompurify-*/*.mjs")
    of_others = await client.get(f"/page/{library.relative_to(STATIC).as_posix()}")
    assert of_others.headers["content-type"].startswith("text/javascript")
    assert of_others.headers["cache-control"] == "public, max-age=31536000, immutable"


@pytest.mark.parametrize("path", ["/page/nothing.js", "/page/../routes.py", "/page/%2e%2e/routes.py", "/page/vendor"])
async def test_nothing_else_is_served(client: httpx.AsyncClient, path: str) -> None:
    assert (await client.get(path)).status_code == 404


async def test_the_page_needs_no_key_and_what_it_asks_for_does(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, api_key="secret") as client:
        for path in ("/", "/docs", "/page/app.js"):
            assert (await client.get(path)).status_code == 200
        for path in ("/openapi.json", "/v1/models", "/v1/status/stream", "/pages", "/docs/", "/page"):
            assert (await client.get(path)).status_code == 401
        assert (await client.post("/", json={"inputs": "computes"})).status_code == 401


async def test_clients_of_ollama_find_a_server_that_runs(client: httpx.AsyncClient) -> None:
    for accept in ("*/*", "application/json"):
        answer = await client.get("/", headers={"accept": accept})
        assert (answer.status_code, answer.text) == (200, "Ollama is running")
        assert (await client.head("/", headers={"accept": accept})).status_code == 200


def test_libraries_come_with_license_and_version() -> None:
    readme = (STATIC / "vendor/README.md").read_text()
    folders = [path for path in (STATIC / "vendor").iterdir() if path.is_dir()]
    assert folders
    for folder in folders:
        name, _, version = folder.name.rpartition("-")
        assert (folder / "LICENSE").is_file() and f"`{folder.name}`" in readme and f"{name}) {version}" in readme


async def test_documentation_can_be_off(fake: FakeTokenizer, address: str) -> None:
    async with running_gateway(address, disable_fastapi_docs=True) as client:
        for path in ("/docs", "/openapi.json"):
            answer = await client.get(path)
            assert answer.status_code == 404 and "see /docs" not in answer.text
        page = await client.get("/", headers=BROWSER)
        assert page.status_code == 200 and "docs" not in page.text
        assert (await client.get("/v1/chat/completions")).headers["allow"] == "POST"
