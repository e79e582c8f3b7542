"""The simulated fleet: what has to hold whatever it is given. Nothing in it depends on time but what is measured."""

import dataclasses
import json
from pathlib import Path

import pytest

from benchmarks.fleet.__main__ import main
from benchmarks.fleet.front import FRONTS, front
from benchmarks.fleet.simulation import Case, Fleet, Report
from benchmarks.fleet.workload import Conversation, Shape

SHAPE = Shape(num_system_prompts=40, output_tokens=20, think_seconds=1.0)
MEASURED = ("cores", "max_cores", "cpu_us", "max_rss_mib", "wall_seconds")


def run(**case: object) -> Report:
    """`Fleet` itself raises AssertionError if a request or a token is lost, or if blocks and rows do not agree."""
    return Fleet(Case(num_requests=200, device="cpu", num_blocks=4096, shape=SHAPE, **case)).run()  # type: ignore[arg-type]


def simulated(report: Report) -> dict[str, object]:
    return {name: value for name, value in dataclasses.asdict(report).items() if name not in MEASURED}


def test_a_seed_says_it_all() -> None:
    assert simulated(run(num_replicas=3)) == simulated(run(num_replicas=3))
    assert simulated(run(num_replicas=3)) != simulated(run(num_replicas=3, seed=2))


def test_one_replica_finds_nearly_all_that_can_be_found() -> None:
    report = run(num_replicas=1)
    assert report.num_ended == 200 and report.num_failed == 0
    assert 0.9 * report.best_hit_rate < report.hit_rate <= report.best_hit_rate


def test_more_replicas_for_the_same_requests_answer_sooner() -> None:
    one, four = run(num_replicas=1, rate=60.0), run(num_replicas=4, rate=15.0)
    assert four.ttft_p50 < one.ttft_p50 and four.tpot_p50 < one.tpot_p50


@pytest.mark.parametrize("num_schedulers", [1, 2])
def test_nothing_is_lost_when_executors_die_and_others_join(num_schedulers: int) -> None:
    report = run(num_replicas=6, num_schedulers=num_schedulers, num_deaths=4, down_seconds=1.0, late=0.5)
    assert report.num_ended == 200


def test_a_conversation_stays_where_it_is_known_until_that_scheduler_has_too_much() -> None:
    for name in ("conversation", "prompt"):
        choose = front(name, 4)
        home = choose(Conversation(7, 3, []), [5, 5, 5, 5])
        assert choose(Conversation(7, 3, []), [5, 5, 5, 5]) == home
        loads = [5, 5, 5, 5]
        loads[home] = 50
        assert choose(Conversation(7, 3, []), loads) != home
        numbers = [choose(Conversation(n, n, []), [5, 5, 5, 5]) for n in range(400)]
        assert min(numbers.count(i) for i in range(4)) > 40
    assert front("least", 3)(Conversation(1, 1, []), [4, 2, 3]) == 1


@pytest.mark.parametrize("name", FRONTS)
def test_several_schedulers_share_the_requests(name: str) -> None:
    report = run(num_replicas=4, num_schedulers=2, front=name)
    assert report.num_ended == 200 and report.max_cores < report.cores


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fleet.json"
    main(["--quick", "--json-out", str(out)])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:4]] == ["1", "4"]
    found = json.loads(out.read_text())
    assert found["command"] == f"python -m benchmarks.fleet --quick --json-out {out}"
    assert [one["report"]["num_ended"] for one in found["results"]] == [300, 300]


def test_tiers_find_what_the_kv_cache_no_longer_holds() -> None:
    small = Case(2, 200, device="cpu", num_blocks=600, shape=SHAPE, num_deaths=2, down_seconds=1.0)
    without, with_disk = Fleet(small).run(), Fleet(dataclasses.replace(small, tier="disk", sharing=2)).run()
    assert without.load_rate == 0 < with_disk.load_rate
    assert without.hit_rate < with_disk.hit_rate
    assert with_disk.ttft_p50 < without.ttft_p50


def test_prompts_and_outputs_apart_lose_nothing() -> None:
    report = run(num_replicas=4, prefill=0.5, num_deaths=3, down_seconds=1.0)
    assert report.num_ended == 200
    assert report.load_rate > 0.3  # most prompts go on at another executor
