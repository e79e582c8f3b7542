"""The processes of `pagewire serve --data-parallel-size N`."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pagewire import cli, flags
from pagewire.config import ExecutorConfig, ServeConfig
from pagewire.config.values.kv_transfer import role_of
from pagewire.errors import StartupError
from pagewire.flags import refusals
from pagewire.process import local_executors
from pagewire.stack import stack
from pagewire.stack.banner import banner

TWO = ServeConfig(model="/m.gguf", served_model_name="m", grpc_port=9001, data_parallel_size=2, device="cpu")


def configurations(config: ServeConfig, directory: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = {}
    for service in stack.services(config, directory):
        kind = service.name.partition("-")[0]
        argv = service.command[service.command.index(kind) + 1 :]
        parsed[service.name] = flags.parse(
            cli._SERVICES[kind][1], argv, prog=kind, description="", environ=service.environment
        )
    return parsed


def test_each_replica_has_a_name_an_address_and_its_share(tmp_path: Path) -> None:
    parsed = configurations(TWO, tmp_path)
    assert list(parsed) == ["gateway", "tokenizer", "scheduler", "executor-0", "executor-1"]
    executors = [parsed["executor-0"], parsed["executor-1"]]
    assert all(isinstance(one, ExecutorConfig) and one.cpu_share == 0.5 for one in executors)
    assert parsed["scheduler"].executor_address == ",".join(one.listen for one in executors)
    assert len({one.listen for one in executors}) == 2


def test_the_first_executors_compute_prompts(tmp_path: Path) -> None:
    config = replace(TWO, data_parallel_size=3, prefill_executors=1)
    parsed = configurations(config, tmp_path)
    assert [parsed[f"executor-{i}"].role for i in range(3)] == ["prefill", "decode", "decode"]
    assert [one.role for name, one in configurations(TWO, tmp_path).items() if "executor" in name] == ["both", "both"]


@pytest.mark.parametrize(
    ("argv", "role"),
    [
        (["--role", "decode"], "decode"),
        (["--kv-transfer-config", '{"kv_role": "kv_producer"}'], "prefill"),
        (["--kv-transfer-config.kv_role", "kv_consumer"], "decode"),
        (["--kv-transfer-config", '{"kv_connector": "PagewireConnector"}', "--role", "both"], "both"),
        (["--kv-transfer-config", '{"kv_role": "kv_consumer"}', "--role", "decode"], "decode"),
    ],
)
def test_an_executor_has_a_role_by_either_flag(argv: list[str], role: str) -> None:
    assert role_of(flags.parse(ExecutorConfig, argv, prog="executor", description="", environ={})) == role


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (
            ["--role", "decode", "--kv-transfer-config", '{"kv_role": "kv_producer"}'],
            "--role decode contradicts --kv-transfer-config, which means prefill; give one of the two flags",
        ),
        (
            ["--role", "prefill", "--runner", "pooling"],
            "--role prefill: not with --runner pooling, as vectors need no decodes; leave it out",
        ),
    ],
)
def test_a_role_is_refused_by_name(argv: list[str], sentence: str) -> None:
    config = flags.parse(ExecutorConfig, argv, prog="executor", description="", environ={})
    with pytest.raises(StartupError) as error:
        refusals.check(config)
    assert str(error.value) == sentence


def test_one_replica_has_all_of_the_machine(tmp_path: Path) -> None:
    parsed = configurations(ServeConfig(model="/m.gguf", grpc_port=9001), tmp_path)
    assert list(parsed) == ["gateway", "tokenizer", "scheduler", "executor"]
    assert parsed["executor"].cpu_share == 1


def test_the_flag_has_its_short_form() -> None:
    for argv in (["-dp", "3"], ["--data-parallel-size=3"]):
        config = flags.parse(ServeConfig, argv, prog="serve", description="", environ={})
        assert config.data_parallel_size == 3


def test_on_cuda_each_replica_has_a_device_of_its_own(tmp_path: Path) -> None:
    config = ServeConfig(data_parallel_size=2)
    assert local_executors.devices(config, {"CUDA_VISIBLE_DEVICES": "5,GPU-77,2"}) == [
        {"CUDA_VISIBLE_DEVICES": "5"},
        {"CUDA_VISIBLE_DEVICES": "GPU-77"},
    ]
    for device in "ab":
        (tmp_path / device).mkdir()
    assert local_executors.devices(config, {}, tmp_path)[1] == {"CUDA_VISIBLE_DEVICES": "1"}
    assert local_executors.devices(config, {}, tmp_path / "none") == [{}, {}], "a machine without any"
    assert local_executors.devices(TWO, {"CUDA_VISIBLE_DEVICES": "0,1"}) == [{}, {}], "they run on the CPU"
    assert local_executors.devices(ServeConfig(), {"CUDA_VISIBLE_DEVICES": "0,1"}) == [{}], "as without the flag"
    with pytest.raises(StartupError, match="needs 2 CUDA devices, and this machine has 1"):
        local_executors.devices(config, {"CUDA_VISIBLE_DEVICES": "0"})


def test_on_cuda_each_rank_has_a_device_of_its_own() -> None:
    config = ServeConfig(data_parallel_size=2, tensor_parallel_size=2)
    assert local_executors.devices(config, {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4"}) == [
        {"CUDA_VISIBLE_DEVICES": "0,1"},
        {"CUDA_VISIBLE_DEVICES": "2,3"},
    ]
    with pytest.raises(StartupError, match="--data-parallel-size 2 x 2 needs 4 CUDA devices, and this machine has 3"):
        local_executors.devices(config, {"CUDA_VISIBLE_DEVICES": "0,1,2"})


def test_processes_that_others_start_are_not_the_stacks(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="start them with `pagewire executor`"):
        stack.services(ServeConfig(grpc_port=9001, distributed_executor_backend="external"), tmp_path)


def test_the_banner_names_them() -> None:
    assert "2 executors: executor-0 to executor-1" in banner(TWO, None, 1)
    assert "executors" not in banner(ServeConfig(served_model_name="m"), None, 1)
