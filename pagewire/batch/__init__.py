"""Batches: files with one request per line, and files of their answers. The gateway and `pagewire batch` share this
code."""
