"""The quick suite and the full sweep: `make test` and `make test-all`."""

import os

IS_FULL = os.environ.get("PAGEWIRE_TEST_ALL") == "1"


def examples(full: int) -> int:
    """Returns how many examples a property draws: `full` in the full sweep, a quarter of them in the quick suite."""
    return full if IS_FULL else max(full // 4, 20)
