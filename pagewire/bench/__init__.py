"""`pagewire bench`: measurements of a running server."""
