"""The gRPC service and the device thread."""
