"""A process that is a rank: `python -m tests.services.executor.parallel.rank_process RANK SIZE DESCRIPTOR PORT`.

Each line of its input asks for an `all_to_all`, [communicator, counts of `Routes`, width, dtype]; it answers whether
the result was right.
"""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist

from pagewire.services.executor.parallel.communicator import Communicator
from pagewire.services.executor.parallel.shared_memory import SharedMemory
from pagewire.services.executor.parallel.torch_distributed import TorchCommunicator
from tests.kernels.routes import Routes


def main() -> None:
    rank, size, descriptor, port = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    memory = SharedMemory([size], descriptor)
    communicators: dict[str, Communicator] = {
        "shared memory": memory.channel(0, rank),
        "gloo": TorchCommunicator(dist.group.WORLD),
    }
    for line in sys.stdin:
        name, counts, width, dtype = json.loads(line)
        routes = Routes.of(counts, size)
        parts = [routes.given_by(of, width, getattr(torch, dtype)) for of in range(size)]
        expected = routes.expected(rank, parts)
        communicators[name].all_to_all(parts[rank], routes.rows, routes.starts)
        print(json.dumps(torch.equal(parts[rank], expected) and not memory.has_ended), flush=True)


if __name__ == "__main__":
    main()
