"""The base of all APIs of the gateway."""
