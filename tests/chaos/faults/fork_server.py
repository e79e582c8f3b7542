"""Starts services in a fraction of the time: each is forked off a process that has imported everything already.

Where the system lets it (user namespaces), it has a mount of its own with a small disk, which can be filled.

stdin:  {"start": NAME, "argv": [...], "log": PATH}   argv of `pagewire`, or of the fake executor after "fake-executor"
        {"fill": true | false}                        the disk
stdout: {"ready": true, "disk": true | false}
        {"started": NAME, "pid": PID}    {"ended": NAME, "pid": PID, "status": EXIT-CODE-OR-MINUS-SIGNAL}
        {"filled": true | false}

Everything ends with it, and it ends with its stdin.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from pagewire.process import process

DISK_BYTES = 24 * 2**20


class ForkServer:
    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ)

    def run(self) -> None:
        self._send(ready=True, disk=self._mount())
        unread = b""
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    self._on_end(key.fd, *key.data)
                    continue
                if not (read := os.read(0, 65536)):
                    return
                *lines, unread = (unread + read).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))

    def _handle(self, message: dict[str, Any]) -> None:
        if "fill" in message:
            self._fill(message["fill"])
            self._send(filled=message["fill"])
            return
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            _become(parent, message["argv"], message["log"])
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (message["start"], pid))
        self._send(started=message["start"], pid=pid)

    def _on_end(self, descriptor: int, name: str, pid: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)
        _, status = os.waitpid(pid, 0)
        self._send(ended=name, pid=pid, status=os.waitstatus_to_exitcode(status))

    def _send(self, **message: Any) -> None:
        print(json.dumps(message), flush=True)

    def _mount(self) -> bool:
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "chaos", str(self._disk)]
        return os.environ.get("CHAOS_UNSHARED") == "1" and subprocess.run(mount).returncode == 0

    def _fill(self, is_full: bool) -> None:
        ballast = self._disk / "ballast"
        if not is_full:
            ballast.unlink(missing_ok=True)
            return
        with ballast.open("ab", buffering=0) as file, suppress(OSError):
            for size in (2**20, 2**12):
                with suppress(OSError):
                    while file.write(bytes(size)) == size:
                        pass


def _become(parent: int, argv: list[str], log: str) -> NoReturn:
    """The child."""
    code = 1
    try:
        os.setsid()
        process.die_with(parent)
        os.closerange(3, 1024)
        for target, path, flags in ((0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)):
            descriptor = os.open(path, flags, 0o644)
            os.dup2(descriptor, target)
            os.close(descriptor)
        os.dup2(1, 2)
        command, *arguments = argv
        if command == "fake-executor":
            from tests.chaos.faults import executor

            process.raise_descriptor_limit()
            executor.main(arguments)
        else:
            from pagewire import cli

            cli.main(argv)
        code = 0
    except SystemExit as exit:
        if isinstance(exit.code, str):
            print(exit.code, file=sys.stderr)
        code = exit.code if isinstance(exit.code, int) else int(exit.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main() -> None:
    disk, model, *modules = sys.argv[1:]
    process.spare_grpc_threads()
    for name in modules:
        __import__(name)
    if "tests.chaos.faults.executor" in modules:
        from tests.chaos.faults.executor import compiler

        compiler(Path(model))
    ForkServer(Path(disk)).run()


if __name__ == "__main__":
    main()
