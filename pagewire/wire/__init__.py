"""The parts of gRPC that every service needs: calls, streams, TLS, health, discovery, keys and tenants."""
