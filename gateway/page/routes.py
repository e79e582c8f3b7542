"""The files of the page. They are part of the package, and browsers load nothing from other hosts."""

from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response
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
