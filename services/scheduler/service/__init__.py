"""The gRPC service: sessions with tokenizers, streams to executors, and the engine between them."""
