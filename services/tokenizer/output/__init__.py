"""From token ids to text: detokenization, stop strings and parsers."""
