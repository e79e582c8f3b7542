"""Ollama's /api/pull: a model of the Hub or from PyPI is downloaded to this machine, with lines of progress, and served
on demand where a stack can."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc
from msgspec import UNSET
from starlette.responses import Response, StreamingResponse

from pagewire.errors import ModelNotFoundError
from pagewire.files.hub import from_hub, hub_name
from pagewire.files.model_files import weights_digest
from pagewire.files.models import resolve_model
from pagewire.files.wheel_models import WHEEL_MODELS
from pagewire.gateway.core.encoding import encode, json_response
from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.dialects.ollama.answer import NDJSON_HEADERS, line
from pagewire.gateway.dialects.ollama.answers import OllamaProgress
from pagewire.gateway.dialects.ollama.errors import OllamaError
from pagewire.gateway.dialects.ollama.models import LATEST
from pagewire.gateway.dialects.ollama.requests import OllamaPullRequest
from pagewire.gateway.models.models import Models
from pagewire.v1.lines_pb2 import PutLineRequest

_PULSE_S = 0.25
_DONE = ("verifying sha256 digest", "writing manifest", "success")


async def pulled(models: Models, body: OllamaPullRequest) -> Response:
    """Returns the answer to a request for a download, which goes on if its client disconnects. Raises ApiError."""
    name = body.model or ""
    is_served = {name, name.removesuffix(LATEST)} & {one.model.id for one in await models.list_all()}
    wanted = name.removesuffix(LATEST) if name.removesuffix(LATEST) in WHEEL_MODELS else name
    # Only names: a path would tell what is on the server's disk.
    if not is_served and wanted not in WHEEL_MODELS and hub_name(wanted) is None:
        known = ", ".join(WHEEL_MODELS)
        raise ApiError(
            404, f"pull model manifest: {name!r} is neither hf.co/ORG/REPO:QUANT nor one of {known}", param="model"
        )
    download = _Download(wanted, models, is_served=bool(is_served))
    if body.stream is not False:
        headers = {key.decode(): value.decode() for key, value in NDJSON_HEADERS}
        return StreamingResponse(download.lines(), headers=headers)
    async for _ in download.lines():
        pass
    if download.problem:
        raise ApiError(500, download.problem)
    return json_response(OllamaProgress(status="success"))


class _Download:
    """One download. The thread that works on it reports; the lines are written from the event loop."""

    def __init__(self, name: str, models: Models, *, is_served: bool) -> None:
        """is_served: its files are there."""
        self._models = models
        self.problem = ""
        self._name = name
        self._is_served = is_served
        self._reached: dict[str, tuple[int, int]] = {}  # what -> bytes so far, in all

    async def lines(self) -> AsyncIterator[bytes]:
        yield line(OllamaProgress(status="pulling manifest"))
        if not self._is_served:
            working = asyncio.create_task(asyncio.to_thread(self._work))
            reported: tuple[int, int] | None = None
            while not working.done():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(asyncio.shield(working), _PULSE_S)
                if (now := self._progress()) not in (reported, (0, 0)):
                    reported = now
                    yield line(self._pulling(*now))
            digest = working.result()
            await self._serve()
            if self.problem:
                yield line(OllamaError(self.problem))
                return
            done, total = self._progress()
            yield line(self._pulling(done or total, total or done, digest))
        for status in _DONE:
            yield line(OllamaProgress(status=status))

    async def _serve(self) -> None:
        """Has the stack serve the model on demand."""
        if self.problem or (stack := self._models.stack) is None:
            return
        settings = encode({"model": self._name}).decode()
        try:
            put = await stack.calls.PutLine(PutLineRequest(name=self._name, settings_json=settings))
            await self._models.learned(put.line.name, exists=True)
        except grpc.aio.AioRpcError as error:
            self.problem = f"pull model: it is downloaded, and cannot be served: {error.details()}"

    def _pulling(self, done: int, total: int, digest: str = "") -> OllamaProgress:
        named = f"sha256:{digest}" if digest else self._name
        return OllamaProgress(status=f"pulling {named}", digest=named, total=total or UNSET, completed=done)

    def _progress(self) -> tuple[int, int]:
        return max(self._reached.values(), default=(0, 0))

    def _work(self) -> str:
        """Downloads the model, and returns the digest of its weights; "" if that fails."""
        try:
            # Not a path, which might be there.
            of_hub = hub_name(self._name)
            if self._name in WHEEL_MODELS or of_hub is None:
                path = resolve_model(self._name, on_progress=self._report)
            else:
                path = from_hub(of_hub, None, None, on_progress=self._report)
            return weights_digest(path)
        except ModelNotFoundError as error:
            self.problem = f"pull model manifest: {error}"
        except OSError as error:
            self.problem = f"pull model: {error}"
        return ""

    def _report(self, what: str, done: int, total: int) -> None:
        self._reached[what] = (done, total)
