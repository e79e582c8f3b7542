"""The curves of docs/performance.md: a script that measures them all, and the file that they are written to."""
