"""`pagewire bench serve | sweep | spec | plot`. Each command is imported when it runs."""

import importlib
import sys
from collections.abc import Sequence

_MODULES = {
    "serve": "pagewire.tools.bench.serve",
    "sweep": "pagewire.tools.bench.sweep",
    "spec": "pagewire.tools.bench.spec",
    "plot": "pagewire.tools.bench.plot",
}

_HELP = """\
usage: pagewire bench <command> [flags]

  serve      latency and throughput of a server under one load
  sweep      the same by concurrency, and time to first token by prompt length
  spec       the gain of speculative decoding: starts a server for each method, and compares
  plot FILE  plots these curves, for any number of servers

  pagewire bench <command> --help    flags of a command
"""


def main(argv: Sequence[str]) -> int:
    if argv and argv[0] in _MODULES:
        return int(importlib.import_module(_MODULES[argv[0]]).main(argv[1:]))
    if argv and argv[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    print(_HELP, end="", file=sys.stderr)
    return 2
