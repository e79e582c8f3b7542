"""The requests and answers of the Messages API."""
