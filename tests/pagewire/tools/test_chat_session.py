"""`pagewire chat` on a terminal, keystroke by keystroke, against a small InferenceService."""

import asyncio
import json
import re
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from pagewire.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from pagewire.wire import rpc
from tests.pagewire.tools.terminal_session import ALT_ENTER, CTRL_C, CTRL_D, ENTER, UP, TerminalSession, pasted

LIMIT = 200


def words(chat: inference_pb2.ChatPrompt) -> int:
    return sum(len(message.content.split()) for message in chat.messages)


class Server(inference_pb2_grpc.InferenceServiceServicer):
    """Repeats the last message, a token for each word; one that begins with "forever" again and again."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.GenerateRequest] = []

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        said = request.chat.messages[-1].content.split()
        while said[0] == "forever":
            yield inference_pb2.GenerateResponse(text="on and on ", token_ids=[1])
            await asyncio.sleep(0.01)
        for word in said:
            yield inference_pb2.GenerateResponse(text=f"{word} ", token_ids=[1])
        yield inference_pb2.GenerateResponse(text="!", token_ids=[1], finish_reason=common_pb2.FINISH_REASON_STOP)

    async def Tokenize(self, request: Any, context: Any) -> inference_pb2.TokenizeResponse:
        return inference_pb2.TokenizeResponse(token_ids=[1] * words(request.chat))

    async def ListModels(self, request: Any, context: Any) -> inference_pb2.ListModelsResponse:
        model = inference_pb2.Model(id="m", max_model_len=LIMIT, has_chat_template=True)
        return inference_pb2.ListModelsResponse(models=[model])

    def messages(self) -> list[tuple[str, str]]:
        """Returns (role, content) of the messages of the last request."""
        return [(message.role, message.content) for message in self.requests[-1].chat.messages]


class Service:
    def __init__(self, address: str) -> None:
        self.address, self.server = address, Server()
        self._listening: rpc.Server | None = None

    async def start(self) -> None:
        self._listening = rpc.Server([self.address])
        name = inference_pb2.DESCRIPTOR.services_by_name["InferenceService"].full_name
        self._listening.add(self.server, inference_pb2_grpc.add_InferenceServiceServicer_to_server, name)
        await self._listening.start()

    async def stop(self) -> None:
        assert self._listening is not None
        await self._listening.stop()


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    service = Service(f"unix:{tmp_path}/s.sock")
    await service.start()
    yield service
    await service.stop()


@contextmanager
def chatting(service: Service, *flags: str, **environ: str) -> Iterator[TerminalSession]:
    state = str(Path(service.address.removeprefix("unix:")).parent)
    argv = ["chat", "--address", service.address, *flags]
    with TerminalSession(argv, {"XDG_STATE_HOME": state, **environ}) as terminal:
        terminal.expect("/help lists commands.*\n.*> ")
        yield terminal


def say(terminal: TerminalSession, typed: str) -> None:
    """Types a line and waits for the answer and the line below it."""
    terminal.type(typed)
    terminal.expect(r"\d tokens?, .*first after \d.*\n.*> ")


async def test_messages_of_several_lines(service: Service) -> None:
    def person() -> None:
        with chatting(service) as terminal:
            say(terminal, f"one{ALT_ENTER}two 日本{ENTER}")
            assert service.server.messages()[-1] == ("user", "one\ntwo 日本")
            terminal.type(f'"""three{ENTER}')
            terminal.expect(r"\.\.\. ")
            terminal.type(ENTER)
            say(terminal, f'four"""{ENTER}')
            assert service.server.messages()[-1] == ("user", "three\n\nfour")
            say(terminal, f"{pasted('five' + chr(10) + '  six' + chr(10))}{ENTER}")
            assert service.server.messages()[-1] == ("user", "five\n  six")
            terminal.type(CTRL_D)
            assert terminal.wait() == 0
            assert terminal.seen.endswith("\n"), "the shell's prompt has a line of its own"

    await asyncio.to_thread(person)


async def test_commands_and_what_is_said_of_an_answer(service: Service) -> None:
    def person() -> None:
        with chatting(service) as terminal:
            terminal.type(f"/help{ENTER}")
            for expected in ("/system TEXT", "/set", "/clear", "/save FILE", "Alt-Enter", "> "):
                terminal.expect(expected)
            terminal.type(f"/system Be brief.{ENTER}/set top_k 7{ENTER}/set top_k many{ENTER}")
            terminal.expect("top_k is many; it must be")
            terminal.type(f"/set{ENTER}")
            terminal.expect(r"temperature +0.6\r\n[^$]*top_k +7\r\n")
            terminal.type(f"hello you{ENTER}")
            terminal.expect(
                r"hello you !\r\n\x1b\[2m3 tokens, [\d.]+ tokens/s, the first after \d+\.\d\d s\x1b\[0m\r\n.*> "
            )
            assert service.server.messages() == [("system", "Be brief."), ("user", "hello you")]
            assert service.server.requests[-1].sampling_params.top_k == 7
            assert service.server.requests[-1].sampling_params.max_tokens == LIMIT // 4, "so that it ends"
            terminal.type(CTRL_D)
            assert terminal.wait() == 0
        with chatting(service, NO_COLOR="1") as terminal:
            say(terminal, f"{UP}{ENTER}")
            assert service.server.messages() == [("user", "hello you")], "the history is that of the last time"
            assert "\x1b[2m" not in terminal.seen

    await asyncio.to_thread(person)


async def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(service: Service) -> None:
    def person() -> None:
        with chatting(service) as terminal:
            terminal.type(f"forever{ENTER}")
            terminal.expect("on and on on and on")
            terminal.type(CTRL_C)
            terminal.expect(r"\d+ tokens, .*\n.*> ")
            say(terminal, f"and now{ENTER}")
            assert [role for role, _ in service.server.messages()] == ["user", "assistant", "user"]
            terminal.type(f"/clear{ENTER}")
            say(terminal, f"anew{ENTER}")
            assert service.server.messages() == [("user", "anew")]
            terminal.type(f"/exit{ENTER}")
            assert terminal.wait() == 0 and "Traceback" not in terminal.seen

    await asyncio.to_thread(person)


async def test_ctrl_c_at_the_prompt_forgets_the_line_and_says_how_to_leave(service: Service) -> None:
    def person() -> None:
        with chatting(service) as terminal:
            terminal.type("half a mess")
            terminal.expect("half a mess")
            terminal.insist(CTRL_C, "Ctrl-D leaves.*\n.*> ")
            say(terminal, f"whole{ENTER}")
            assert service.server.messages() == [("user", "whole")]
            terminal.type(CTRL_D)
            assert terminal.wait() == 0 and "Traceback" not in terminal.seen

    await asyncio.to_thread(person)


async def test_the_oldest_turns_make_room(service: Service, tmp_path: Path) -> None:
    turns = [
        {"role": role, "content": f"{number} " + "word " * 29} for number in range(4) for role in ("user", "assistant")
    ]
    (tmp_path / "long.json").write_text(json.dumps({"messages": [{"role": "system", "content": "brief"}, *turns]}))

    def person() -> None:
        with chatting(service) as terminal:
            terminal.type(f"/load {tmp_path}/long.json{ENTER}")
            terminal.expect("9 messages are loaded")
            # A quarter of 200 is for the answer; of 8 turns with 30 words each, 4 fit beside the question.
            terminal.type(f"next?{ENTER}")
            terminal.expect("takes 200 tokens: the oldest 4 messages are no longer sent")
            terminal.expect("first after")
            sent = service.server.messages()
            assert [content.split()[0] for _, content in sent] == ["brief", "2", "2", "3", "3", "next?"]
            too_long = "big " * LIMIT
            terminal.type(f'"""{too_long}"""{ENTER}')
            terminal.expect("first after")
            assert len(service.server.messages()) == 8, "nothing makes room for what never fits: the server refuses it"
            terminal.type(f"/save {tmp_path}/saved.json{ENTER}")
            terminal.expect("13 messages are in")

    await asyncio.to_thread(person)


async def test_a_stack_that_dies_leaves_the_conversation(service: Service) -> None:
    loop = asyncio.get_running_loop()

    def person() -> None:
        with chatting(service) as terminal:
            say(terminal, f"hello{ENTER}")
            terminal.type(f"forever{ENTER}")
            terminal.expect("on and on")
            asyncio.run_coroutine_threadsafe(service.stop(), loop).result()
            terminal.expect(r"nothing answers at .*/save FILE keeps(.|\n)*> ")
            terminal.type(f"again{ENTER}")
            terminal.expect(r"nothing answers at (.|\n)*> ")
            asyncio.run_coroutine_threadsafe(service.start(), loop).result()
            for _ in range(100):  # it connects again in its own time
                terminal.type(f"again{ENTER}")
                if "again !" in terminal.expect(r"(again !|nothing answers at)(.|\n)*> ").group():
                    break
                time.sleep(0.1)
            assert service.server.messages() == [("user", "hello"), ("assistant", "hello !"), ("user", "again")]
            assert not re.search("Traceback|grpc.aio", terminal.seen)

    await asyncio.to_thread(person)
