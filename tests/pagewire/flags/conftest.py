"""The machine of these tests: no other process uses the ports near the default ones."""

import pytest

from pagewire.flags import ports


@pytest.fixture(autouse=True)
def free_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    is_held = ports._is_held
    monkeypatch.setattr(ports, "_is_held", lambda host, port: not 8000 <= port < 8010 and is_held(host, port))
