"""`pagewire quantize`: a 4-bit checkpoint from a 16-bit one."""
