"""A search for the fastest configuration of a kernel for a shape."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import torch

from benchmarks.gpu.measure import Call, median_seconds
from benchmarks.kernels.grids import Config, forms_of, launches_of
from benchmarks.kernels.problems.problem_sets import Problem, problems_of
from benchmarks.kernels.shapes import Shape
from benchmarks.kernels.supervised import Journal
from pagewire.kernels import tuning

NUM_FINALISTS = 3
# A configuration replaces the present one if it takes at most this share of its time: less is noise.
WORTH_A_CHANGE = 0.98


@dataclass
class Search:
    """The result of one shape. Times are geometric means over its problems, in seconds per call."""

    present: Config
    seconds: dict[tuple[int, ...], float] = field(default_factory=dict)  # by the configuration's values
    tried: set[tuple[int, ...]] = field(default_factory=set)
    refused: int = 0  # too large for the device, or for the compiler
    wrong: list[str] = field(default_factory=list)

    @property
    def best(self) -> Config:
        fastest = min(self.seconds, key=self.seconds.__getitem__)
        present = self.seconds.get(tuple(self.present.values()), math.inf)
        if self.seconds[fastest] > WORTH_A_CHANGE * present:
            return self.present
        return dict(zip(self.present, fastest, strict=True))

    def describe(self) -> str:
        seconds = self.seconds[tuple(self.best.values())]
        gain = self.seconds.get(tuple(self.present.values()), math.nan) / seconds
        chosen = " ".join(f"{key}={value}" for key, value in self.best.items())
        tried = f"{len(self.seconds)} tried, {self.refused} refused, {len(self.wrong)} wrong"
        return f"{chosen}: {seconds * 1e6:.1f} us, x{gain:.2f} of the present table's speed ({tried})"


@contextmanager
def forced(kernel: str, config: Config) -> Iterator[None]:
    """Within the block `kernel` runs as configured, whatever its table says."""
    look_up = tuning.lookup

    def lookup(name: str, capability: int, **shape: int) -> Config:
        return config if name == kernel else look_up(name, capability, **shape)

    with mock.patch.object(tuning, "lookup", lookup):
        yield


def search(kernel: str, shape: Shape, device: torch.device, journal: Journal) -> Search:
    """Times the configurations of a shape."""
    interpreted = device.type == "cpu"
    result = Search(dict(tuning.lookup(kernel, tuning.capability_of(device), **shape)))
    if journal.is_left_out(kernel, shape, {}):
        return result
    journal.trying(kernel, shape, {})
    problems = problems_of(kernel, shape, device)
    trial = Trial(kernel, shape, problems, device, journal)
    _measure(trial, forms_of(kernel, shape, result.present, interpreted), result)
    fastest = sorted(result.seconds, key=result.seconds.__getitem__)[:NUM_FINALISTS]
    finalists: list[Config] = [dict(zip(result.present, values, strict=True)) for values in fastest]
    _measure(trial, launches_of(kernel, finalists, interpreted), result)
    return result


@dataclass(frozen=True)
class Trial:
    """Returns the problems with which configurations of a shape are tried."""

    kernel: str
    shape: Shape
    problems: Sequence[Problem]
    device: torch.device
    journal: Journal


class DeviceLostError(Exception):
    """Whatever this process launches from now on fails."""


def _measure(trial: Trial, configs: list[Config], result: Search) -> None:
    """Times the configurations that are right on every problem, in turn."""
    good: dict[tuple[int, ...], Config] = {}
    for config in configs:
        key = tuple(config.values())
        if key in result.tried or trial.journal.is_left_out(trial.kernel, trial.shape, config):
            continue
        trial.journal.trying(trial.kernel, trial.shape, config)
        result.tried.add(key)
        right = _is_right(trial, config, result)
        if right:
            good[key] = config
        elif right is not None:
            result.wrong.append(f"{trial.kernel} {dict(config)} differs from the reference")
    trial.journal.trying(trial.kernel, trial.shape, {})
    logarithms = dict.fromkeys(good, 0.0)
    for problem in trial.problems:
        contestants = {str(key): _forced_calls(trial.kernel, config, problem) for key, config in good.items()}
        times = _times(trial.device, contestants)
        for key in list(good):
            if (seconds := times.get(str(key))) is None:
                result.refused += 1
                del good[key]
            else:
                logarithms[key] += math.log(seconds) / len(trial.problems)
    result.seconds |= {key: math.exp(logarithms[key]) for key in good}


def _is_right(trial: Trial, config: Config, result: Search) -> bool | None:
    """None if it is refused: too large for the device, or more than some compiler can do (ptxas, Triton, LLVM)."""
    try:
        with forced(trial.kernel, config):
            return all(problem.is_right() for problem in trial.problems)
    # Whatever it is that one configuration raises: the others are still worth having.
    except Exception as error:
        _check_device(trial.device, error)
        result.refused += 1
        return None


def _times(device: torch.device, contestants: Mapping[str, Sequence[Call]]) -> dict[str, float]:
    """Seconds of each; one that cannot be captured is not there."""
    if not contestants:
        return {}
    try:
        return median_seconds(contestants, device)
    except Exception as error:  # as above
        _check_device(device, error)
        if len(contestants) == 1:
            return {}
    times = dict[str, float]()
    for name, calls in contestants.items():
        times |= _times(device, {name: calls})
    return times


def _check_device(device: torch.device, error: Exception) -> None:
    """Raises DeviceLostError if it was not only the launch that failed."""
    if device.type == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            raise DeviceLostError(str(error)) from error


def _forced_calls(kernel: str, config: Config, problem: Problem) -> list[Call]:
    def forced_call(call: Call) -> None:
        with forced(kernel, config):
            call()

    return [lambda call=call: forced_call(call) for call in problem.calls()]  # type: ignore[misc]
