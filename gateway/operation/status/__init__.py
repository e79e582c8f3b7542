"""What the line is doing, as JSON and as events."""
