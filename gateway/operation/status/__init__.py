"""The status of all services, as JSON and as events."""
