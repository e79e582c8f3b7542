"""What `pagewire tune` makes of measurements; the server is a formula."""

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from pagewire import flags
from pagewire.config import ServeConfig
from pagewire.errors import StartupError
from pagewire.tune import command, trace, tree
from pagewire.tune.config import GOALS
from pagewire.tune.measure import Figures
from pagewire.tune.search import LEAST_GAIN, Search, Slo, score
from pagewire.tune.tree import Candidate

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


def test_flags_with_which_it_does_not_start_are_told_and_left() -> None:
    server = Server({("a", 1): {"refused": 1}, ("b", 1): {"tpot_ms": 0.5}})
    found = server.search("tpot").run(lambda seen: [_one("a", 1), _one("b", 1)])
    assert found.changes == {"b": 1}
    assert found.trials[0].refused == "it does not fit"


def test_an_objective_that_was_kept_is_kept() -> None:
    server = Server({("a", 1): {"tokens_per_s": 1.5, "ttft_p99_ms": 2}})
    assert server.search("throughput", "ttft=300ms").run(lambda seen: [_one("a", 1)]).changes == {}
    assert server.search("throughput", "ttft=0.5s").run(lambda seen: [_one("a", 1)]).changes == {"a": 1}


def test_a_goal_does_not_take_all_from_another() -> None:
    server = Server({("a", 1): {"ttft_ms": 0.5, "tokens_per_s": 0.3}})
    assert server.search("ttft").run(lambda seen: [_one("a", 1)]).changes == {}


def test_chance_that_does_not_come_again_is_no_gain() -> None:
    """What is found is measured once more."""
    values = iter([100.0, 100.0, 150.0, 100.0, 150.0, 100.0, 100.0, 100.0, 100.0])

    def measure(changes: Mapping[str, Any]) -> Figures:
        return dataclasses.replace(_PLAIN, tokens_per_s=next(values))

    found = Search("throughput", measure).run(lambda seen: [_one("a", 1)])
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


@pytest.mark.parametrize("text", ["ttft", "ttft=fast", "itl=5ms", "ttft=5"])
def test_objectives_that_are_none(text) -> None:
    with pytest.raises(StartupError, match="--slo"):
        Slo.parse(text)


def test_traces(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"prompt": "b", "max_tokens": 3, "at": 1.5}\n\n{"prompt": "a", "at": 0}\n')
    assert [(one.prompt, one.max_tokens, one.at) for one in trace.read(str(path))] == [("a", 64, 0.0), ("b", 3, 1.5)]
    assert len(trace.read(None)) > 10
    for text in (
        "",
        '{"prompt": "a"}',
        '{"prompt": 1}\n{"prompt": 2}',
        "no json",
        '{"prompt": "a", "at": 1}\n{"prompt": "b"}',
        '["a"]\n["b"]',
        '{"prompt": "a", "max_tokens": true}\n{"prompt": "b"}',
        '{"prompt": "a", "at": NaN}\n{"prompt": "b", "at": 0}',
    ):
        path.write_text(text)
        with pytest.raises(StartupError, match="--trace"):
            trace.read(str(path))
    with pytest.raises(StartupError, match="--trace"):
        trace.read(str(tmp_path / "none"))


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


def test_the_command_says_if_nothing_helps(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "measure", lambda *args: _PLAIN)
    assert command.main(["--out", str(tmp_path / "none.yaml")]) == 0
    assert "keep them" in capsys.readouterr().out
    assert json.dumps([path.name for path in tmp_path.iterdir()]) == "[]"
