"""A supervisor of stand-in services, as processes: what the tests of the supervisor look at from outside.

python -m tests.pagewire.process.stand_in supervise DIRECTORY JSON-OPTIONS NAME=BEHAVIOUR...
python -m tests.pagewire.process.stand_in serve DIRECTORY NAME BEHAVIOUR

Every service notes in DIRECTORY/events: "start NAME PID", "after NAME CODE FAILED" (how the life before has ended), and
"stop NAME" (SIGTERM) or "cut NAME" (SIGINT).
"""

import asyncio
import faulthandler
import json
import logging
import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from pagewire.errors import StartupError
from pagewire.process import process
from pagewire.process.supervisor import Service, Supervisor
from pagewire.process.watchdog import HEARTBEAT_FD

_CHILD = "import time; from pagewire.process.process import die_with"


async def is_ready(path: Path) -> bool:
    return await asyncio.to_thread(path.exists)


def supervise(directory: Path, options: dict[str, Any], behaviours: list[str]) -> int:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where the tests run under nohup, it would be ignored
    logging.basicConfig(format="%(message)s", level=logging.INFO)
    services = []
    for name, _, behaviour in (item.partition("=") for item in behaviours):
        command = [sys.executable, "-m", "tests.pagewire.process.stand_in", "serve", str(directory), name, behaviour]
        services.append(Service(name, command, partial(is_ready, directory / f"{name}.ready"), os.environ))
    supervisor = Supervisor(services, shutdown_timeout=20, **options)
    try:
        return asyncio.run(supervisor.run(lambda: print("all ready", flush=True)))
    except StartupError as error:
        print(error, file=sys.stderr)
        return 1


def serve(directory: Path, name: str, behaviour: str) -> int:
    process.die_with_parent()
    events = directory / "events"

    def note(event: str) -> int:
        with events.open("a") as file:
            return file.write(event + "\n")

    note(f"start {name} {os.getpid()}")
    note(f"after {name} {os.environ[process.PREDECESSOR]} {process.predecessor_failed()}")
    if behaviour.startswith("exit"):
        return int(behaviour.removeprefix("exit"))
    if behaviour == "killed" or (behaviour == "flaky" and events.read_text().count(f"start {name} ") < 3):
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "with-child":
        child = subprocess.Popen([sys.executable, "-c", f"{_CHILD}; die_with({os.getpid()}); time.sleep(600)"])
        note(f"start {name}-child {child.pid}")
    if behaviour == "stubborn":
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: note(f"ignored {name}"))
    else:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(note(f"stop {name}") * 0))
        signal.signal(signal.SIGINT, lambda *_: sys.exit(note(f"cut {name}") * 0))
    (directory / f"{name}.ready").touch()
    if behaviour in ("hangs", "sleeps") and events.read_text().count(f"start {name} ") == 1:
        for _ in range(3):
            time.sleep(0.2)
            os.write(int(os.environ[HEARTBEAT_FD]), b".")
        if behaviour == "hangs":
            os.kill(os.getpid(), signal.SIGSTOP)
        faulthandler.enable()
        sleep_here()
    while True:
        time.sleep(600)


def sleep_here() -> None:
    time.sleep(600)


if __name__ == "__main__":
    if sys.argv[1] == "supervise":
        sys.exit(supervise(Path(sys.argv[2]), json.loads(sys.argv[3]), sys.argv[4:]))
    sys.exit(serve(Path(sys.argv[2]), sys.argv[3], sys.argv[4]))
