"""Fake executors on a Ray cluster.

python -m tests.pagewire.stack.ray_executors.keep_fakes HEAD ADDRESS-FILE COUNT STAGES
"""

import sys

from pagewire.config import RayExecutorsConfig
from pagewire.stack.ray_executors import main
from pagewire.telemetry import logs
from pagewire.wire import rpc

if __name__ == "__main__":
    head, path, count, stages = sys.argv[1:]
    config = RayExecutorsConfig(
        ray_address=head,
        address_file=path,
        data_parallel_size=int(count),
        pipeline_parallel_size=int(stages),
        device="cpu",
        num_threads=1,
        shutdown_timeout=1,
    )
    logs.setup("ray", config)
    rpc.run(main.serve(config, ("-m", "tests.pagewire.stack.ray_executors.fake_rank", "LISTEN")))
