"""What every service needs of gRPC: calls, streams, TLS, health, discovery, keys and tenants."""
