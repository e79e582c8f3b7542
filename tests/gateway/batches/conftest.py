from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack

import httpx
import openai
import pytest

from tests.gateway.conftest import openai_client

Official = Callable[[httpx.AsyncClient], openai.AsyncOpenAI]


@pytest.fixture
async def official() -> AsyncIterator[Official]:
    """Makes an official client of a gateway."""
    async with AsyncExitStack() as clients:

        def make(client: httpx.AsyncClient) -> openai.AsyncOpenAI:
            made = openai_client(client)
            clients.push_async_callback(made.close)
            return made

        yield make
