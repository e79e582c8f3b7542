"""Jobs that take too long are given up; others go on."""

import threading
import time

import pytest

from pagewire.services.tokenizer.pool.timed_threads import TimedThreads


class TooSlowError(Exception):
    pass


def test_only_a_job_that_takes_too_long_is_given_up() -> None:
    threads = TimedThreads(2, "test")
    reported: list[TooSlowError] = []

    def error() -> TooSlowError:
        reported.append(TooSlowError())
        return reported[-1]

    release, at_work = threading.Event(), threading.Event()

    def wait() -> str:
        at_work.set()
        release.wait()
        return "done"

    def loop() -> None:
        while True:
            time.sleep(0.001)

    try:
        job = threads.submit(wait)
        assert at_work.wait(10)
        threads.give_up_slow(3600, error)
        assert reported == [], "no job is late, so no error is made"
        release.set()
        assert job.result(10) == "done"
        endless = [threads.submit(loop) for _ in range(2)]
        while not all(one.running() for one in endless):
            time.sleep(0.001)
        for one in endless:
            while not one.done():
                threads.give_up_slow(0, error)
            with pytest.raises(TooSlowError):
                one.result()
        assert len(reported) == 2
        assert threads.submit(lambda: 1).result(10) == 1, "another thread has taken the place"
    finally:
        threads.close()
