"""The way from token ids to text: detokenization, stop strings, and the seam of parsers."""
