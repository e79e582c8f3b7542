"""GET /v1/requests/{id}/explain: where a request's time went."""
