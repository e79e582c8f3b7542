"""HTTP connections: limits, TLS and upgrades."""
