"""Batches: files of requests, one a line, and of their answers. The gateway and `pagewire batch` run them alike."""
