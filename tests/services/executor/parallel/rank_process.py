"""A process that is a rank: `python -m tests.services.executor.parallel.rank_process RANK SIZE DESCRIPTOR PEERS PORT`.

Each line of its input asks for an `all_to_all`, [communicator, counts of `Routes`, width, dtype], or with the
communicator "peers" for sums of `counts` elements; it answers whether the result was right. DESCRIPTOR: of a
`SharedMemory`, PEERS: of memory in which each rank has PEER_BYTES, in place of that of GPUs.
"""

from __future__ import annotations

import json
import mmap
import sys

import torch
import torch.distributed as dist

from pagewire.kernels.peer_memory import PARTS, PEER_BYTES
from pagewire.services.executor.parallel.communicator import Communicator
from pagewire.services.executor.parallel.peer_sums import PeerSums
from pagewire.services.executor.parallel.shared_memory import SharedMemory
from pagewire.services.executor.parallel.torch_distributed import TorchCommunicator
from tests.kernels.routes import Routes


def main() -> None:
    rank, size, descriptor, peers, port = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    assert dist.group.WORLD is not None
    memory = SharedMemory([size], descriptor)
    communicators: dict[str, Communicator] = {
        "shared memory": memory.channel(0, rank),
        "gloo": TorchCommunicator(dist.group.WORLD),
    }
    given = torch.frombuffer(mmap.mmap(peers, size * PEER_BYTES), dtype=torch.uint8).view(size, PEER_BYTES)
    addresses = torch.tensor([one.data_ptr() for one in given])
    peer_sums = PeerSums(addresses, torch.zeros(PARTS, dtype=torch.int32), rank)
    summing = TorchCommunicator(dist.group.WORLD, peer_sums)
    for line in sys.stdin:
        name, counts, width, dtype = json.loads(line)
        if name == "peers":
            answers = [is_summed(summing, count, getattr(torch, dtype)) for count in counts]
            print(json.dumps(all(answers)), flush=True)
            continue
        routes = Routes.of(counts, size)
        parts = [routes.given_by(of, width, getattr(torch, dtype)) for of in range(size)]
        expected = routes.expected(rank, parts)
        communicators[name].all_to_all(parts[rank], routes.rows, routes.starts)
        print(json.dumps(torch.equal(parts[rank], expected) and not memory.has_ended), flush=True)


def is_summed(communicator: TorchCommunicator, count: int, dtype: torch.dtype) -> bool:
    """Returns whether integers of the ranks, of which sums are exact, are summed."""
    x = torch.arange(count) % 7 + communicator.rank
    expected = communicator.size * (torch.arange(count) % 7) + sum(range(communicator.size))
    return torch.equal(communicator.all_reduce(x.to(dtype)), expected.to(dtype))


if __name__ == "__main__":
    main()
