"""Measures decode steps on a GPU: `python -m benchmarks.gpu.engine`; `bench.py` describes it."""

import sys

from benchmarks.gpu.engine.bench import main

if __name__ == "__main__":
    sys.exit(main())
