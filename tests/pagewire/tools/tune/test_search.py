"""The conclusions of `pagewire tune` from measurements; the server is a formula."""

import asyncio
import contextlib
import dataclasses
import json
import os
import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pagewire import flags
from pagewire.config import ServeConfig
from pagewire.errors import StartupError
from pagewire.flags.model_facts import ModelFacts
from pagewire.tools.tune import command, measure, trace, tree
from pagewire.tools.tune.config import GOALS
from pagewire.tools.tune.measure import Figures
from pagewire.tools.tune.search import LEAST_GAIN, Search, Slo, is_gain, score
from pagewire.tools.tune.tree import Candidate
from tests.pagewire.tools.openai_server import Server as OpenAiServer
from tests.pagewire.tools.openai_server import listening, write_whole

REPOSITORY = Path(__file__).parents[4]

_PLAIN = Figures(ttft_ms=100, ttft_p99_ms=200, tpot_ms=10, tpot_p99_ms=20, tokens_per_s=100, resident_mib=1000)


class Server:
    """Figures by flags. effects: factors of quantities, for (flag, value)."""

    def __init__(self, effects: Mapping[tuple[str, Any], Mapping[str, float]], seconds: float = 1.0) -> None:
        self.effects, self.seconds, self.now = effects, seconds, 0.0
        self.asked: list[Mapping[str, Any]] = []

    def measure(self, changes: Mapping[str, Any]) -> Figures:
        self.asked.append(dict(changes))
        self.now += self.seconds
        figures = _PLAIN
        for change in changes.items():
            effect = self.effects.get(change, {})
            if "refused" in effect:
                raise StartupError("it does not fit\nsays the executor")
            scaled = {name: getattr(figures, name) * factor for name, factor in effect.items()}
            figures = dataclasses.replace(figures, **scaled)
        return figures

    def search(self, goal: str, slo: str = "", seconds: float = 1000.0) -> Search:
        return Search(goal, self.measure, Slo.parse(slo), rounds=2, seconds=seconds, clock=lambda: self.now)


def _one(name: str, value: Any) -> Candidate:
    return Candidate({name: value}, "it may help")


def test_what_helps_is_kept_and_what_does_not_is_not() -> None:
    server = Server({
        ("a", 1): {"tokens_per_s": 1.2},
        ("b", 1): {"tokens_per_s": 0.9},
        ("c", 1): {"tokens_per_s": 1.5},
        ("d", 1): {"tokens_per_s": 1 + LEAST_GAIN / 2},
    })  # fmt: skip
    found = server.search("throughput").run(lambda seen: [_one(name, 1) for name in "abcd"])
    assert found.changes == {"a": 1, "c": 1}
    assert [trial.is_taken for trial in found.trials] == [True, False, True, False]
    assert found.gain == pytest.approx(0.8)
    assert {"a": 1, "b": 1} in server.asked  # each beside the best before it


def test_flags_with_which_it_does_not_start_are_reported_and_left() -> None:
    server = Server({("a", 1): {"refused": 1}, ("b", 1): {"tpot_ms": 0.5}})
    found = server.search("tpot").run(lambda seen: [_one("a", 1), _one("b", 1)])
    assert found.changes == {"b": 1}
    assert found.trials[0].refused == "it does not fit"


def test_an_objective_that_was_kept_is_kept() -> None:
    server = Server({("a", 1): {"tokens_per_s": 1.5, "ttft_p99_ms": 2}})
    assert server.search("throughput", "ttft=300ms").run(lambda seen: [_one("a", 1)]).changes == {}
    assert server.search("throughput", "ttft=0.5s").run(lambda seen: [_one("a", 1)]).changes == {"a": 1}


def test_an_objective_that_nothing_keeps_is_reported() -> None:
    server = Server({("a", 1): {"tokens_per_s": 1.5}})
    found = server.search("throughput", "ttft=1ms,tpot=5ms").run(lambda seen: [_one("a", 1)])
    assert found.changes == {"a": 1}, "it is no worse for that"
    reported = "\n".join(command.summary(found, command.TuneConfig()))
    assert "--slo is not met" in reported
    assert "time to first token, p99, is 200 ms and not 1, time per output token, p99, is 20 ms and not 5" in reported


@pytest.mark.parametrize(
    ("gains", "taken"),
    [
        ((0.17,), False),  # one round may be chance
        ((0.25,), True),
        ((0.15, 0.18), True),
        ((0.04, 0.05, 0.06), True),
        ((0.01, 0.3), False),
        ((0.05, 0.4), False),  # so much the same flags differ
        ((-0.1, 0.3), False),
    ],
)
def test_a_gain_is_more_than_chance(gains: tuple[float, ...], taken: bool) -> None:
    assert is_gain(gains) is taken


def test_a_goal_does_not_take_all_from_another() -> None:
    server = Server({("a", 1): {"ttft_ms": 0.5, "tokens_per_s": 0.3}})
    assert server.search("ttft").run(lambda seen: [_one("a", 1)]).changes == {}


def test_chance_that_does_not_come_again_is_no_gain() -> None:
    """The best trial is measured once more."""
    values = iter([100.0, 100.0, 150.0, 100.0, 150.0, 100.0, 100.0, 100.0, 100.0])

    def measure(changes: Mapping[str, Any]) -> Figures:
        return dataclasses.replace(_PLAIN, tokens_per_s=next(values))

    found = Search("throughput", measure, rounds=2).run(lambda seen: [_one("a", 1)])
    assert found.trials[0].is_taken
    assert found.changes == {}


@given(st.floats(1.0, 200.0), st.integers(1, 20))
def test_time_is_kept(seconds: float, num_candidates: int) -> None:
    server = Server({}, seconds=1.0)
    found = server.search("memory", seconds=seconds).run(lambda seen: [_one("a", i) for i in range(num_candidates)])
    assert server.now <= max(1.0, seconds)
    assert found.is_out_of_time == (len(found.trials) < num_candidates)


@pytest.mark.parametrize("goal", GOALS)
@pytest.mark.parametrize("prompt_tokens, waited, preempted", [(50, 0.0, 0), (4000, 0.5, 3)])
def test_every_candidate_is_a_configuration(goal, prompt_tokens, waited, preempted) -> None:
    seen = dataclasses.replace(_PLAIN, prompt_tokens=prompt_tokens, waited=waited, preempted=preempted)
    found = tree.candidates(goal, ServeConfig(), seen, mean_output=100, cores=8)
    assert len(found) >= 3
    for candidate in found:
        changed = dataclasses.replace(ServeConfig(), **candidate.flags)
        assert changed != ServeConfig()
        parsed = flags.parse(ServeConfig, flags.to_argv(changed), prog="", description="", environ={})
        assert parsed == changed


@pytest.mark.parametrize(
    ("bits", "quantization", "advice"),
    [
        (4, None, "a smaller model (the weights have 4 bits already)"),
        (4, "none", "the weights as they are stored, in 4 bits (without --quantization none)"),
        (8, None, "weights in 4 bits (pagewire quantize, from a checkpoint in 16 bits)"),
        (16, None, "weights in 4 bits (pagewire quantize, from a checkpoint in 16 bits)"),
        (0, None, "weights in 4 bits (pagewire quantize, from a checkpoint in 16 bits)"),
    ],
)
def test_advice_fits_the_weights(bits: int, quantization: str | None, advice: str) -> None:
    model, serve = ModelFacts(Path(), bits=bits), ServeConfig(quantization=quantization, device="cpu")
    assert tree.what_else(serve, model) == f"{advice}, more cores, or a GPU"
    found = tree.candidates("tpot", serve, _PLAIN, mean_output=100, cores=2, model=model)
    drafts = any("spec_model" in one.flags for one in found)
    assert drafts == (bits > 6 or quantization == "none")


def test_advice_fits_the_layers() -> None:
    """A state cannot take drafts back, and latent vectors are not stored in fp8."""
    model = ModelFacts(Path(), has_state=True, can_be_8_bits=False)
    for goal in GOALS:
        seen = dataclasses.replace(_PLAIN, preempted=3)
        for candidate in tree.candidates(goal, ServeConfig(), seen, mean_output=100, cores=2, model=model):
            assert not {"spec_method", "spec_model", "kv_cache_dtype"} & candidate.flags.keys()


def test_what_waits_gets_rows() -> None:
    waiting, idle = (dataclasses.replace(_PLAIN, waited=share) for share in (0.5, 0.0))

    def flags_for(seen: Figures) -> list[Mapping[str, Any]]:
        return [one.flags for one in tree.candidates("ttft", ServeConfig(), seen, mean_output=9, cores=2)]

    assert {"max_num_seqs": 256} in flags_for(waiting)
    assert {"max_num_seqs": 256} not in flags_for(idle)


@pytest.mark.parametrize("goal", GOALS)
def test_more_is_better(goal) -> None:
    better = Figures(ttft_ms=50, ttft_p99_ms=1, tpot_ms=5, tpot_p99_ms=1, tokens_per_s=200, resident_mib=500)
    assert score(goal, better) == pytest.approx(2 * score(goal, _PLAIN))


@pytest.mark.parametrize("text", ["ttft", "ttft=fast", "itl=5ms", "ttft=5", "ttft=1s,ttft=2s"])
def test_objectives_that_are_none(text) -> None:
    with pytest.raises(StartupError, match="--slo"):
        Slo.parse(text)


def test_traces(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "b", "max_tokens": 3, "at": 1.5}\n\n{"prompt": "a", "at": 0}\n')
    assert [(one.prompt, one.max_tokens, one.at) for one in trace.read(str(path))] == [("a", 64, 0.0), ("b", 3, 1.5)]
    assert len(trace.read(None)) > 10
    for text, said in (
        ("", "at least two requests"),
        ('{"prompt": "a"}', "at least two requests"),
        ('{"prompt": "b"}\n{"prompt": 2}', "line 2: prompt is 2; expected"),
        ("no json", "line 1: not JSON"),
        ('{"prompt": "a", "at": 1}\n{"prompt": "b"}', "give all or none"),
        ('["a"]\n["b"]', "line 1: expected"),
        ('{"prompt": "a", "max_tokens": true}\n{"prompt": "b"}', "line 1: max_tokens is True"),
        ('{"prompt": "a", "at": NaN}\n{"prompt": "b", "at": 0}', "line 1: at is nan"),
        ('{"prompt": "a", "prompt": "b"}', "line 1: not JSON: key 'prompt' is given twice"),
        ('{"prompt": ""}\n{"prompt": "b"}', "line 1: prompt is ''"),
        ('{"prompt": "\\ud800"}', "line 1: prompt is"),
        ("[" * 100_000, "line 1: not JSON"),
    ):
        path.write_text(text)
        with pytest.raises(StartupError, match=f"--trace .*{re.escape(said)}"):
            trace.read(str(path))
    path.write_bytes(b"\xff\n")
    for no_trace in (path, tmp_path, tmp_path / "none"):
        with pytest.raises(StartupError, match="--trace"):
            trace.read(str(no_trace))


def test_the_trace_of_the_examples_is_one() -> None:
    requests = trace.read(str(REPOSITORY / "examples/trace.jsonl"))
    assert len(requests) == 24 and 5 < trace.seconds(requests) < 10


def test_a_trace_that_takes_longer_than_there_is_time(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "a", "at": 0}\n{"prompt": "b", "at": 100000}\n')
    with pytest.raises(StartupError, match=r"takes 100000 s, .* give --minutes 21667 or more, fewer --rounds"):
        command.main(["--trace", str(path)])


def test_the_command_writes_a_file_that_serve_takes(tmp_path, monkeypatch, capsys) -> None:
    def measure(serve, changes, requests, concurrency) -> Figures:
        assert serve.max_num_seqs == 16
        return dataclasses.replace(_PLAIN, tokens_per_s=100.0 * (2 if changes.get("target_itl_ms") == 0 else 1))

    monkeypatch.setattr(command, "measure", measure)
    out = tmp_path / "tuned.yaml"
    argv = ["--goal", "throughput", "--max-num-seqs", "16", "--api-key", "secret"]
    assert command.main([*argv, "--out", str(out)]) == 0
    assert "secret" not in out.read_text()
    with pytest.raises(StartupError, match="--out"):  # before anything is measured
        command.main(["--max-num-seqs", "8", "--out", str(tmp_path / "none" / "tuned.yaml")])
    assert yaml.safe_load(out.read_text()) == {"max-num-seqs": 16, "target-itl-ms": 0.0}
    taken = flags.parse(ServeConfig, ["--config", str(out)], prog="", description="", environ={})
    assert (taken.max_num_seqs, taken.target_itl_ms) == (16, 0.0)
    assert "100.0     200.0" in capsys.readouterr().out


class Stack:
    """A server that runs already, in place of a stack started for the trial."""

    def __init__(self, rest: str) -> None:
        self.rest, self.pid = rest, os.getpid()

    def __call__(self, serve: ServeConfig) -> "Stack":
        return self

    def await_ready(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def server(monkeypatch) -> Iterator[OpenAiServer]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    served = contextlib.AsyncExitStack()
    found = asyncio.run_coroutine_threadsafe(served.enter_async_context(listening()), loop).result()
    monkeypatch.setattr(measure, "OwnStack", Stack(found.base_url))
    yield found
    asyncio.run_coroutine_threadsafe(served.aclose(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_a_trace_is_sent_as_it_was_recorded(tmp_path, server, capsys) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [{"prompt": f"question {index}", "max_tokens": 4 + index, "at": 0.02 * index} for index in range(4)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    argv = ["--trace", str(path), "--slo", "ttft=1ms", "--goal", "memory", "--rounds", "1"]
    assert command.main([*argv, "--out", str(tmp_path / "tuned.yaml")]) == 0
    sent = [(one["prompt"], one["max_tokens"]) for one in server.bodies if one["prompt"].startswith("question")]
    assert sent[:4] == [(row["prompt"], row["max_tokens"]) for row in rows]
    assert all(one["ignore_eos"] for one in server.bodies)
    assert "4 requests, goal memory" in capsys.readouterr().out


def test_requests_that_fail_are_no_gain(tmp_path, server, capsys) -> None:
    stream = server.answer

    async def answer(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        if "long" in body["prompt"]:
            write_whole(writer, "400 Bad Request", {"error": {"message": "it is too long"}})
        else:
            await stream(body, writer)

    server.answer = answer
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "too long"}\n{"prompt": "short"}\n')
    command.main(["--trace", str(path), "--goal", "memory", "--rounds", "1", "--out", str(tmp_path / "tuned.yaml")])
    assert "1 requests fail with the flags as they are: HttpError: HTTP 400" in capsys.readouterr().out
    path.write_text('{"prompt": "too long"}\n{"prompt": "long"}\n')
    with pytest.raises(StartupError, match=r"none of 2 requests was answered: HttpError: HTTP 400 .*it is too long"):
        command.main(["--trace", str(path)])


def test_an_interrupt_reports_what_is_lost(tmp_path, monkeypatch, capsys) -> None:
    def interrupted(*args: Any) -> Figures:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        command.main(["--out", str(tmp_path / "tuned.yaml")])
    assert "stopped: nothing is written" in capsys.readouterr().out


def test_a_disk_that_is_full_costs_no_measurement(monkeypatch, capsys) -> None:
    gains = {"target_itl_ms": 2}
    monkeypatch.setattr(command, "measure", lambda serve, changes, requests, concurrency: dataclasses.replace(
        _PLAIN, tokens_per_s=100.0 * (2 if gains.keys() & changes.keys() else 1)))  # fmt: skip
    with pytest.raises(StartupError, match=r"--out /dev/full: No space left .*the flags are: target-itl-ms: 0"):
        command.main(["--goal", "throughput", "--out", "/dev/full"])


def test_the_command_says_if_nothing_helps(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "measure", lambda *args: _PLAIN)
    assert command.main(["--out", str(tmp_path / "none.yaml")]) == 0
    assert "keep the given ones" in capsys.readouterr().out
    assert json.dumps([path.name for path in tmp_path.iterdir()]) == "[]"
