"""The length of outputs: an estimate for admission and placement, learned from all requests."""


class OutputLengths:
    """Estimates the mean length of outputs, where each token may be the last one with the same probability.

    The maximum-likelihood estimate is the number of tokens, those of running requests included, by the number of ends.
    Both sums are multiplied by `_MEMORY` at each end, so that later requests count more.
    """

    _MEMORY = 0.98
    # The sum of ends from which the mean is used: that after the first 8.
    _MIN_ENDS = 7.0

    def __init__(self) -> None:
        self._num_ends = self._num_tokens = 0.0

    def learn(self, num_tokens: int, num_ends: int) -> None:
        """Takes in the tokens that running requests gained, and the number of requests that ended, for any reason."""
        self._num_tokens += num_tokens
        for _ in range(num_ends):
            self._num_ends = self._num_ends * self._MEMORY + 1
            self._num_tokens *= self._MEMORY

    def mean(self, otherwise: float) -> float:
        """Returns the mean length in tokens, at least 1; `otherwise` while too few requests have ended."""
        return max(1.0, self._num_tokens / self._num_ends) if self._num_ends >= self._MIN_ENDS else otherwise
