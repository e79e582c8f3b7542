"""How long a step takes: learned from the steps of one executor. Pure; whoever knows durations calls `learn`.

    seconds = c0 + c1 * decodes + c2 * prompt tokens + c3 * (query, key) pairs of prompts        all c >= 0

A step lasts from the result before to its own, as those see it who wait for tokens: what passes on the way to the
device and back, or for want of a core, counts too.

The coefficients minimize the squared error over recent steps, relative to what was expected (relative to what was
observed, jitter would make steps look short). Older steps count exponentially less. Those with and without prompts are
forgotten apart: an hour of decoding says nothing new about prompts, and a flood of prompts nothing about decodes alone.
Coordinate descent with a bound at zero is all the solver that four unknowns need.
"""

from dataclasses import dataclass
from math import sqrt

# What a unit of each feature is, so that all have about the same size.
_SCALES = (1.0, 1 / 32, 1 / 128, 1 / 2**18)
_DECAY = 0.95  # per step of a kind: twenty steps are remembered
_SWEEPS = 8
# One step may look this much slower than expected, as the first of its shape is on a CPU. Slower still is an accident,
# once some steps of its kind are known.
_MAX_SURPRISE = 2.0
_NUM_BEFORE_SURPRISES = 8
# Steps before which costs are rather not told to clients: the first ones compile, record or fault in what later ones
# have.
_NUM_KNOWN = 16


@dataclass(slots=True)
class StepWork:
    """What a step computes."""

    num_decodes: int = 0  # tokens of requests that need one, drafts included
    num_prompt_tokens: int = 0
    num_pairs: float = 0.0  # of prompt tokens with what they attend to, if all see all before them

    def add_prompt(self, start: int, num_tokens: int) -> None:
        """Tokens of a prompt, the first of which is at position `start`."""
        self.num_prompt_tokens += num_tokens
        self.num_pairs += num_tokens * (start + num_tokens / 2)


class _Sums:
    """Normal equations of one kind of steps, exponentially forgotten: [4, 4] and [4]."""

    def __init__(self) -> None:
        self.products = [[0.0] * 4 for _ in range(4)]
        self.targets = [0.0] * 4
        self.num_steps = 0

    def add(self, row: list[float], target: float) -> None:
        self.num_steps += 1
        for i, value in enumerate(row):
            self.targets[i] = self.targets[i] * _DECAY + value * target
            self.products[i] = [old * _DECAY + value * other for old, other in zip(self.products[i], row, strict=True)]


class StepCosts:
    """Predicts the duration of steps. As long as no prompt was measured, prompts cost nothing."""

    def __init__(self) -> None:
        self._coefficients = [0.0] * 4  # of scaled features
        self._sums = _Sums(), _Sums()  # of steps without prompts, with prompts
        self._is_stale = False

    @property
    def num_steps(self) -> int:
        """That were learned from."""
        return sum(sums.num_steps for sums in self._sums)

    @property
    def are_known(self) -> bool:
        return self.num_steps >= _NUM_KNOWN

    def learn(self, work: StepWork, seconds: float) -> None:
        """A step has taken so long."""
        features, sums = _features(work), self._sums[work.num_prompt_tokens > 0]
        if seconds <= 0 or not (work.num_decodes or work.num_prompt_tokens):
            return
        expected = sum(map(float.__mul__, self._coefficients, features))
        if sums.num_steps >= _NUM_BEFORE_SURPRISES:
            seconds = min(seconds, max(_MAX_SURPRISE * expected, 1e-6))
        # An expectation that is far off is no measure.
        unit = min(max(expected, seconds / 2), seconds * 2)
        sums.add([feature / unit for feature in features], seconds / unit)
        self._is_stale = True
        if self.num_steps % _NUM_BEFORE_SURPRISES == 0:
            self._fitted()  # else it happens when somebody asks

    def decode_seconds(self, num_decodes: float) -> float:
        """How long a step without prompts should take; 0 if nothing is known."""
        fixed, per_decode, _, _ = self._fitted()
        return fixed + per_decode * _SCALES[1] * num_decodes

    def seconds(self, work: StepWork) -> float:
        """How long a step should take; 0 if nothing is known."""
        return sum(map(float.__mul__, self._fitted(), _features(work)))

    def prompt_tokens_within(self, seconds: float, start: int) -> float:
        """How many tokens of a prompt, the first of which is at position `start`, add so many seconds to a step;
        infinite, if nothing is known."""
        _, _, per_token, per_pair = map(float.__mul__, self._fitted(), _SCALES)
        first = per_token + per_pair * start  # of the first token; each that follows costs per_pair more
        if per_pair:
            return (sqrt(first * first + 2 * per_pair * max(seconds, 0.0)) - first) / per_pair
        return max(seconds, 0.0) / first if first else float("inf")

    def prompt_seconds(self, start: int, num_tokens: float) -> float:
        """How much longer a step takes with these tokens of a prompt."""
        _, _, per_token, per_pair = map(float.__mul__, self._fitted(), _SCALES)
        return num_tokens * (per_token + per_pair * (start + num_tokens / 2))

    def _fitted(self) -> list[float]:
        if self._is_stale:
            self._is_stale = False
            self._fit()
        return self._coefficients

    def _fit(self) -> None:
        """Non-negative least squares of `row . coefficients = target`, from the previous solution on."""
        coefficients, (plain, prompts) = self._coefficients, self._sums
        products = [
            [a + b for a, b in zip(*rows, strict=True)] for rows in zip(plain.products, prompts.products, strict=True)
        ]
        targets = [a + b for a, b in zip(plain.targets, prompts.targets, strict=True)]
        for _ in range(_SWEEPS):
            for i, row in enumerate(products):
                if row[i] > 0:
                    rest = targets[i] - sum(map(float.__mul__, row, coefficients)) + row[i] * coefficients[i]
                    coefficients[i] = max(0.0, rest / row[i])


def _features(work: StepWork) -> list[float]:
    counts = (1.0, float(work.num_decodes), float(work.num_prompt_tokens), work.num_pairs)
    return [count * scale for count, scale in zip(counts, _SCALES, strict=True)]
