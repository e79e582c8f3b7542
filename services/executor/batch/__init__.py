"""The rows of requests and the inputs of a step."""
