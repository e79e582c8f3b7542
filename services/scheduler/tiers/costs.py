"""The seconds of a load: by what the executor has measured at its start, corrected by what loads took since."""

from collections.abc import Mapping, Sequence

from pagewire.v1.executor_pb2 import KVTier

# Bytes per second of a tier with an unknown rate: slow, so that the first load that is worthwhile even so corrects it.
_UNKNOWN_RATE = 200e6
# The weight of the latest load in the correction, and the bounds of what one load may show.
_WEIGHT = 0.2
_LEAST, _MOST = 0.1, 20.0
# A correction fades by this power whenever loading seems too slow, so that a tier which was slow once is tried again.
_FADING = 0.99


class LoadCosts:
    """Predicts the seconds of loads from the tiers of one executor."""

    def __init__(self, tiers: Sequence[KVTier]) -> None:
        self._tiers: dict[int, KVTier] = {tier.kind: tier for tier in tiers}
        self._corrections: dict[int, float] = dict.fromkeys(self._tiers, 1.0)  # of the seconds, by kind

    def seconds(self, num_bytes: Mapping[int, int]) -> float:
        """Returns the expected seconds of a load. num_bytes: by the kind of the tier that they come from."""
        return sum(self._seconds(kind, num) for kind, num in num_bytes.items())

    def _seconds(self, kind: int, num_bytes: int) -> float:
        tier = self._tiers.get(kind)
        if tier is None or num_bytes <= 0:
            return max(0, num_bytes) / _UNKNOWN_RATE
        rate = tier.load_rate if tier.load_rate > 0 else _UNKNOWN_RATE
        return self._corrections[kind] * (max(0.0, tier.load_latency) + num_bytes / rate)

    def learn(self, seconds: float, num_bytes: Mapping[int, int], is_whole: bool) -> None:
        """Learns from a load that ended. num_bytes: those that were wanted, by tier. is_whole: all were loaded; others
        may have been given up, and would have taken longer."""
        expected = self.seconds(num_bytes)
        if expected <= 0 or not seconds > 0:
            return
        ratio = min(_MOST, max(_LEAST if is_whole else 1.0, seconds / expected))
        for kind in num_bytes.keys() & self._corrections.keys():
            self._corrections[kind] *= ratio**_WEIGHT

    def fade(self) -> None:
        """Takes in that nothing is loaded, because it would take too long."""
        for kind, correction in self._corrections.items():
            self._corrections[kind] = correction**_FADING
