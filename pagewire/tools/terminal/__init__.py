"""What `pagewire run`, `chat`, `pull`, `list`, `ps` and `rm` do in a terminal."""
