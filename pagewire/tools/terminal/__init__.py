"""The commands `pagewire run`, `chat`, `pull`, `list`, `ps`, `stop` and `rm`."""
