"""Generations that outlive their connection and the gateway process which serves it: see `Keeper`."""

from pagewire.gateway.kept.keeper import KEEPER, Keeper, Kept

__all__ = ["KEEPER", "Keeper", "Kept"]
