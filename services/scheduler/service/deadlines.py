"""The deadlines of requests. Pure: times are arguments."""

import heapq


class Deadlines:
    """Deadlines by request id."""

    def __init__(self) -> None:
        self._times: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []  # still has removed deadlines

    def add(self, request_id: int, time: float) -> None:
        self._times[request_id] = time
        heapq.heappush(self._heap, (time, request_id))
        if len(self._heap) > 2 * len(self._times) + 64:
            self._heap = [(time, request_id) for request_id, time in self._times.items()]
            heapq.heapify(self._heap)

    def remove(self, request_id: int) -> None:
        """Removes a deadline; does nothing if the request has none."""
        self._times.pop(request_id, None)

    @property
    def next(self) -> float | None:
        """A lower bound of all deadlines, or None without any."""
        return self._heap[0][0] if self._heap else None

    def take_due(self, now: float) -> list[int]:
        """Removes and returns the requests past their deadlines, in order."""
        due: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            _, request_id = heapq.heappop(self._heap)
            if self._times.pop(request_id, None) is not None:
                due.append(request_id)
        return due
