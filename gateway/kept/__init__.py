"""Generations that outlive their connection and the gateway process which serves it: see `Keeper`."""

from pagewire.gateway.kept.keeper import Keeper, Kept

__all__ = ["Keeper", "Kept"]
