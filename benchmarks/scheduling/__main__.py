"""Measures how long prompts and streams delay others: `python -m benchmarks.scheduling [--address localhost:8001]`.

Uses a simulated device, or with --address a running stack, over gRPC:

flood    a stream runs, then 12 prompts of 4,000 tokens arrive, and half a second later a chat
tenants  the same with a flood of another tenant; the stack needs --tenant-header X-Tenant-ID
queue    500 long streams, then a short one
shares   four tenants with different loads, each above capacity: Jain's index of their shares

The first two need --max-queue-time 0 if the flood takes longer than that. Compare the duration of flood and stream with
a stack that takes prompts in order and whole: `pagewire serve` with

    --target-itl-ms 0 --max-num-partial-prefills 1000000 --max-long-partial-prefills 1000000
"""

import argparse
import asyncio

from benchmarks.scheduling import running, simulation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="gRPC of a running stack, or its REST URL if it runs here")
    parser.add_argument("--only", nargs="+", choices=running.PARTS, default=list(running.PARTS))
    parser.add_argument("--prompts", type=int, default=12, help="of the flood")
    parser.add_argument("--prompt-tokens", type=int, default=4000, help="of each of them")
    parser.add_argument("--streams", type=int, default=500, help="of the queue")
    parser.add_argument("--seconds", type=float, default=15, help="that queue and shares take")
    args = parser.parse_args()
    if args.address is None:
        simulation.report()
    else:
        asyncio.run(running.report(args))


main()
