"""Chat templates and the messages that they render."""
