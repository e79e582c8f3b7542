"""The seconds of a step, learned from the steps of one executor. Pure: the caller passes durations to `learn`.

    seconds = c0 * prompt tokens + c1 + c2 * decodes + c3 * (query, key) pairs of prompts + (c4 if there are prompts)

with no c below zero. A step lasts from the previous result to its own, as clients see it: transfers to the device and
back, and waits for a core, count too. In a pipeline, this is the time until the next step may follow; passing all S
stages takes S times as long.

The coefficients minimize the squared error relative to the size of a step's work: relative to its time, jitter would
make steps look short. Older steps count less; steps with and without prompts are forgotten separately, as an hour of
decoding reveals nothing about prompts, and a flood of prompts nothing about decodes alone. Recent steps are often
alike, as each takes the prompt tokens that fit into the same time, and then do not distinguish tokens from pairs.
Therefore a second, longer memory decides where the first one does not. Coordinate descent with a bound at zero suffices
for five unknowns.
"""

from math import sqrt

from pagewire.services.scheduler.values.step import StepWork

# The unit of each feature, so that all have similar sizes. Where steps do not show which feature causes a cost, it is
# assigned to the first: the costs of a step with a prompt say nothing about larger prompts unless tokens cost
# something.
_SCALES = (1 / 128, 1.0, 1 / 32, 1 / 2**18, 1.0)
# (share of earlier steps kept, weight) of each memory; they remember about twenty and five hundred steps of a kind.
_MEMORIES = ((0.95, 1.0), (0.998, 0.02))
_SWEEPS = 8
_STEPS_PER_FIT = 8
_TOLERANCE = 0.02  # of the expected time: nothing is fitted while it holds
_TINY = 1e-12
_NO_WORK = StepWork()
# A step counts as at most this many times slower than expected: on a CPU, the first of its shape is slow. Anything
# beyond is an accident, unless the next step is as slow, for which the higher limit holds.
_MAX_SURPRISE, _MAX_SURPRISE_AGAIN = 2.0, 10.0
_NUM_BEFORE_SURPRISES = 8
# A few steps with small prompts do not predict large ones: a step may have at most this many times the prompt tokens of
# the largest recent step. That maximum decays with each step that has prompts.
_MAX_GROWTH = 2
_LARGEST_KEPT = 0.99
# The number of steps after which costs are trusted: the first ones compile, record or page in what later ones reuse.
_NUM_KNOWN = 16


class _Memory:
    """Normal equations of one kind of steps, products . coefficients = targets, with exponential forgetting."""

    def __init__(self, kept: float, weight: float) -> None:
        self.products = [[0.0] * len(_SCALES) for _ in _SCALES]
        self.targets = [0.0] * len(_SCALES)
        self._kept = kept
        self._weight = weight

    def add(self, row: list[float], target: float, num_steps: int) -> None:
        """Adds steps of the same work, with the mean of their targets."""
        kept = self._kept**num_steps
        weight = self._weight * (1 - kept) / (1 - self._kept)
        for i, value in enumerate(row):
            value *= weight
            self.targets[i] = self.targets[i] * kept + value * target
            self.products[i] = [old * kept + value * other for old, other in zip(self.products[i], row, strict=True)]


class StepCosts:
    """Predicts the duration of steps. Until a prompt was measured, prompts cost nothing."""

    def __init__(self, num_stages: int = 1) -> None:
        self.num_stages = num_stages  # a token takes a request this many steps
        self._coefficients = [0.0] * len(_SCALES)  # of scaled features
        self._memories = tuple([_Memory(*memory) for memory in _MEMORIES] for _ in range(2))  # without, with prompts
        self._num_learned = [0, 0]
        self._was_surprise = [False, False]  # of the last step, without and with prompts
        self._largest = 0.0  # prompt tokens of a recent step
        self._is_stale = False
        # The latest steps, all of the same work: adding each alone would take a fifth of the scheduler's time.
        self._work, self._num_alike, self._seconds_alike = _NO_WORK, 0, 0.0
        self._expected = 0.0  # seconds of such a step
        self._last_ratio = 1.0  # of the last step's time to the expected one, at most 1

    @property
    def num_steps(self) -> int:
        """The number of measured steps."""
        return sum(self._num_learned)

    @property
    def are_known(self) -> bool:
        return self.num_steps >= _NUM_KNOWN

    def learn(self, work: StepWork, seconds: float) -> None:
        """Learns from the duration of a step."""
        if seconds <= 0 or not (work.num_decodes or work.num_prompt_tokens):
            return
        if work.num_prompt_tokens:
            self._largest = max(float(work.num_prompt_tokens), self._largest * _LARGEST_KEPT)
        if work != self._work:
            self._remember()
            self._work, self._expected = work, sum(map(float.__mul__, self._coefficients, _features(work)))
        if self._expected:
            self._last_ratio = min(1.0, seconds / self._expected)
        self._seconds_alike += self._believed(seconds, self._expected, work.num_prompt_tokens > 0)
        self._num_alike += 1
        self._is_stale = True
        if self.num_steps < _STEPS_PER_FIT or (self.num_steps % _STEPS_PER_FIT == 0 and not self._holds):
            self._fitted()  # otherwise with the next prediction

    @property
    def _holds(self) -> bool:
        """Returns whether the latest steps took as long as expected."""
        expected = self._num_alike * self._expected
        return abs(self._seconds_alike - expected) <= _TOLERANCE * expected

    def _remember(self) -> None:
        """Adds the latest steps to the memories."""
        if not self._num_alike:
            return
        features = _features(self._work)
        size = sqrt(sum(map(float.__mul__, features, features)))
        row = [feature / size for feature in features]
        for memory in self._memories[self._work.num_prompt_tokens > 0]:
            memory.add(row, self._seconds_alike / self._num_alike / size, self._num_alike)
        self._work, self._num_alike, self._seconds_alike = _NO_WORK, 0, 0.0

    def decode_seconds(self, num_decodes: float) -> float:
        """Returns the expected seconds of a step without prompts; 0 if nothing is known."""
        _, fixed, per_decode, _, _ = self._fitted()
        return fixed + per_decode * _SCALES[2] * num_decodes

    def seconds(self, work: StepWork) -> float:
        """Returns the expected seconds of a step; 0 if nothing is known."""
        return sum(map(float.__mul__, self._fitted(), _features(work)))

    def foreseen(self, work: StepWork) -> float:
        """Returns the expected seconds of a step, too few rather than too many; 0 if unknown, or if it computes
        nothing.

        It does not fit coefficients, so it is cheap enough for each step. When steps become faster, the last step shows
        it before the coefficients do.
        """
        if not (work.num_decodes or work.num_prompt_tokens):
            return 0.0
        per_token, fixed, per_decode, per_pair, first = self._coefficients
        seconds = fixed + per_decode * _SCALES[2] * work.num_decodes
        if work.num_prompt_tokens:
            seconds += first + per_token * _SCALES[0] * work.num_prompt_tokens + per_pair * _SCALES[3] * work.num_pairs
        return self._last_ratio * seconds

    @property
    def first_prompt_seconds(self) -> float:
        """The seconds that prompts add to a step, regardless of their tokens."""
        return self._fitted()[4]

    @property
    def most_prompt_tokens(self) -> int:
        """The most prompt tokens of a step with predictable costs; 0: nothing is known."""
        return int(_MAX_GROWTH * self._largest)

    def prompt_tokens_within(self, seconds: float, start: int) -> float:
        """Returns how many tokens of a prompt, from position `start` on, add `seconds` to a step with prompts; infinite
        if nothing is known."""
        per_token, _, _, per_pair, _ = map(float.__mul__, self._fitted(), _SCALES)
        first = per_token + per_pair * start  # of the first token; each that follows costs per_pair more
        if per_pair:
            return (sqrt(first * first + 2 * per_pair * max(seconds, 0.0)) - first) / per_pair
        return max(seconds, 0.0) / first if first else float("inf")

    def prompt_seconds(self, start: int, num_tokens: float) -> float:
        """Returns the seconds that these tokens of a prompt add to a step with prompts."""
        per_token, _, _, per_pair, _ = map(float.__mul__, self._fitted(), _SCALES)
        return num_tokens * (per_token + per_pair * (start + num_tokens / 2))

    def _believed(self, seconds: float, expected: float, has_prompts: bool) -> float:
        self._num_learned[has_prompts] += 1
        if not expected or self._num_learned[has_prompts] <= _NUM_BEFORE_SURPRISES:
            return seconds
        most = expected * (_MAX_SURPRISE_AGAIN if self._was_surprise[has_prompts] else _MAX_SURPRISE)
        self._was_surprise[has_prompts] = seconds > _MAX_SURPRISE * expected
        return min(seconds, most)

    def _fitted(self) -> list[float]:
        if self._is_stale:
            self._is_stale = False
            self._remember()
            self._fit()
        return self._coefficients

    def _fit(self) -> None:
        """Solves non-negative least squares, starting from the previous solution."""
        coefficients, memories = self._coefficients, [*self._memories[0], *self._memories[1]]
        products = [
            list(map(sum, zip(*rows, strict=True))) for rows in zip(*(one.products for one in memories), strict=True)
        ]
        targets = list(map(sum, zip(*(one.targets for one in memories), strict=True)))
        for _ in range(_SWEEPS):
            for i, (row, target) in enumerate(zip(products, targets, strict=True)):
                if row[i] > _TINY:
                    rest = target - sum(map(float.__mul__, row, coefficients)) + row[i] * coefficients[i]
                    coefficients[i] = max(0.0, rest / row[i])


def _features(work: StepWork) -> list[float]:
    has_prompts = 1.0 if work.num_prompt_tokens else 0.0
    counts = (float(work.num_prompt_tokens), 1.0, float(work.num_decodes), work.num_pairs, has_prompts)
    return [count * scale for count, scale in zip(counts, _SCALES, strict=True)]
