"""How long steps take by the clock on the wall: on the device, and on the way to it and back."""


class BusyTime:
    """Splits the time in which an executor has work among its steps, without gaps. Pure: times (seconds) are given."""

    def __init__(self) -> None:
        self._since: float | None = None  # no step has been charged for the time from then on

    def on_sent(self, now: float) -> None:
        if self._since is None:
            self._since = now

    def on_result(self, is_busy: bool, now: float) -> float:
        """Returns the time since the result before, or since there was work. is_busy: there is more to do at once."""
        seconds = 0.0 if self._since is None else now - self._since
        self._since = now if is_busy else None
        return seconds
