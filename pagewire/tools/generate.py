"""`pagewire generate`: one completion by a running stack, printed as it is generated."""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import grpc

from pagewire.client import Client
from pagewire.errors import StartupError
from pagewire.stack.address import grpc_address, unanswered
from pagewire.tools.client_config import KEY_HINT, ClientConfig, GenerateConfig
from pagewire.tools.served.served import Served, served_at
from pagewire.wire.rpc import RpcError

C = TypeVar("C", bound=ClientConfig)


async def generate(config: GenerateConfig) -> int:
    """Prints a completion, and returns the exit code. Raises StartupError if the stack cannot be reached or refuses the
    request."""
    config, _ = await reached(config)
    prompt = valid_text(lambda: sys.stdin.read() if config.prompt is None else config.prompt)
    messages = [{"role": "user", "content": prompt}] if config.chat else prompt
    async with connected(config) as client:
        try:
            async for response in client.generate(messages, **options(config)):
                print(response.text, end="", flush=True)
        except RpcError as error:
            raise explain(error, config) from error
    print()
    return 0


async def reached(config: C) -> tuple[C, Served | None]:
    """Returns the configuration with the address for `Client`, and the model with it, if --model names one of several
    of a stack on this machine, which is then loaded. Raises StartupError."""
    served = await served_at(config.address, config.model)
    if served is None:
        return replace(config, address=grpc_address(config.address)), None
    # It serves one model, which may have another name there.
    return replace(config, address=await served.ready(), model=""), served


def connected(config: ClientConfig) -> Client:
    return Client(
        config.address,
        config.api_key,
        ssl_ca_certs=config.ssl_ca_certs,
        ssl_certfile=config.ssl_certfile,
        ssl_keyfile=config.ssl_keyfile,
    )


def valid_text(read: Callable[[], str]) -> str:
    """Returns the text of `read`. Raises StartupError if its bytes are not UTF-8, which messages cannot carry."""
    try:
        text = read()
        text.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise StartupError(f"the prompt is not valid UTF-8 ({error.reason} at {error.start}): convert it") from error
    return text


def options(config: ClientConfig) -> dict[str, Any]:
    """Returns the keyword arguments of Client.generate()."""
    names = ("model", "max_tokens", "temperature", "top_p", "seed")
    return {name: getattr(config, name) for name in names}


def explain(error: RpcError, config: ClientConfig) -> StartupError:
    """Returns the error of a call for the user at the terminal."""
    if error.code == grpc.StatusCode.UNAVAILABLE:
        return StartupError(unanswered(config.address, error.message))
    if error.code == grpc.StatusCode.UNAUTHENTICATED:
        return StartupError(f"{config.address} asks for a key: {KEY_HINT}")
    return StartupError(f"{error.message} ({error.code.name})")
