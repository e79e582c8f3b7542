"""The terminal as a user sees it: the commands of a conversation, lines, and which stacks run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pagewire.config import ServeConfig
from pagewire.stack import running
from pagewire.tools.terminal.conversation import CommandError, Conversation, chat_defaults
from pagewire.tools.terminal.line_input import read_message
from pagewire.v1 import common_pb2, inference_pb2


def test_settings_go_over_the_defaults_of_chats() -> None:
    conversation = Conversation(defaults=chat_defaults(inference_pb2.Model()))
    assert 0 < conversation.sampling_params["temperature"] <= 0.7
    conversation.command("/set top_k 40")
    assert conversation.sampling_params["top_k"] == 40 and "temperature" in conversation.sampling_params
    conversation.command("/set temperature 0")
    assert conversation.sampling_params == {"top_k": 40, "temperature": 0}
    conversation.command("/set temperature")
    assert conversation.sampling_params["temperature"] > 0


def test_settings_show_what_the_server_takes() -> None:
    conversation = Conversation(of_server={"temperature": 0.2, "top_p": 0.9})
    conversation.command("/set top_p 0.5")
    shown = {
        name: value for name, _, value in (line.partition(" ") for line in conversation.command("/set").split("\n"))
    }
    assert {name: shown[name].strip() for name in ("temperature", "top_p", "top_k")} == {
        "temperature": "0.2 (default)",
        "top_p": "0.5",
        "top_k": "(default)",
    }


def test_what_the_model_recommends_is_left_to_the_server() -> None:
    recommended = common_pb2.SamplingParams(temperature=1.0, top_k=20)
    source = "generation_config.json"
    model = inference_pb2.Model(default_sampling_params=recommended, default_sampling_source=source)
    assert chat_defaults(model) == {}
    neutral = inference_pb2.Model(default_sampling_source="--generation-config vllm")
    assert chat_defaults(neutral) == {}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/sytem x", "unknown command /sytem; /help"),
        ("/set temprature 1", "no setting temprature; there are temperature"),
        ("/set temperature hot", "temperature is hot; it must be >= 0 and finite"),
        ("/set top_p 2", "top_p is 2; it must be in"),
        ("/set seed nan", "seed is nan"),
        ("/save", "name a file"),
        ("/load /no/such/file", "cannot be read"),
        ("/save /no/such/file", "cannot be written"),
    ],
)
def test_a_wrong_command_says_what_to_write(line: str, message: str) -> None:
    with pytest.raises(CommandError, match=message):
        Conversation().command(line)


def test_a_saved_conversation_goes_on(tmp_path: Path) -> None:
    first = Conversation(system="be brief", turns=[{"role": "user", "content": "hällo\nyou"}])
    assert "2 messages" in first.command(f"/save {tmp_path}/c.json")
    second = Conversation()
    second.command(f"/load {tmp_path}/c.json")
    assert (second.system, second.messages) == ("be brief", first.messages)
    second.command("/clear")
    assert second.messages == [{"role": "system", "content": "be brief"}]
    second.command("/system")
    assert second.messages == []
    (tmp_path / "other.json").write_text(json.dumps({"x": 1}))
    with pytest.raises(CommandError, match="is not a conversation"):
        second.command(f"/load {tmp_path}/other.json")


@pytest.mark.parametrize(
    ("typed", "messages"),
    [
        (["one ", "two"], ["one", "two"]),
        (['"""a', "", " b", 'c"""', "d"], ["a\n\n b\nc", "d"]),
        (['"""all"""'], ["all"]),
        (["a \\", "b\\", "c", "d"], ["a \nb\nc", "d"]),
        (['"""a', "b"], ["a\nb"]),  # the end of the input ends it, too
    ],
)
def test_several_lines_are_one_message(typed: list[str], messages: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lines = iter(typed)

    def type_line(prompt: str) -> str:
        try:
            return next(lines)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", type_line)
    assert list(iter(lambda: read_message(""), None)) == messages


def stack(name: str, port: int) -> ServeConfig:
    return ServeConfig(model=f"/models/{name}", served_model_name=f"{name},alias-{name}", port=port, grpc_port=port + 1)


def test_running_stacks_are_found_by_name_and_by_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert running.running_stacks() == []
    with running.announced(stack("a", 9000), shared=True):
        [found] = running.running_stacks()
        assert (found.pid, found.names, found.rest) == (os.getpid(), ("a", "alias-a"), "http://127.0.0.1:9000")
        for name, files in (("a", None), ("alias-a", None), ("./a", Path("/models/a"))):
            assert running.stack_that_serves(name, files) == found
        assert running.stack_that_serves("b", Path("/models/b")) is None
    assert running.running_stacks() == []
    with running.announced(stack("a", 9000), shared=False):
        assert running.stack_that_serves("a", None) is None, "it may end at any time"


_ANNOUNCE = """
import time
from pagewire.stack import running
from pagewire.config import ServeConfig
with running.announced(ServeConfig(served_model_name="m"), shared=True):
    print("announced", flush=True)
    time.sleep(60)
"""


def test_a_killed_stack_is_not_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with subprocess.Popen([sys.executable, "-c", _ANNOUNCE], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"announced\n"
        assert [found.pid for found in running.running_stacks()] == [process.pid]
        process.kill()
    assert running.running_stacks() == [] and list((tmp_path / "pagewire").glob("*.json")) == []


def test_a_stack_that_cannot_be_listed_serves_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pagewire").write_text("no directory")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    with running.announced(stack("a", 9000), shared=True):
        assert running.running_stacks() == []
