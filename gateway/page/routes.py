"""The page's files. They come with the package, and a browser is told to load nothing from anywhere else."""

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

STATIC = Path(__file__).parent / "static"
# Where nobody needs a key: there is nothing of the model or its users here.
PREFIX = "/page/"
OPEN = frozenset({"/", "/docs"})

_SAME_ORIGIN = (
    "default-src 'none'; script-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none';"
    " frame-ancestors 'none'"
)
# Only DOMPurify may make elements of text.
CONTENT_SECURITY_POLICY = (
    f"{_SAME_ORIGIN}; style-src 'self'; img-src 'self'; require-trusted-types-for 'script'; trusted-types dompurify"
)
# Swagger's page has pictures in its styles and styles in its elements.
DOCS_SECURITY_POLICY = f"{_SAME_ORIGIN}; style-src 'self' 'unsafe-inline'; img-src 'self' data:"
# Folders of libraries are named by their version; everything else is asked for again, by its ETag.
_FOR_EVER = "public, max-age=31536000, immutable"
_ASK_AGAIN = "no-cache"


def add_page(app: FastAPI) -> None:
    app.add_api_route("/", _index, methods=["GET", "HEAD"], include_in_schema=False)
    app.add_api_route("/docs", _docs, methods=["GET", "HEAD"], include_in_schema=False)
    app.mount(PREFIX.rstrip("/"), _Files(directory=STATIC), name="page")


def needs_no_key(path: str) -> bool:
    return path in OPEN or path.startswith(PREFIX)


async def _index() -> Response:
    return _html("index.html", CONTENT_SECURITY_POLICY)


async def _docs() -> Response:
    return _html("docs.html", DOCS_SECURITY_POLICY)


def _html(name: str, policy: str) -> Response:
    headers = {"Content-Security-Policy": policy, "Referrer-Policy": "no-referrer", "Cache-Control": _ASK_AGAIN}
    return FileResponse(STATIC / name, media_type="text/html", headers=headers)


class _Files(StaticFiles):
    async def get_response(self, path: str, scope: Scope) -> Response:
        response = await super().get_response(path, scope)
        response.headers["Cache-Control"] = _FOR_EVER if path.startswith("vendor/") else _ASK_AGAIN
        response.headers["X-Content-Type-Options"] = "nosniff"
        return response
