"""The commands `pagewire run`, `chat`, `pull`, `list`, `ps` and `rm`."""
