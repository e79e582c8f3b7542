"""A fleet of replicas behind one scheduler, or several, in simulated time: `python -m benchmarks.fleet`.

The scheduler is the real one; executors are formulas, and requests are conversations that begin with shared system
prompts and come in bursts. One row per number of replicas, schedulers and way to place requests:

hit, best     part of the prompt tokens found in a prefix cache, and what one endless cache of all replicas would find
load          part of them loaded from a tier (--tier), or from another executor (--prefill): counted in hit, too
busy          part of the time that devices work, on average; jain, cv: Jain's index of it over the replicas, and its
              coefficient of variation; cv run: that of how many requests are in a replica's steps
ttft, tpot    time to the first token and per token after it, ms, simulated as if deciding took no time
us/req, us/step, us/run   processor time of the scheduler per request, per step, and per running request and step
cores         that time per simulated second: above 1, one process does not keep up

Processor time is measured here; it is that of decisions, forecasts, metrics and messages, without sockets and event
loop. The rest depends on nothing but the arguments.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.fleet import table
from benchmarks.fleet.devices import DEVICES
from benchmarks.fleet.front import FRONTS
from benchmarks.fleet.simulation import Case, Fleet
from benchmarks.fleet.tiers import KINDS
from benchmarks.fleet.workload import Shape
from pagewire.services.scheduler.placement.placement import PLACEMENTS


def main(argv: list[str] | None = None) -> None:
    args = _parse(argv)
    print(
        f"{args.device}, {args.rate or DEVICES[args.device].rate:g} requests per second and replica, seed {args.seed}"
    )
    print(table.HEADER, flush=True)
    found: list[dict[str, Any]] = []
    for num_replicas, num_schedulers, placement in product(args.replicas, args.schedulers, args.placement):
        if num_schedulers > num_replicas:
            continue
        case = _case(args, num_replicas, num_schedulers, placement)
        report = Fleet(case).run()
        print(table.row(report, placement, args.front if num_schedulers > 1 else ""), flush=True)
        found.append({"case": dataclasses.asdict(case), "report": dataclasses.asdict(report)})
    print(table.parts([one["report"] for one in found]))
    if args.json_out:
        command = shlex.join(["python", "-m", "benchmarks.fleet", *(sys.argv[1:] if argv is None else argv)])
        args.json_out.write_text(json.dumps({"command": command, "results": found}, indent=1) + "\n")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=_numbers, default=[1, 4, 16, 64], help="comma separated")
    parser.add_argument("--schedulers", type=_numbers, default=[1], help="comma separated; replicas are divided")
    parser.add_argument("--requests", type=int, help="(default: 400 per replica, at least 4,000)")
    parser.add_argument("--device", choices=DEVICES, default="h100-8b")
    parser.add_argument("--rate", type=float, help="requests per second and replica (default: about two thirds)")
    parser.add_argument("--num-blocks", type=int, help="KV blocks of a replica (default: the device's)")
    parser.add_argument("--placement", type=_words, default=["cache_aware"], help="comma separated")
    parser.add_argument("--front", choices=FRONTS, default=FRONTS[0], help="what decides between schedulers")
    parser.add_argument("--deaths", type=int, default=0, help="of executors; each comes back after 10 s")
    parser.add_argument("--tier", choices=KINDS, help="where blocks are kept besides the KV cache (default: nowhere)")
    parser.add_argument("--tier-gib", type=float, default=64.0, help="of each replica (default: 64)")
    parser.add_argument("--sharing", type=int, default=1, help="replicas that share a tier (default: 1)")
    parser.add_argument("--prefill", type=float, default=0.0, help="part of the replicas that only compute prompts")
    parser.add_argument("--late", type=float, default=0.0, help="part of the replicas that join half-way")
    for field in dataclasses.fields(Shape):
        flag = "--" + field.name.replace("_", "-")
        parser.add_argument(flag, type=type(field.default), default=field.default, help=f"(default: {field.default})")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="few requests, few replicas")
    parser.add_argument("--json-out", type=Path)
    args = parser.parse_args(argv)
    if args.quick:
        args.replicas, args.requests = [1, 4], 300
    if unknown := set(args.placement) - PLACEMENTS.keys():
        parser.error(f"--placement {', '.join(unknown)}: there are {', '.join(PLACEMENTS)}")
    return args


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _case(args: argparse.Namespace, num_replicas: int, num_schedulers: int, placement: str) -> Case:
    return Case(
        num_replicas=num_replicas,
        num_requests=args.requests or max(4000, 400 * num_replicas),
        num_schedulers=num_schedulers,
        device=args.device,
        rate=args.rate,
        num_blocks=args.num_blocks,
        front=args.front,
        num_deaths=args.deaths,
        late=args.late,
        tier=args.tier,
        tier_gib=args.tier_gib,
        sharing=args.sharing,
        prefill=args.prefill,
        shape=Shape(**{field.name: getattr(args, field.name) for field in dataclasses.fields(Shape)}),
        seed=args.seed,
        config={"placement": placement},
    )


if __name__ == "__main__":
    main()
