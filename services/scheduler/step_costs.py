"""What a step costs, learned from those that were done."""

# Steps before which nothing is said: the first ones compile, record or fault in what later ones have.
_MIN_STEPS = 16
_GAIN = 0.2
# A stall counts as so many times what was expected: the next steps are not to be taken for as slow.
_MAX_SURPRISE = 3.0
# Brings the terms to about the same size, so that none of them learns faster than the others.
_ROWS, _TOKENS = 32.0, 256.0


class StepCosts:
    """Seconds of a step: a base, so much per request, so much per token beyond one of each request.

    A normalized least-mean-squares filter: every step corrects the costs in proportion to their share in it. So the
    latest steps count most, and what they did not have (prompts, while all decode) keeps the cost that it had.
    """

    def __init__(self) -> None:
        self._costs = [0.0, 0.0, 0.0]
        self._num_steps = 0

    @property
    def are_known(self) -> bool:
        return self._num_steps >= _MIN_STEPS

    def learn(self, num_requests: int, num_tokens: int, seconds: float) -> None:
        """Takes in a step of so many requests with so many tokens together."""
        if not num_requests:
            return  # it only freed rows
        terms = (1.0, num_requests / _ROWS, (num_tokens - num_requests) / _TOKENS)
        expected = sum(cost * term for cost, term in zip(self._costs, terms, strict=True))
        if self.are_known:
            seconds = min(seconds, _MAX_SURPRISE * expected + 0.001)
        self._num_steps += 1
        gain = max(_GAIN, 1 / self._num_steps)
        error = gain * (seconds - expected) / sum(term * term for term in terms)
        self._costs = [max(0.0, cost + error * term) for cost, term in zip(self._costs, terms, strict=True)]

    def step_seconds(self, num_requests: float) -> float:
        """Of a step in which so many requests decode one token."""
        return self._costs[0] + self._costs[1] * num_requests / _ROWS

    @property
    def token_seconds(self) -> float:
        """What each token of a prompt adds."""
        return self._costs[2] / _TOKENS
