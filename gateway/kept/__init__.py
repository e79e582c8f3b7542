"""Generations that outlive their connection, and the gateway that serves it: see `Keeper`."""

from pagewire.gateway.kept.keeper import Keeper, Kept, Line

__all__ = ["Keeper", "Kept", "Line"]
