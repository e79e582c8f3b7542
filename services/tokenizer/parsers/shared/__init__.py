"""Text, values and formats that all parsers share."""
