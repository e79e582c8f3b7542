"""The replicas that an arrival, a result or an end wakes, with few replicas and with many."""

from typing import Any

import pytest

from benchmarks.fleet.devices import DEVICES
from benchmarks.fleet.simulation import Case, Fleet
from benchmarks.scheduler_step import result_of
from pagewire.config import SchedulerConfig
from pagewire.config.sampling_checks import resolve
from pagewire.services.scheduler.compose import make_scheduler
from pagewire.services.scheduler.core.replica import Replica
from pagewire.services.scheduler.core.wakes import Wakes
from pagewire.services.scheduler.placement.placement import CacheAware
from pagewire.services.scheduler.values.request import Request
from pagewire.v1.common_pb2 import SamplingParams


class Idle:
    """A number of replicas, all of which have found that no request waits."""

    def __init__(self, num_replicas: int) -> None:
        self.scheduler = make_scheduler(SchedulerConfig(), num_replicas)
        self.wakes = Wakes(self.scheduler)
        device = DEVICES["cpu"].with_blocks(256)
        for replica in self.scheduler.replicas:
            self.scheduler.attach(replica, device.info(1))
            assert self.scheduler.schedule(replica) is None
            self.wakes.after_decision(replica, None)

    def add(self, request_id: int) -> Request:
        request = Request(request_id, [request_id] * 40, resolve(SamplingParams(max_tokens=4, ignore_eos=True, seed=1)))
        self.scheduler.add_request(request)
        return request


def test_few_that_rest_are_all_asked_and_those_at_work_are_not() -> None:
    idle = Idle(3)
    first = idle.add(1)
    assert set(idle.wakes.after_arrival(first)) == set(idle.scheduler.replicas)
    taker = next(one for one in idle.scheduler.replicas if _decides(idle, one))
    others = set(idle.scheduler.replicas) - {taker}
    assert set(idle.wakes.after_arrival(idle.add(2))) == others


def test_of_many_that_rest_one_is_asked_and_takes_it() -> None:
    idle = Idle(20)
    for request_id in range(1, 6):
        (named,) = idle.wakes.after_arrival(idle.add(request_id))
        assert _decides(idle, named), f"request {request_id} is not taken"
    assert idle.scheduler.num_waiting == 0 and idle.scheduler.num_running == 5


def test_a_result_wakes_its_replica_first_and_an_end_the_one_that_ran_it() -> None:
    idle = Idle(20)
    request = idle.add(1)
    (named,) = idle.wakes.after_arrival(request)
    step = idle.scheduler.schedule(named)
    assert step is not None and not idle.wakes.after_decision(named, step)
    idle.scheduler.update(named, result_of(step))
    assert list(idle.wakes.after_result(named)) == [named]
    idle.scheduler.abort(request)
    assert list(idle.wakes.after_end()) == [named], "its executor is to hear of the free row"


@pytest.mark.parametrize("placement", ["cache_aware", "least_load", "round_robin"])
def test_no_request_is_forgotten_among_many_replicas(placement: str) -> None:
    """`Fleet` raises AssertionError if a request is."""
    case = Case(16, 100, device="cpu", num_blocks=512, rate=20.0, num_deaths=4, config={"placement": placement})
    report = Fleet(case).run()
    assert report.num_ended == 100


def _decides(idle: Idle, replica: Replica) -> bool:
    """Returns whether a replica runs a request."""
    step = idle.scheduler.schedule(replica)
    idle.wakes.after_decision(replica, step)
    return step is not None


def test_a_request_is_looked_at_as_often_among_many_replicas_as_among_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other replicas pass a request over that was left to one, until that has decided."""
    looks: list[Request] = []
    candidates = CacheAware.candidates

    def counted(self: CacheAware, request: Request, *args: Any, **given: Any) -> Any:
        looks.append(request)
        return candidates(self, request, *args, **given)

    monkeypatch.setattr(CacheAware, "candidates", counted)
    per_request = []
    for num_replicas in (4, 24):
        looks.clear()
        Fleet(Case(num_replicas, 120, num_blocks=512, rate=40.0)).run()
        per_request.append(len(looks) / 120)
    assert per_request[1] < 2 * per_request[0], per_request
