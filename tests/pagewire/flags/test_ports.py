"""Ports that are not set make room for those that are; two that are set to the same are refused."""

import socket
from pathlib import Path

import pytest

from pagewire.config import ServeConfig
from pagewire.errors import StartupError
from pagewire.flags import ports, refusals
from tests.pagewire.flags.parsing import parse, refusal


@pytest.mark.parametrize(
    ("argv", "expected", "line"),
    [
        ((), (8000, 8001), ""),
        (("--port=8001",), (8001, 8002), "--port is 8001: --grpc-port is not set, and becomes 8002"),
        (("--grpc-port=8000",), (8001, 8000), "--grpc-port is 8000: --port is not set, and becomes 8001"),
        (("--admin-port=8001",), (8000, 8002), "--admin-port is 8001: --grpc-port is not set, and becomes 8002"),
        (("--metrics-port=8000",), (8002, 8001), "--metrics-port is 8000: --port is not set, and becomes 8002"),
        (("--port=8001", "--scheduler-grpc-port=8002"), (8001, 8003), "--grpc-port is not set, and becomes 8003"),
        # Operators' ports are on another address, unless one of both is every address.
        (("--admin-port=8001", "--host=192.0.2.1"), (8000, 8001), ""),
        (("--admin-port=8001", "--host=0.0.0.0"), (8000, 8002), "--grpc-port is not set, and becomes 8002"),
        (("--admin-port=8001", "--host=localhost"), (8000, 8002), "--grpc-port is not set, and becomes 8002"),
        (("--port=0", "--admin-port=0"), (0, 8001), ""),
    ],
)
def test_a_port_that_is_not_set_makes_room(
    argv: tuple[str, ...], expected: tuple[int, int], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = parse(*argv)
    assert (found.port, found.grpc_port) == expected
    said = capsys.readouterr().err
    assert line in said and bool(said) == bool(line)


def test_a_port_of_the_file_is_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("port: 8001\n")
    assert parse(f"--config={file}").grpc_port == 8002
    file.write_text("port: 8001\ngrpc-port: 8001\n")
    error = refusal(capsys, f"--config={file}", "--show-config")
    assert "--port and --grpc-port are both 8001: give each its own port" in error


def test_an_unset_grpc_port_avoids_other_processes() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        held = other.getsockname()[1]
        config = ServeConfig(port=0, grpc_port=held)
        moved, lines = ports.settled(config, ())
        assert moved.grpc_port > held
        assert lines == [f"port {held} is in use: --grpc-port is not set, and becomes {moved.grpc_port}"]
        assert ports.settled(config, ("grpc_port",)) == (config, [])
        refusals.check(config)  # --show-config may run beside the stack
        with pytest.raises(StartupError) as raised:
            ports.available_ports(config)
        assert str(raised.value) == (
            f"--grpc-port: cannot listen on 127.0.0.1:{held} (Address already in use): stop the process that uses it, "
            "or choose another with --grpc-port or --host"
        )
        with pytest.raises(StartupError, match="or choose another with --metrics-port or --admin-host"):
            ports.available_ports(ServeConfig(port=0, grpc_port=0, metrics_port=held))
        # The REST port stays where clients expect it.
        assert ports.settled(ServeConfig(port=held, grpc_port=0), ())[0].port == held
