"""The pool of workers that encode text."""
