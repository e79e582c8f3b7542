"""Typed values in the state of an application, for its routes."""

from typing import Generic, TypeVar

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.types import Scope

Value = TypeVar("Value")


class AppState(Generic[Value]):
    """One value in the state of an application. The folder of the routes that use it declares it; app.py sets it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def put(self, app: Starlette, value: Value) -> None:
        setattr(app.state, self._name, value)

    def of(self, request: Request) -> Value:
        return self.in_scope(request.scope)

    def in_scope(self, scope: Scope) -> Value:
        value: Value = getattr(scope["app"].state, self._name)
        return value
