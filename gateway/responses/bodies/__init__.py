"""The requests and answers of the Responses API."""
