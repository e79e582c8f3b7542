"""The file of executors' addresses."""

import os
from pathlib import Path


class AddressFile:
    """The file has one address a line and is replaced as a whole, so that a reader never sees half of it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._addresses: dict[str, str] = {}
        self.was_used = False  # an executor has been listed
        self._write()

    def put(self, name: str, address: str) -> None:
        self.was_used = True
        if self._addresses.get(name) != address:
            self._addresses[name] = address
            self._write()

    def remove(self, name: str) -> None:
        if self._addresses.pop(name, None) is not None:
            self._write()

    def _write(self) -> None:
        new = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        new.write_text("".join(f"{address}\n" for address in self._addresses.values()))
        new.replace(self._path)
