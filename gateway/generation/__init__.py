"""The base of all APIs that generate: bodies to requests, outputs to answers, whole or streamed."""
