"""`pagewire quantize`: 4-bit and 8-bit checkpoints from 16-bit ones."""
