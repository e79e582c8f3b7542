"""A stand-in for what reads a CUDA device's memory."""

from collections.abc import Callable

from pagewire.services.executor.device.memory import DeviceMemory


class FakeMeter:
    """A device with memory that shrinks as a test says, by the captures and steps that happened."""

    def __init__(self, taken: Callable[[], int]) -> None:
        self._taken = taken

    def now(self) -> DeviceMemory:
        return DeviceMemory(total=10_000, free=9_000 - self._taken(), reserved=400)

    def reset_peak(self) -> None: ...

    def peak(self) -> int:
        return 500

    def release(self) -> None: ...

    def key(self) -> dict[str, str]:
        return {"device": "fake"}
