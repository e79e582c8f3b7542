"""Separate steps for suspects."""

from collections.abc import Callable

from pagewire.services.scheduler.values.request import Request, RequestStatus


class SuspectQuarantine:
    """Keeps suspects out of the steps of other requests: at most one suspect runs on a replica, in turns with the
    others, and a step of one kind is not decided before those of the other kind are done."""

    def __init__(self, is_suspect: Callable[[Request], bool]) -> None:
        self._is_suspect = is_suspect
        self._suspect: Request | None = None
        self._is_others_turn = False

    def is_suspect(self, request: Request) -> bool:
        return self._is_suspect(request)

    @property
    def is_closed(self) -> bool:
        suspect = self._suspect
        if suspect is not None and not (suspect.status is RequestStatus.RUNNING and self._is_suspect(suspect)):
            self._suspect = None
        return self._suspect is not None

    def runners(self, running: list[Request], is_suspect_due: bool, is_idle: bool) -> list[Request]:
        """Lets the other requests pause, after a step of theirs, while a suspect is due and until it has entered."""
        if not self.is_closed:
            if is_suspect_due and not self._is_others_turn:
                return []
            self._is_others_turn = False
            return running
        assert self._suspect is not None
        others = [request for request in running if request is not self._suspect]
        if not others:
            return [self._suspect]
        if not is_idle:
            return []
        self._is_others_turn = not self._is_others_turn
        return [self._suspect] if self._is_others_turn else others

    def admits(self, request: Request, is_alone: bool) -> bool:
        return not self.is_closed and (is_alone or not self._is_suspect(request))

    def enter(self, request: Request) -> None:
        if self._is_suspect(request):
            self._suspect, self._is_others_turn = request, True
