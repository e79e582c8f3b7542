"""The files of the page. They are part of the package, and browsers load nothing from other hosts."""

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.responses import FileResponse, HTMLResponse, PlainTextResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"
# Served without a key: these files contain nothing of the model or its users.
PREFIX = "/page/"
OPEN = frozenset({"/", "/docs"})

_SAME_ORIGIN = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
# Only DOMPurify may turn text into elements.
CONTENT_SECURITY_POLICY = (
    f"{_SAME_ORIGIN}; style-src 'self'; img-src 'self'; require-trusted-types-for 'script'; trusted-types dompurify"
)
# Swagger's page has images in its styles, and inline styles.
DOCS_SECURITY_POLICY = f"{_SAME_ORIGIN}; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
# Folders of libraries have their version in the name; other files are revalidated by ETag.
_FOR_EVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"
_LINK_TO_DOCS, _MENTION_OF_DOCS = '<a href="docs">API</a>', " For the API, see /docs."


def add_page(app: FastAPI, *, has_docs: bool = True) -> None:
    options: Any = {"methods": ["GET", "HEAD"], "include_in_schema": False}
    app.add_api_route("/", _root(_index if has_docs else _index_without_docs), **options)
    if has_docs:
        app.add_api_route("/docs", _docs, **options)
    app.mount(PREFIX.rstrip("/"), _Files(directory=STATIC), name="page")


def needs_no_key(path: str) -> bool:
    return path in OPEN or path.startswith(PREFIX)


def _root(page: Callable[[], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
    async def root(request: Request) -> Response:
        """Returns the page to browsers, and to other clients what Ollama's expect of a server that runs."""
        if "text/html" in request.headers.get("accept", ""):
            return await page()
        return PlainTextResponse("Ollama is running", headers={"Vary": "Accept"})

    return root


async def _index() -> Response:
    return _html("index.html", CONTENT_SECURITY_POLICY)


async def _index_without_docs() -> Response:
    page = (STATIC / "index.html").read_text().replace(_LINK_TO_DOCS, "").replace(_MENTION_OF_DOCS, "")
    return HTMLResponse(page, headers=_headers(CONTENT_SECURITY_POLICY))


async def _docs() -> Response:
    return _html("docs.html", DOCS_SECURITY_POLICY)


def _html(name: str, policy: str) -> Response:
    return FileResponse(STATIC / name, media_type="text/html", headers=_headers(policy))


def _headers(policy: str) -> dict[str, str]:
    return {
        "Content-Security-Policy": policy,
        "Referrer-Policy": "no-referrer",
        "Cache-Control": _ASK_AGAIN,
        "Vary": "Accept",
    }


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = _FOR_EVER if path.startswith("vendor/") else _ASK_AGAIN
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response
