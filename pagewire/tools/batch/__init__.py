"""`pagewire run-batch`."""
