"""Errors of schemas."""

from typing import NoReturn


class SchemaError(ValueError):
    """A schema that cannot be used. place: a JSON pointer to the cause."""

    def __init__(self, place: str, message: str) -> None:
        super().__init__(f"#{place}: {message}" if place else message)
        self.place = place
        self.message = message


def wrong(place: str, message: str) -> NoReturn:
    raise SchemaError(place, message)


def step(place: str, *keys: str | int) -> str:
    """Returns the JSON pointer of what is at these keys of what is at `place`."""
    return "".join((place, *(f"/{str(key).replace('~', '~0').replace('/', '~1')}" for key in keys)))
