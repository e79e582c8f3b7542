"""`pagewire ps`, `stop` and `run` with the models of running stacks."""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagewire import cli
from pagewire.config import ServeConfig
from pagewire.errors import StartupError
from pagewire.stack import running
from pagewire.tools.client_config import GenerateConfig
from pagewire.tools.generate import reached
from pagewire.tools.terminal import run
from pagewire.v1.lines_pb2 import Line
from tests.pagewire.tools.fake_lines import ABSENT, ASLEEP, LOADING, READY, FakeLines, serving


@pytest.fixture
def lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeLines]:
    """A stack with a model that serves and one that does not."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    one = Line(name="one", served_names=["one"], aliases=["gpt"], state=READY, tokenizer_address="unix:/one")
    one.size_bytes, one.memory_bytes, one.memory_measured, one.pinned = 100_000_000, 2_000_000_000, True, True
    two = Line(name="two", size_bytes=3_000_000_000, memory_bytes=4_000_000_000)
    service = FakeLines(one, two)
    config = ServeConfig(model="/models/one", served_model_name="one", port=9000, grpc_port=9001)
    with (
        serving(service, f"unix:{tmp_path}/lines.sock") as address,
        running.announced(config, shared=True, lines=address),
    ):
        yield service


def shown(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    assert cli._dispatch(["ps"]) == 0
    return [line.split() for line in capsys.readouterr().out.splitlines()]


def test_ps_lists_the_models_of_a_stack(lines: FakeLines, capsys: pytest.CaptureFixture[str]) -> None:
    lines.lines[0].rest_time.FromMilliseconds(int((time.time() + 3700) * 1000))
    head, first, second = shown(capsys)
    assert head[:5] == ["MODEL", "STATE", "SIZE", "MEMORY", "UNTIL"]
    assert first[:7] == ["one,gpt", "ready", "100", "MB", "2.0", "GB", "in"] and first[7].startswith("1:01:")
    assert second[:6] == ["two", "absent", "3.0", "GB", "-", "-"]
    assert "http://127.0.0.1:9000/v1" in first and "127.0.0.1:9001" in first
    assert "http://127.0.0.1:9000/v1" in second and "127.0.0.1:9001" not in second, "its port has the first model alone"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"state": READY, "tokenizer_address": "unix:/t"}, "ready 3.0 GB ~4.0 GB room is needed http"),
        ({"state": READY, "tokenizer_address": "unix:/t", "pinned": True}, "ready 3.0 GB ~4.0 GB forever http"),
        ({"state": ASLEEP, "tokenizer_address": "unix:/t"}, "asleep 3.0 GB - - http"),
        ({"state": LOADING, "progress": "reads weights"}, "loading 3.0 GB ~4.0 GB room is needed http"),
        ({"state": ABSENT, "progress": "waits for one"}, "waiting 3.0 GB - - http"),
        ({"state": ABSENT, "problem": "it is corrupt"}, "failed 3.0 GB - - http"),
    ],
)
def test_ps_shows_the_state_of_a_model(
    lines: FakeLines, capsys: pytest.CaptureFixture[str], values: dict[str, Any], expected: str
) -> None:
    FakeLines._set(lines.lines[1], values)
    rows = shown(capsys)
    assert " ".join(rows[2][1:]).startswith(expected)
    assert rows[3:] == ([] if "problem" not in values else [["two:", "it", "is", "corrupt"]])


def test_ps_says_when_a_model_that_failed_is_tried_again(lines: FakeLines, capsys: pytest.CaptureFixture[str]) -> None:
    lines.lines[1].problem = "it is corrupt"
    lines.lines[1].retry_time.FromMilliseconds(int(time.mktime((2030, 1, 2, 13, 14, 15, 0, 0, -1)) * 1000))
    assert shown(capsys)[3] == ["two:", "it", "is", "corrupt", "(a", "request", "after", "13:14:15", "tries", "again)"]


def test_a_stack_that_does_not_answer_is_listed_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with running.announced(ServeConfig(served_model_name="m"), shared=True, lines=f"unix:{tmp_path}/none.sock"):
        _, row, *problem = shown(capsys)
    assert row[:2] == ["m", "-"] and " ".join(problem[0]).startswith("the stack of process")


def test_stop_ends_the_processes_of_a_model(lines: FakeLines, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._dispatch(["stop", "gpt"]) == 0
    assert lines.calls == [("end", "one")] and capsys.readouterr().out == "stopped one; 2.0 GB are free\n"
    assert cli._dispatch(["stop", "two"]) == 0
    assert lines.calls == [("end", "one")] and capsys.readouterr().out == "two is not in memory\n"
    FakeLines._set(lines.lines[1], {"state": ASLEEP, "tokenizer_address": "unix:/two"})
    assert cli._dispatch(["stop", "two"]) == 0
    assert capsys.readouterr().out == "stopped two\n", "one that slept had given its memory back"
    with pytest.raises(StartupError, match="no stack of this user serves three; `pagewire ps`"):
        cli._dispatch(["stop", "three"])
    with pytest.raises(StartupError, match="name the model to stop"):
        cli._dispatch(["stop"])


def test_the_only_model_of_a_stack_is_ended_with_it(lines: FakeLines) -> None:
    del lines.lines[1]
    with pytest.raises(StartupError, match=r"one is the only model of process \d+, .* `kill \d+`"):
        cli._dispatch(["stop", "one"])
    assert not lines.calls


def test_a_stack_that_lists_no_models_is_ended_as_a_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with (
        running.announced(ServeConfig(served_model_name="m"), shared=True),
        pytest.raises(StartupError, match="m is the only model of process"),
    ):
        cli._dispatch(["stop", "m"])


async def test_run_takes_the_stack_that_has_the_model(lines: FakeLines) -> None:
    for name, line in (("one", "one"), ("gpt", "one"), ("two", "two")):
        served = await run._running(run.RunConfig(model=name))
        assert served is not None and served.line == line
    assert await run._running(run.RunConfig(model="one", max_model_len=512)) is None, "it would need a stack of its own"


async def test_run_waits_until_the_model_is_loaded(lines: FakeLines, capsys: pytest.CaptureFixture[str]) -> None:
    lines.steps = [{"progress": "reads weights"}, {"state": READY, "tokenizer_address": "unix:/two"}]
    served = await run._running(run.RunConfig(model="two"))
    assert served is not None and await served.ready() == "unix:/two"
    assert lines.calls == [("request", "two")] and capsys.readouterr() == ("", ""), "progress is for terminals"


async def test_run_shows_how_far_the_model_is(
    lines: FakeLines, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    lines.steps = [{"progress": "reads weights"}, {"state": READY, "tokenizer_address": "unix:/two"}]
    served = await run._running(run.RunConfig(model="two"))
    assert served is not None and await served.ready() == "unix:/two"
    seen = capsys.readouterr().err
    assert "two loads (0 s) ..." in seen and "two reads weights (0 s) ..." in seen and seen.endswith("\r\x1b[K")


async def test_run_says_why_a_model_cannot_be_loaded(lines: FakeLines) -> None:
    served = await run._running(run.RunConfig(model="two"))
    assert served is not None
    lines.steps = [{"state": ABSENT, "problem": "it is corrupt"}]
    with pytest.raises(StartupError, match="two cannot be loaded: it is corrupt"):
        await served.ready()
    lines.refusal = "it needs 4 GB of 3 GB"
    with pytest.raises(StartupError, match="it needs 4 GB of 3 GB"):
        await served.ready()


async def test_a_model_that_is_named_at_a_stack_is_loaded(lines: FakeLines) -> None:
    lines.steps = [{"state": READY, "tokenizer_address": "unix:/two"}]
    for address in ("http://127.0.0.1:9000/v1", "localhost:9001"):
        config, served = await reached(GenerateConfig(address=address, model="two"))
        assert (config.address, config.model) == ("unix:/two", "") and served is not None
        config, _ = await reached(GenerateConfig(address=address, model="an-adapter"))
        assert config.address.endswith(":9001") and config.model == "an-adapter", (
            "the public port serves it, or says no"
        )
    config, served = await reached(GenerateConfig(address="localhost:9001"))
    assert (config.address, served) == ("localhost:9001", None), "its public port serves the first"
    FakeLines._set(lines.lines[0], {"state": ASLEEP})
    config, served = await reached(GenerateConfig(address="localhost:9001"))
    assert config.address == "unix:/one" and lines.calls[-1] == ("request", "one")
    config, served = await reached(GenerateConfig(address="127.0.0.1:9007", model="two"))
    assert (config.address, served) == ("127.0.0.1:9007", None)
