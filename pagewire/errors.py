"""Errors for users who start Pagewire, and for clients with a wrong request."""

from collections.abc import Callable, Iterable, Sequence


class StartupError(RuntimeError):
    """Raised when a cause outside the program keeps Pagewire from starting: no such model, a port in use, too little
    memory.

    The message names cause and remedy; the command line prints it without a traceback, and ends with exit_code."""

    exit_code = 1  # 2 for a wrong command line


class ModelNotFoundError(StartupError):
    """Raised when MODEL cannot be found; the message lists the places that were searched."""


class InvalidRequest(ValueError):
    """A request that cannot be served as it is; the message names the field, its value and what is allowed.

    violations: (field, description) of each error, where a field is a path in the request of the scheduler's API
    ("sampling_params.top_p"). field: the path of the first violation, "" if there is none.
    """

    def __init__(self, message: str, field: str = "", violations: Sequence[tuple[str, str]] = ()) -> None:
        """field: the field that is wrong, unless violations name the fields."""
        super().__init__(message)
        self.violations = tuple(violations) or (((field, message),) if field else ())
        self.field = self.violations[0][0] if self.violations else ""


def check_all(checks: Iterable[Callable[[], object]]) -> None:
    """Runs every check, each of which may raise InvalidRequest. Raises one InvalidRequest for all of them."""
    found: list[InvalidRequest] = []
    for check in checks:
        try:
            check()
        except InvalidRequest as error:
            found.append(error)
    if found:
        violations = [violation for error in found for violation in error.violations]
        raise InvalidRequest("; ".join(dict.fromkeys(map(str, found))), violations=violations)
