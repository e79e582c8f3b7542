"""Files: what is uploaded is there for all, until it is deleted or expires."""

import io
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pagewire.gateway.files import files as files_module
from pagewire.gateway.files.bodies import FileQuery
from pagewire.gateway.files.files import Files
from pagewire.gateway.files.upload import Upload
from pagewire.gateway.store import Store
from tests.gateway.conftest import running_gateway
from tests.gateway.core.test_openapi import check

CONTENT = b'{"custom_id": "a"}\n'


async def test_what_a_write_leaves_over_is_written(tmp_path: Path) -> None:
    class Slow(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[:5])

    async def stream() -> AsyncIterator[bytes]:
        yield b'--x\r\nContent-Disposition: form-data; name="file"; filename="f"\r\n\r\n%s\r\n--x--\r\n' % CONTENT

    with Slow(tmp_path / "out", "w") as out:
        await Upload("multipart/form-data; boundary=x", out, 100).read(stream())
    assert (tmp_path / "out").read_bytes() == CONTENT


async def test_a_file_comes_back_as_it_was(ai: openai.AsyncOpenAI) -> None:
    large = b"\r\n--x\r\n" * 700_000
    for content in (CONTENT, b"", large):
        file = await ai.files.create(file=("in put.jsonl", content), purpose="batch")
        assert (file.object, file.bytes, file.filename, file.purpose) == ("file", len(content), "in put.jsonl", "batch")
        assert file.expires_at == file.created_at + 30 * 24 * 3600 and abs(file.created_at - time.time()) < 60
        assert await ai.files.retrieve(file.id) == file
        assert (await ai.files.content(file.id)).content == content
        deleted = await ai.files.delete(file.id)
        assert (deleted.id, deleted.deleted) == (file.id, True)
        for gone in (ai.files.retrieve, ai.files.content, ai.files.delete):
            with pytest.raises(openai.NotFoundError, match=file.id):
                await gone(file.id)


async def test_files_are_listed_page_by_page(ai: openai.AsyncOpenAI) -> None:
    assert (await ai.files.list()).data == []
    ids = [(await ai.files.create(file=CONTENT, purpose="batch")).id for _ in range(5)]
    assert [file.id async for file in ai.files.list(limit=2)] == ids[::-1]
    assert [file.id async for file in ai.files.list(order="asc", limit=2, after=ids[0])] == ids[1:]
    page = await ai.files.list(limit=2, purpose="batch")
    assert [file.id for file in page.data] == ids[:2:-1] and page.has_more
    assert (await ai.files.list(purpose="batch_output")).data == []
    with pytest.raises(openai.NotFoundError, match="unknown"):
        await ai.files.list(after="unknown")


async def test_what_is_wrong_with_an_upload_is_said(ai: openai.AsyncOpenAI, client: httpx.AsyncClient) -> None:
    with pytest.raises(openai.BadRequestError, match="send `batch`"):
        await ai.files.create(file=CONTENT, purpose="fine-tune")
    with pytest.raises(openai.BadRequestError, match=r"expires_after\.seconds: input should be greater than or equal"):
        await ai.files.create(file=CONTENT, purpose="batch", expires_after={"anchor": "created_at", "seconds": 1})
    for arguments, message in [
        ({"json": {"purpose": "batch"}}, "send the file as multipart/form-data"),
        ({"files": {"purpose": (None, "batch")}}, "the file is missing"),
        ({"files": {"file": CONTENT}}, "purpose"),
        ({"files": {"file": CONTENT, "purpose": (None, "batch"), "color": (None, "red")}}, "color"),
        (
            {"files": {"file": CONTENT, "expires_after": (None, "1h"), "expires_after[seconds]": (None, "3600")}},
            "exclude each other",
        ),
        ({"files": [("file", CONTENT), ("file", CONTENT), ("purpose", (None, "batch"))]}, "upload one at a time"),
        ({"content": b"--x\r\nnonsense", "headers": {"content-type": "multipart/form-data; boundary=x"}}, "not valid"),
        ({"content": b"--x", "headers": {"content-type": f"multipart/form-data; boundary={'x' * 999}"}}, "boundary"),
    ]:
        answer = await client.post("/v1/files", **arguments)
        assert answer.status_code == 400 and message in answer.json()["error"]["message"], answer.text
    for query in ("limit=0", "order=up", "color=red"):
        answer = await client.get(f"/v1/files?{query}")
        assert answer.status_code == 400 and query.partition("=")[0] in answer.json()["error"]["message"]
    assert (await ai.files.list()).data == []


async def test_files_have_a_bound(address: str, tmp_path: Path) -> None:
    async with running_gateway(address, max_file_bytes=1000) as http:
        form = {"purpose": (None, "batch")}
        assert (await http.post("/v1/files", files=form | {"file": bytes(1000)})).status_code == 200
        refused = await http.post("/v1/files", files=form | {"file": bytes(1001)})
        assert refused.status_code == 413 and "larger than 1000 bytes" in refused.json()["error"]["message"]
    assert len(list((tmp_path / "data" / "files").iterdir())) == 1


async def test_all_files_together_have_a_bound(address: str, tmp_path: Path) -> None:
    """Deleting a file makes room."""
    async with running_gateway(address, file_store_size=1000) as http:
        form = {"purpose": (None, "batch")}
        first = (await http.post("/v1/files", files=form | {"file": bytes(600)})).json()
        refused = await http.post("/v1/files", files=form | {"file": bytes(401)})
        assert (refused.status_code, refused.json()["error"]["param"]) == (413, "file")
        message = refused.json()["error"]["message"]
        assert "1001 bytes" in message and "--file-store-size" in message
        assert len(list((tmp_path / "data" / "files").iterdir())) == 1
        assert (await http.post("/v1/files", files=form | {"file": bytes(400)})).status_code == 200
        await http.delete(f"/v1/files/{first['id']}")
        assert (await http.post("/v1/files", files=form | {"file": bytes(401)})).status_code == 200


async def test_ranges(ai: openai.AsyncOpenAI, client: httpx.AsyncClient) -> None:
    file = await ai.files.create(file=CONTENT, purpose="batch")
    path, size = f"/v1/files/{file.id}/content", len(CONTENT)
    part = await client.get(path, headers={"range": "bytes=2-4"})
    assert (part.status_code, part.content) == (206, CONTENT[2:5])
    for given, status in (("lines=1-2", 400), ("bytes", 400), ("bytes=5-2", 400), ("bytes=99-100", 416)):
        answer = await client.get(path, headers={"range": given})
        assert answer.status_code == status
        assert answer.json()["error"]["type"] == "invalid_request_error" and given in answer.json()["error"]["message"]
        assert answer.headers.get("content-range") == (f"bytes */{size}" if status == 416 else None)


async def test_files_outlive_the_gateway_and_are_shared(address: str) -> None:
    async with running_gateway(address) as first, running_gateway(address) as second:
        form = {"purpose": (None, "batch"), "file": ("a", CONTENT)}
        file = (await first.post("/v1/files", files=form)).json()
        assert (await second.get(f"/v1/files/{file['id']}")).json() == file
    async with running_gateway(address) as third:
        assert (await third.get(f"/v1/files/{file['id']}/content")).content == CONTENT


async def test_the_bytes_of_expired_files_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store(tmp_path)
    files = Files(store, 1000, 1000)
    for expiry in (-1, 100):
        path = tmp_path / "answers"
        path.write_bytes(CONTENT)
        await files.adopt(path, f"file-{expiry}", "out.jsonl", expiry, owner="")
    assert [file.id for file in (await files.list(FileQuery())).data] == ["file-100"]
    await files.sweep()
    assert files.path("file--1").exists(), "it could be about to get its document"
    monkeypatch.setattr(files_module, "ORPHAN_S", -1.0)
    await files.sweep()
    assert not files.path("file--1").exists() and files.path("file-100").exists()
    await store.close()


async def test_what_is_documented_is_answered(
    ai: openai.AsyncOpenAI, client: httpx.AsyncClient, document: dict[str, Any]
) -> None:
    upload = document["paths"]["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert upload["required"] == ["file", "purpose"]
    listing = {parameter["name"] for parameter in document["paths"]["/v1/files"]["get"]["parameters"]}
    assert listing == {"after", "limit", "order", "purpose"}
    file = await ai.files.create(file=CONTENT, purpose="batch")
    for method, route, path in [
        ("get", "/v1/files", "/v1/files"),
        ("get", "/v1/files/{file_id}", f"/v1/files/{file.id}"),
        ("delete", "/v1/files/{file_id}", f"/v1/files/{file.id}"),
    ]:
        answer = await client.request(method, path)
        check(document, route, method, answer.status_code, "application/json", answer.json())
