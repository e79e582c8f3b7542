import json
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagewire import cli, flags
from pagewire.config import RayExecutorsConfig, ServeConfig
from pagewire.errors import StartupError
from pagewire.flags import ports, refusals
from pagewire.stack import stack
from pagewire.stack.banner import banner
from pagewire.v1 import common_pb2, inference_pb2

CONFIG = ServeConfig(
    model="/m.gguf",
    served_model_name="m",
    port=9000,
    grpc_port=9001,
    api_key="hunter2",
    max_num_seqs=3,
    block_size=32,
    scheduling_policy="priority",
    log_format="json",
)


def test_each_service_gets_its_flags_and_addresses(tmp_path: Path) -> None:
    services = {service.name: service for service in stack.services(CONFIG, tmp_path)}
    assert list(services) == ["gateway", "tokenizer", "scheduler", "executor"], "the order in which they are stopped"
    parsed: dict[str, Any] = {}
    for name, service in services.items():
        start = service.command.index(name) + 1
        parsed[name] = flags.parse(
            cli._SERVICES[name][1],
            service.command[start:],
            prog=name,
            description="",
            environ=service.environment,
        )
    gateway, tokenizer, scheduler, executor = parsed.values()
    assert (gateway.port, gateway.api_key) == (9000, "hunter2")
    assert (tokenizer.listen, tokenizer.public_listen) == (gateway.tokenizer_address, "127.0.0.1:9001")
    assert (tokenizer.scheduler_address, scheduler.executor_address) == (scheduler.listen, executor.listen)
    assert (tokenizer.model, tokenizer.served_model_name, executor.model) == ("/m.gguf", "m", "/m.gguf")
    assert (scheduler.max_num_seqs, executor.max_num_seqs, executor.block_size) == (3, 3, 32)
    assert scheduler.scheduling_policy == "priority"
    assert {config.log_format for config in parsed.values()} == {"json"}


def test_the_key_reaches_those_whom_clients_reach_and_no_command_line(tmp_path: Path) -> None:
    for service in stack.services(CONFIG, tmp_path):
        assert "hunter2" not in " ".join(service.command)
        assert ("hunter2" in service.environment.values()) == (service.name != "executor")


def test_configuration_in_the_environment_does_not_reach_children_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEWIRE_PORT", "1")
    assert all("PAGEWIRE_PORT" not in service.environment for service in stack.services(CONFIG, tmp_path))


def test_several_gateways_are_one_service_of_the_stack(tmp_path: Path) -> None:
    gateway, *others = stack.services(ServeConfig(api_server_count=2, grpc_port=9001), tmp_path)
    assert "--api-server-count=2" in gateway.command
    assert [service.name for service in others] == ["tokenizer", "scheduler", "executor"]


def test_executors_on_ray_are_kept_by_one_process_and_found_by_its_file(tmp_path: Path) -> None:
    given = replace(CONFIG, model="owner/model", revision="v1", distributed_executor_backend="ray")
    found = replace(given, model=str(tmp_path), revision=None, data_parallel_size=3, num_threads=2)
    services = {service.name: service for service in stack.services(found, tmp_path, given)}
    assert list(services) == ["gateway", "tokenizer", "scheduler", "ray-executors"]
    addresses = str(tmp_path / "executors.txt")
    assert {"--executor-discovery=file", f"--executor-address={addresses}"} <= set(services["scheduler"].command)
    # Each node finds the model itself; this machine has it already.
    assert f"--model={tmp_path}" in services["tokenizer"].command
    expected = {"--model=owner/model", "--revision=v1", "--data-parallel-size=3", "--num-threads=2"}
    command = services["ray-executors"].command
    assert expected | {f"--address-file={addresses}"} <= set(command)
    kept = flags.parse(
        RayExecutorsConfig, command[command.index("ray-executors") + 1 :], prog="", description="", environ={}
    )
    assert kept.distributed_executor_backend == "mp", "the ranks of an executor are on one node"
    assert "Executors on a Ray cluster: 3" in banner(found, None, 1.0)


CHAT = inference_pb2.Model(has_chat_template=True)


def test_banner_has_what_a_newcomer_needs() -> None:
    text = banner(CONFIG, CHAT, 1.25)
    for part in (
        "http://127.0.0.1:9000",
        "127.0.0.1:9001",
        "curl ",
        "pagewire chat --address",
        "Ctrl-C",
        '"model": "m"',
    ):
        assert part in text
    assert "hunter2" not in text and "Authorization: Bearer" in text
    several = banner(CONFIG, CHAT, 1, ["b"], ["c", "d"])
    assert " serves m, b; on request: c, d, ready after" in several and "(m alone)" in several
    assert " serves on request: m, d, ready after" in banner(CONFIG, None, 1, [], ["m", "d"])
    wildcard = banner(ServeConfig(host="0.0.0.0", served_model_name="m"), CHAT, 1)
    assert "http://127.0.0.1:8000" in wildcard and "pagewire chat\n" in wildcard
    assert "http://[::1]:8000" in banner(ServeConfig(host="::", served_model_name="m"), CHAT, 1)


def test_banner_says_where_operators_look_and_that_a_key_is_needed() -> None:
    text = banner(ServeConfig(served_model_name="m", admin_port=9003, api_key_file="keys"), CHAT, 1)
    assert "http://127.0.0.1:9003/metrics" in text and "Authorization: Bearer" in text
    text = banner(ServeConfig(served_model_name="m"), CHAT, 1)
    assert "Admin" not in text and "Authorization" not in text


@pytest.mark.parametrize(
    ("model", "routes", "commands"),
    [
        (CHAT, ["/v1/chat/completions"], ["chat"]),
        (inference_pb2.Model(), ["/v1/completions"], ["generate"]),
        (inference_pb2.Model(kind=common_pb2.MODEL_KIND_EMBED), ["/v1/embeddings"], []),
        (inference_pb2.Model(kind=common_pb2.MODEL_KIND_CLASSIFY, has_chat_template=True), ["/classify"], []),
        (None, [], []),
    ],
)
def test_banner_suggests_only_what_the_model_does(
    model: inference_pb2.Model | None, routes: list[str], commands: list[str]
) -> None:
    text = banner(CONFIG, model, 1)
    assert re.findall(r"curl http://[^/]+(\S+)", text) == routes
    assert re.findall(r"  pagewire (\w+) .*--address 127", text) == commands
    assert [json.loads(body)["model"] for body in re.findall(r"-d '(.*)'", text)] == ["m"] * len(routes)


@pytest.mark.parametrize(
    ("host", "api_key", "warned"),
    [
        ("0.0.0.0", "hunter2", True),
        ("::", "hunter2", True),
        ("", "hunter2", True),
        ("myhost", "hunter2", True),
        ("0.0.0.0", None, False),
        ("127.0.0.1", "hunter2", False),
        ("::1", "hunter2", False),
        ("localhost", "hunter2", False),
    ],
)
def test_keys_that_a_network_can_read_are_warned_of(
    host: str, api_key: str | None, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    stack._warn_of_plain_text(ServeConfig(host=host, api_key=api_key))
    assert ("keys are sent unencrypted" in caplog.text) == warned
    assert "hunter2" not in caplog.text


def test_sockets_are_private_and_go_away() -> None:
    with stack._sockets(None) as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
    assert not directory.exists()


def test_a_given_directory_becomes_private_and_is_left_without_sockets(tmp_path: Path) -> None:
    given = tmp_path / "given"
    given.mkdir(mode=0o755)
    (given / "mine").write_text("stays")
    (given / "executor.sock.old").write_text("stays")
    (given / "executor.sock.d").mkdir()
    (given / "scheduler.sock.stream").write_text("stays")
    for name in ("executor.sock", "executor.sock.stream"):  # of a stack that was killed
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(str(given / name))
    with stack._sockets(str(given)) as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        with socket.socket(socket.AF_UNIX) as service:
            service.bind(str(directory / "tokenizer.sock"))
    left = sorted(path.name for path in given.iterdir())
    assert left == ["executor.sock.d", "executor.sock.old", "mine", "scheduler.sock.stream"]


def test_a_directory_that_others_may_write_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tmp_path / "given"
    given.mkdir()
    given.chmod(0o777)
    with pytest.raises(StartupError, match=f"chmod 700 {given}"), stack._sockets(str(given)):
        pass
    given.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    with pytest.raises(StartupError, match="belongs to another user"), stack._sockets(str(given)):
        pass
    assert given.stat().st_mode & 0o777 == 0o755


def test_the_remedy_for_a_shared_directory_is_a_new_one_inside_it(tmp_path: Path) -> None:
    tmp_path.chmod(0o1777)  # as /tmp is
    with pytest.raises(StartupError) as raised, stack._sockets(str(tmp_path)):
        pass
    assert "use a new directory inside it" in str(raised.value) and "chmod" not in str(raised.value)


def test_a_directory_in_use_or_too_deep_is_refused(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as running:
        running.bind(str(tmp_path / "executor.sock"))
        running.listen()
        with pytest.raises(StartupError, match="another stack uses it"), stack._sockets(str(tmp_path)):
            pass
    with pytest.raises(StartupError, match="--uds-dir"), stack._sockets(str(tmp_path / ("x" * 90))):
        pass


def test_port_0_becomes_a_free_port() -> None:
    assert ports.available_port("127.0.0.1") > 0


@pytest.mark.parametrize(
    ("flag", "config"),
    [
        ("--grpc-port", ServeConfig(port=9000, grpc_port=9000)),
        ("--scheduler-grpc-port", ServeConfig(port=9000, scheduler_grpc_port=9000)),
        ("--admin-port", ServeConfig(port=9000, admin_port=9000)),
    ],
)
def test_a_port_that_is_given_twice_stops_the_start(flag: str, config: ServeConfig) -> None:
    with pytest.raises(StartupError, match=rf"--port and {flag} are both 9000"):
        refusals.check(config)
    refusals.check(replace(config, port=9001))


def test_foreign_host_is_refused() -> None:
    with pytest.raises(StartupError, match=r"--port: cannot listen on 192\.0\.2\.1:9000"):
        ports.available_port("192.0.2.1", 9000)


def test_token_level_is_public_only_where_a_port_is_named(tmp_path):
    def scheduler(config: ServeConfig) -> str:
        [command] = [service.command for service in stack.services(config, tmp_path) if service.name == "scheduler"]
        return str(command)

    assert "50999" in scheduler(ServeConfig(scheduler_grpc_port=50999))
    assert "127.0.0.1" not in scheduler(ServeConfig())
