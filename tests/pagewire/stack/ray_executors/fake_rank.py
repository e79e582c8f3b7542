"""A rank of a fake executor, which serves at ADDRESSES, or at none if it is not the leader.

python -m tests.pagewire.stack.ray_executors.fake_rank ADDRESSES
"""

import signal
import sys

from pagewire.process import process
from tests.e2e import fake_executor

if __name__ == "__main__":
    if sys.argv[1]:
        fake_executor.main([sys.argv[1], "1", "0.01"])
    else:
        process.die_with_parent()
        signal.sigwait({signal.SIGTERM})
