"""`pagewire batch` against a server: every request has one answer in the file, whatever happens on the way."""

import asyncio
import json
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pagewire.batch import lines
from pagewire.batch.lines import Line
from pagewire.batch.results import Answer, Results
from pagewire.errors import StartupError
from pagewire.tools.batch import command
from tests.pagewire.tools.openai_server import REPOSITORY, Server, listening, write_whole

COMPLETIONS = "/v1/completions"


def request(number: int, **body: Any) -> dict[str, Any]:
    body = {"model": "m", "prompt": str(number)} | body
    return {"custom_id": f"q{number}", "method": "POST", "url": COMPLETIONS, "body": body}


def write(path: Path, requests: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in requests))
    return path


def answers(path: Path) -> list[dict[str, Any]]:
    """Returns the whole lines; a process that is killed may leave a part of one behind them."""
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


async def repeat(body: dict[str, Any], writer: Any) -> None:
    """Says the prompt again."""
    await asyncio.sleep(0.005)
    usage = {"prompt_tokens": 1, "completion_tokens": 2}
    write_whole(writer, "200 OK", {"choices": [{"text": body["prompt"]}], "usage": usage})


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with listening() as server:
        server.answer = repeat
        yield server


LIMITED = """
import os, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[1]), int(sys.argv[1])))
os.execv(sys.argv[2], sys.argv[2:])
"""


class Command:
    """`pagewire batch` as a process."""

    def __init__(self, tmp_path: Path, server: Server) -> None:
        self.input, self.output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        self._argv = [sys.executable, "-m", "pagewire.cli", "batch", "--url", server.base_url]

    async def start(self, *flags: str, max_file_bytes: int = 0) -> asyncio.subprocess.Process:
        files = ["-i", str(self.input), "-o", str(self.output)]
        limited = [sys.executable, "-c", LIMITED, str(max_file_bytes)] if max_file_bytes else []
        return await asyncio.create_subprocess_exec(
            *limited, *self._argv, *files, *flags, cwd=REPOSITORY, stderr=asyncio.subprocess.PIPE
        )

    async def run(self, *flags: str, **options: Any) -> tuple[int | None, str]:
        process = await self.start(*flags, **options)
        _, errors = await asyncio.wait_for(process.communicate(), 60)
        return process.returncode, errors.decode()


@pytest.fixture
def batch(tmp_path: Path, server: Server) -> Command:
    return Command(tmp_path, server)


async def test_every_request_is_answered_once(batch: Command, server: Server) -> None:
    write(batch.input, [request(number) for number in range(50)])
    code, said = await batch.run("--concurrency", "5", "--api-key", "secret")
    assert code == 0 and "50 of 50 requests are done" in said and "50 tokens in, 100 out" in said
    found = {line["custom_id"]: line["response"] for line in answers(batch.output)}
    assert found.keys() == {f"q{number}" for number in range(50)}
    assert all(one["body"]["choices"][0]["text"] == custom_id[1:] for custom_id, one in found.items())
    assert server.most_in_flight == 5 and server.connections <= 6
    assert server.authorization == {"bearer secret"}


async def test_goes_on_where_it_was_interrupted(batch: Command, server: Server) -> None:
    write(batch.input, [request(number) for number in range(40)])

    async def until_20(body: dict[str, Any], writer: Any) -> None:
        if len(server.bodies) > 20:
            killed.set()
            await asyncio.sleep(60)
        await repeat(body, writer)

    killed, server.answer = asyncio.Event(), until_20
    process = await batch.start("--concurrency", "4")
    await asyncio.wait_for(killed.wait(), 60)
    process.kill()
    await process.communicate()
    before = answers(batch.output)
    assert before
    with batch.output.open("a") as out:
        out.write('{"id": "cut o')
    server.answer = repeat
    code, said = await batch.run()
    assert code == 0 and f"continuing: {len(before)} requests are already answered" in said
    assert answers(batch.output)[: len(before)] == before
    assert Counter(line["custom_id"] for line in answers(batch.output)) == Counter(f"q{i}" for i in range(40))
    asked = len(server.bodies)
    assert (await batch.run())[0] == 0
    assert len(server.bodies) == asked, "there was nothing left to ask"


async def test_a_server_that_is_full_or_away_is_asked_again(batch: Command, server: Server) -> None:
    write(batch.input, [request(number) for number in range(3)])
    troubles = iter(("429 Too Many Requests", "503 Service Unavailable", ""))

    async def troubled(body: dict[str, Any], writer: Any) -> None:
        match next(troubles, None):
            case None:
                await repeat(body, writer)
            case "":
                raise ConnectionResetError
            case status:
                write_whole(writer, status, {"error": {"message": "later"}})

    server.answer = troubled
    code, _ = await batch.run()
    assert code == 0 and len(server.bodies) == 6
    assert [line["response"]["status_code"] for line in answers(batch.output)] == [200] * 3


async def test_a_request_that_fails_is_reported_and_not_repeated(batch: Command, server: Server) -> None:
    write(batch.input, [request(number) for number in range(3)])

    async def refuse(body: dict[str, Any], writer: Any) -> None:
        if body["prompt"] == "1":
            data = b"<html>\nnot JSON"
            writer.write(b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: %d\r\n\r\n%s" % (len(data), data))
        else:
            await repeat(body, writer)

    server.answer = refuse
    code, said = await batch.run()
    assert code == 1 and "3 of 3 requests are done, 1 of them failed" in said
    failed = [line["response"] for line in answers(batch.output) if line["response"]["status_code"] != 200]
    assert [(one["status_code"], one["body"]) for one in failed] == [(502, {"error": {"message": "<html>\nnot JSON"}})]
    assert (await batch.run())[0] == 1
    assert len(server.bodies) == 3


async def test_a_full_disk_leaves_whole_lines(batch: Command, server: Server) -> None:
    write(batch.input, [request(number) for number in range(30)])
    code, said = await batch.run(max_file_bytes=2000)
    assert code == 1 and f"{batch.output} cannot be written (File too large)" in said and "Traceback" not in said
    assert 0 < len(answers(batch.output)) < 30
    assert (await batch.run())[0] == 0
    assert len(answers(batch.output)) == 30


async def test_two_do_not_write_one_file(batch: Command, server: Server) -> None:
    write(batch.input, [request(1)])
    results = Results(batch.output, batch.output)
    code, said = await batch.run()
    assert code == 1 and "is being written by another process" in said
    results.close()
    assert (await batch.run())[0] == 0


async def test_models_that_are_not_served_are_refused_at_once(batch: Command, server: Server) -> None:
    write(batch.input, [request(1), request(2, model="other")])
    code, said = await batch.run()
    assert code == 1 and "line 2: the model 'other' does not exist; served here: m" in said
    assert server.bodies == [] and not batch.output.exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["in.jsonl"], "name two files"),
        (["no.jsonl", "out.jsonl"], "no.jsonl cannot be read: No such file"),
        (["wrong.jsonl", "out.jsonl"], "(?s)not a file of requests:.*line 1: not valid JSON.*line 2: body is missing"),
        (["in.jsonl", "out.jsonl", "--url", "ftp://x"], "--url: expected http://host:port"),
        (["in.jsonl", "out.jsonl", "--url", "http://127.0.0.1:1"], "nothing answers at http://127.0.0.1:1"),
        (["in.jsonl", "out.jsonl", "--url", "http://127.0.0.1:1", "--max-num-seqs", "1"], "--max-num-seqs is for the"),
        (["in.jsonl", "out.jsonl", "--model", "other"], "line 1: the model 'm' does not exist; served here: other"),
    ],
)
def test_what_keeps_it_from_starting_is_said(
    argv: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("in.jsonl"), [request(1)])
    Path("wrong.jsonl").write_text('{\n{"custom_id": "a", "url": "/v1/completions"}\n')
    with pytest.raises(StartupError, match=message):
        command.main(argv)


def test_long_lines_and_files_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", [request(1), request(2, prompt="x" * lines.MAX_LINE_BYTES), request(3)])
    checked = lines.check(path, [COMPLETIONS])
    assert (checked.num_requests, [str(error) for error in checked.errors]) == (
        3,
        [f"line 2: longer than {lines.MAX_LINE_BYTES} bytes"],
    )
    write(path, [request(number) for number in range(10)])
    assert [error.code for error in lines.check(path, [COMPLETIONS], 9).errors] == ["too_many_requests"]
    assert not lines.check(path, [COMPLETIONS], 10).errors


def test_a_file_of_something_else_is_not_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_text('{"some": "data"}\n')
    with pytest.raises(Exception, match="line 1 is not the answer of a batch"):
        Results(path, path)
    assert path.read_text() == '{"some": "data"}\n'


def test_answers_and_errors_may_be_apart(tmp_path: Path) -> None:
    outputs, errors = tmp_path / "outputs", tmp_path / "errors"
    line = [Line(number, str(number), COMPLETIONS, {}) for number in range(3)]
    for _ in range(2):  # the second time, all are there
        results = Results(outputs, errors)
        results.add(line[0], Answer(200, b'{"usage": {"input_tokens": 3, "output_tokens": 4}}', "r"))
        results.add(line[1], Answer(400, b"{}", "r"))
        results.add_error(line[2], "batch_expired", "too late")
        assert (results.num_completed, results.num_failed, results.done) == (1, 2, {"0", "1", "2"})
        assert (results.usage.input_tokens, results.usage.output_tokens) == (3, 4)
        results.close()
    assert [one["custom_id"] for one in answers(outputs)] == ["0"]
    assert [(one["custom_id"], one["error"] and one["error"]["code"]) for one in answers(errors)] == [
        ("1", None),
        ("2", "batch_expired"),
    ]
