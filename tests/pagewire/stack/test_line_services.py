"""The services of a line beside other lines on the same machine: their flags."""

from dataclasses import replace
from pathlib import Path

from pagewire.config import ServeConfig
from pagewire.process.supervisor import Service
from pagewire.stack.line_services import line_services

CONFIG = ServeConfig(model="/m.gguf", served_model_name="m", port=9000, grpc_port=9001, device="cpu")


def commands(services: list[Service]) -> dict[str, list[str]]:
    return {service.name: list(service.command) for service in services}


def test_lines_share_memory_that_no_flag_gives(tmp_path: Path) -> None:
    alone = commands(line_services(CONFIG, tmp_path))
    assert not [flag for flag in alone["executor"] if flag.startswith("--memory-share")]
    beside = commands(line_services(CONFIG, tmp_path, share=0.5, label=" of m"))
    assert "--memory-share=0.5" in beside["executor of m"]
    on_cuda = replace(CONFIG, device="cuda")
    assert "--gpu-memory-utilization=0.45" in commands(line_services(on_cuda, tmp_path, share=0.5))["executor"]
    given = replace(on_cuda, gpu_memory_utilization=0.2)
    assert "--gpu-memory-utilization=0.2" in commands(line_services(given, tmp_path, share=0.5))["executor"]


def test_only_a_line_with_a_port_is_public(tmp_path: Path) -> None:
    public = commands(line_services(CONFIG, tmp_path))["tokenizer"]
    assert "--public-listen=127.0.0.1:9001" in public
    hidden = commands(line_services(CONFIG, tmp_path / "1", has_grpc=False, label=" of m"))
    assert not [flag for flag in hidden["tokenizer of m"] if flag.startswith("--public-listen")]
    assert f"--listen=unix:{tmp_path}/1/tokenizer.sock" in hidden["tokenizer of m"]
