"""Steps by the clock on the wall."""

from pagewire.services.scheduler.busy_time import BusyTime


def test_what_passes_between_a_result_and_the_next_step_counts_while_there_is_work() -> None:
    busy = BusyTime()
    busy.on_sent(10.0)
    assert busy.on_result(is_busy=True, now=11.0) == 1.0
    busy.on_sent(11.5)
    assert busy.on_result(is_busy=True, now=12.0) == 1.0


def test_steps_that_overlap_share_the_time() -> None:
    busy = BusyTime()
    busy.on_sent(10.0)
    busy.on_sent(10.5)
    assert [busy.on_result(is_busy=True, now=12.0), busy.on_result(is_busy=False, now=13.0)] == [2.0, 1.0]


def test_time_without_work_is_nobodys() -> None:
    busy = BusyTime()
    busy.on_sent(10.0)
    busy.on_result(is_busy=False, now=11.0)
    busy.on_sent(100.0)
    assert busy.on_result(is_busy=False, now=101.0) == 1.0
