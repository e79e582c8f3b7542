"""`pagewire quantize`: a checkpoint in 4 or 8 bits from one in 16."""
