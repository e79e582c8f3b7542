"""`pagewire bench`: measurements of a running server, and pictures of how they grow."""
