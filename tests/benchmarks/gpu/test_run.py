"""A first run on a GPU with parts that crash, hang and raise: the others run in their time, and the end names these."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import __main__ as first_run
from benchmarks.gpu import kernels
from benchmarks.gpu.__main__ import Record, run
from benchmarks.gpu.cases.case import OURS, Built, Case, Contestant
from benchmarks.gpu.parts import FIRST, GROUP_SECONDS, SECOND, SMOKE, SMOKE_SECONDS, Command, Part, commands
from benchmarks.gpu.processes import LEAST_SECONDS, NOT_RUN, Outcome, run_part
from benchmarks.gpu.report import Budget

KILLING = 5.0  # seconds that a process may take to end, at most


def program(name: str, text: str, seconds: float = 10, **options: Any) -> Part:
    return Part(name, ("-c", text), seconds, **options)


CRASHES = "import os, signal; print('launching', flush=True); os.kill(os.getpid(), signal.SIGSEGV)"
RAISES = "raise RuntimeError('CUDA error: an illegal memory access was encountered')"
# As a part that is ended while it measures: what it had written before is kept.
HANGS = (
    "import pathlib, subprocess, time; pathlib.Path('{out}/rows.json').write_text('[1]'); "
    "subprocess.Popen(['sleep', '600']); print('row 1', flush=True); time.sleep(600)"
)
WRONG = "print('WRONG: decode 3 x 40: error 0.5'); raise SystemExit(1)"
LEAVES_OUT = "print('left out for lack of time (--budget): decode 64 x 1024')"


def finished(command: Command, out: Path, seconds: float) -> int:
    record = Record(out, command)
    run(command, record, seconds, run_part)
    return record.finish()


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str, Any], Path]:
    out = tmp_path_factory.mktemp("run")
    smoke = (program("smoke crashing", CRASHES), program("smoke raising", RAISES), program("smoke fine", "print(1)"))
    measured = (
        program("hanging", HANGS, 1.6),
        program("wrong", WRONG),
        program("lacking", "", lacks="no peers"),
        program("last", LEAVES_OUT),
    )
    code = finished(Command(90, smoke, measured), out, 90)
    return code, {part["name"]: part for part in json.loads((out / "gpu.json").read_text())["parts"]}, out


def test_each_part_is_named_with_what_became_of_it(outcome: tuple[int, dict[str, Any], Path]) -> None:
    code, parts, _ = outcome
    states = {name: part["state"] for name, part in parts.items()}
    assert code == 1
    assert states == {
        "smoke crashing": "crashed",
        "smoke raising": "wrong",
        "smoke fine": "ok",
        "hanging": "hung",
        "wrong": "wrong",
        "lacking": "not run",
        "last": "ok",
    }
    details = {name: part["detail"] for name, part in parts.items()}
    assert "SIGSEGV" in details["smoke crashing"] and "launching" in details["smoke crashing"]
    assert "illegal memory access" in details["smoke raising"]
    assert "row 1" in details["hanging"]
    assert "decode 3 x 40" in details["wrong"]
    assert details["lacking"] == "no peers"


def test_what_a_part_had_written_before_it_was_ended_is_kept(outcome: tuple[int, dict[str, Any], Path]) -> None:
    _, parts, out = outcome
    assert parts["hanging"]["results"] == [[1]] == [json.loads((out / "hanging" / "rows.json").read_text())]
    assert "launching" in (out / "gpu.log").read_text()
    assert sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()) == [
        "gpu.json", "gpu.log", "hanging/rows.json",
    ]  # fmt: skip


def test_a_run_that_is_ended_names_what_it_did_not_come_to(tmp_path: Path) -> None:
    record = Record(tmp_path, Command(60, (), (program("first", ""), program("second", ""))))
    record.add(Outcome("first", "ok"))
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert [(part["name"], part["state"]) for part in parts] == [("first", "ok"), ("second", NOT_RUN)]


def test_a_part_without_time_is_not_begun() -> None:
    outcome = run_part(program("late", "print(1)"), 1.0)
    assert outcome.state == NOT_RUN and "no time" in outcome.detail


def test_the_last_lines_name_what_did_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measured = (program("lacking", "", lacks="no peers"), program("fine", LEAVES_OUT))
    assert finished(Command(60, (), measured), tmp_path, 60) == 0
    *_, cases, parts = capsys.readouterr().out.splitlines()
    assert cases == "fine had no time for 1: decode 64 x 1024"
    assert parts == "not run: lacking"


class Simulated:
    """Parts that take these seconds, or as long as they may and then some to be ended, by a clock of its own; keeps no
    results."""

    def __init__(self, seconds: Iterator[float]) -> None:
        self.now = 0.0
        self.given: dict[str, float] = {}
        self.outcomes: list[Outcome] = []
        self._seconds = seconds

    def clock(self) -> float:
        return self.now

    def run_one(self, part: Part, seconds: float, directory: Path | None) -> Outcome:
        if part.lacks or seconds < LEAST_SECONDS:
            return Outcome(part.name, NOT_RUN)
        self.given[part.name] = seconds
        took = next(self._seconds)
        self.now += min(took, seconds + KILLING)
        return Outcome(part.name, "ok" if took <= seconds else "hung")

    def directory(self, part: Part) -> Path:
        return Path("nowhere")

    def add(self, outcome: Outcome) -> None:
        self.outcomes.append(outcome)


def simulated(command: Command, seconds: Iterator[float]) -> Simulated:
    simulation = Simulated(seconds)
    run(command, simulation, command.seconds, simulation.run_one, simulation.clock, workers=1)
    return simulation


@pytest.mark.parametrize("name", [FIRST, SECOND])
@given(seconds=st.lists(st.floats(0, 1000), min_size=64, max_size=64))
def test_a_command_ends_in_its_time_whatever_its_parts_do(name: str, seconds: list[float]) -> None:
    command = commands("cuda", False)[name]
    simulation = simulated(command, iter(seconds))
    assert simulation.now <= command.seconds
    assert len(simulation.outcomes) == len(command.smoke) + len(command.measured)


def test_smoke_tests_that_hang_leave_the_measurements_their_time() -> None:
    command = commands("cuda", False)[FIRST]
    given = simulated(command, iter([1000.0] * 64)).given
    measured = {part.name: part.seconds for part in command.measured}
    assert list(measured.items()) == [("engine", 160), ("kernels", 160)]
    assert {name: given[name] >= seconds for name, seconds in measured.items()} == dict.fromkeys(measured, True)
    assert max(given[part.name] for part in command.smoke if part.name in given) <= SMOKE_SECONDS == 100


def test_tuning_gets_what_is_left() -> None:
    command = commands("cuda", False)[SECOND]
    given = simulated(command, iter([90.0, 1000.0])).given
    assert given["kernels"] >= 145 and given["tuning"] == pytest.approx(220 - 10 - 90)


def test_the_commands_are_sized_for_a_machine_that_is_lent_for_minutes() -> None:
    """The first takes 470 s, the second 220 s, within the ten minutes of a call and the fifteen of a machine."""
    found = commands("cuda", False)
    assert {name: command.seconds for name, command in found.items()} == {FIRST: 470, SECOND: 220}
    first = found[FIRST]
    assert [part.name for part in first.smoke[:4]] == [f"{SMOKE} attention {part}/4" for part in range(1, 5)]
    engine = first.measured[0].arguments
    assert engine[engine.index("--models") + 1] == "llama-3.1-8b-int4,llama-3.1-8b"
    assert [list(GROUP_SECONDS[name]) for name in found] == [
        ["decode", "prefill", "sampling"], ["w4", "experts", "products", "elementwise"],
    ]  # fmt: skip
    assert GROUP_SECONDS[FIRST]["decode"] + GROUP_SECONDS[FIRST]["prefill"] == 120
    for command in found.values():
        whole = sum(part.seconds for part in command.measured) + (SMOKE_SECONDS if command.smoke else 0)
        assert whole <= command.seconds - 10


# Measures groups until it comes to one that ends the process.
MEASURES = """
import json, os, pathlib
groups, begun = "{groups}".split(","), []
for group in groups:
    begun.append(group)
    pathlib.Path("{out}/rows.json").write_text(json.dumps(dict(begun=begun)))
    if group == "prefill":
        os.abort()
print("measured", *groups)
"""


def test_groups_behind_one_that_crashes_are_begun_again(tmp_path: Path) -> None:
    part = program("kernels", MEASURES, groups={"decode": 20.0, "prefill": 10.0, "sampling": 10.0})
    assert finished(Command(60, (), (part, program("last", "print('done')"))), tmp_path, 60) == 1
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    again = "kernels after a crashed one"
    assert {part["name"]: part["state"] for part in parts} == {"kernels": "crashed", "last": "ok", again: "ok"}
    (output,) = (part["output"] for part in parts if part["name"] == again)
    assert output == "measured sampling\n"


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_no_group_takes_the_time_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock, cpu = Clock(), torch.device("cpu")

    def cases(group: str, count: int, seconds: float) -> Callable[[torch.device, bool], Iterator[Case]]:
        def build() -> Built:
            clock.now += seconds
            return Built({OURS: Contestant([lambda: None], None)})

        return lambda device, small: (Case(group, f"{group} {index}", 1024, build) for index in range(count))

    for group, count in (("decode", 1000), ("prefill", 2), ("sampling", 1000)):
        monkeypatch.setitem(kernels.GROUPS, group, cases(group, count, 1.0))
    budget = Budget(160.0, clock)
    assert kernels.run(["decode", "prefill", "sampling"], cpu, True, tmp_path, budget) == 0
    assert clock.now <= 161
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    counts = {group: sum(row["group"] == group for row in data["rows"]) for group in kernels.GROUPS}
    assert data["begun"] == ["decode", "prefill", "sampling"]
    # What prefill does not need is for sampling.
    assert (counts["decode"], counts["prefill"], counts["sampling"]) == (
        pytest.approx(80, abs=1),
        2,
        pytest.approx(78, abs=1),
    )
    assert len(data["left_out"]) == 2000 - counts["decode"] - counts["sampling"] == len(budget.left_out)


@pytest.mark.slow
def test_a_real_kernel_family_passes_in_the_interpreter(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    names = (f"{SMOKE} step_inputs", f"{SMOKE} skinny_product replayed", f"{SMOKE} attention 4/4")
    command = first_run._selected(commands("cpu", True)[FIRST], names)
    assert len(command.smoke) == 3
    assert finished(command, tmp_path, 300) == 0
