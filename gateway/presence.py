"""Whether the tokenizer service is there, and whether it is worth waiting for when it is not."""

import time

import grpc


class Presence:
    """What the channel says, remembered: a service that was there and is away for a moment comes back."""

    def __init__(self, channel: grpc.aio.Channel, recovery_timeout: float) -> None:
        """recovery_timeout: seconds after which a service that is away is no longer expected."""
        self._channel = channel
        self._recovery_timeout = recovery_timeout
        self._was_there = False
        self._away_since: float | None = None

    def is_there(self) -> bool:
        """Whether the service is connected now; has the channel connect if it is not."""
        if self._channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY:
            self._was_there, self._away_since = True, None
            return True
        if self._away_since is None:
            self._away_since = time.monotonic()
        return False

    @property
    def away_since(self) -> float | None:
        """time.monotonic() when it was found away; None if it was there at the last look."""
        return self._away_since

    def is_expected(self) -> bool:
        """Whether it is there, or was there and has not been away for recovery_timeout seconds."""
        if self.is_there():
            return True
        assert self._away_since is not None
        return self._was_there and time.monotonic() - self._away_since < self._recovery_timeout
