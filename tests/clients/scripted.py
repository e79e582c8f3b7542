"""A server with a scripted model that calls tools, for clients that run them:

python -m tests.clients.scripted PORT

Asked with tools, it calls the first one with {"a": 2, "b": 3}; given a tool's answer, it says "It is ANSWER."; without
either, "Hello!". The gateway and the tokenizer service are the real ones, with Qwen3's marks for calls and reasoning.
"""

import asyncio
import json
import re
import sys
import tempfile
from pathlib import Path

from pagewire.config import DEFAULT_MODEL, GatewayConfig
from pagewire.files.models import resolve_model
from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.gateway import main
from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.v1.scheduler_pb2 import TokenRequest
from tests.services.tokenizer.chat_templates import FAMILIES
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine

_TOOL = re.compile(r'\{"type": "function", "function": \{"name": "(\w+)"')
_ANSWER = re.compile(r"<tool_response>\n(.*?)\n</tool_response>", re.DOTALL)
ARGUMENTS = {"a": 2, "b": 3}


def reply(prompt: str, form: str) -> str:
    """Returns the scripted output. form: the format that the output must have, if any."""
    if form:
        call = json.dumps(ARGUMENTS)
        name = re.search(r'"const": "(\w+)"', form)
        return f'[{{"name": "{name.group(1)}", "arguments": {call}}}]' if name else call
    if answers := _ANSWER.findall(prompt):
        return f"<think>\nI know.\n</think>\n\nIt is {answers[-1]}."
    if tool := _TOOL.search(prompt):
        call = json.dumps({"name": tool.group(1), "arguments": ARGUMENTS})
        return f"<think>\nA tool.\n</think>\n\n<tool_call>\n{call}\n</tool_call>"
    return "Hello!"


async def serve(port: int) -> None:
    gguf = resolve_model(DEFAULT_MODEL)
    tokenizer = load_tokenizer(gguf)

    def script(request: TokenRequest) -> list[int]:
        prompt = tokenizer.decode(list(request.prompt_token_ids), skip_special_tokens=False)
        text = reply(prompt, request.sampling_params.grammar.json_schema)
        return [*tokenizer.encode(text, add_special_tokens=False), EOS]

    with tempfile.TemporaryDirectory(prefix="pw-") as name:
        scheduler = FakeScheduler(script, max_model_len=4096)
        line = TokenizerLine(Path(name), scheduler, gguf, served_model_name="scripted")
        pool = TokenizerPool(FileSource(str(gguf), chat_template=FAMILIES["qwen3"]), size=1)
        config = GatewayConfig(port=port, tokenizer_address=line.config.listen)
        async with line.running(pool=pool):
            await main.serve(config, main.listen(config), asyncio.Event().wait())


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
