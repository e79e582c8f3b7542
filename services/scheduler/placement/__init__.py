"""Which replica a waiting request goes to."""
