from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from tests.gateway.conftest import running_gateway
from tests.gateway.models.fake_stack import FakeStack


@pytest.fixture
async def stack(tmp_path: Path) -> AsyncIterator[FakeStack]:
    """A stack with two models, "a" and "b", neither of which is loaded."""
    stack = FakeStack(tmp_path)
    stack.add("a", aliases=["gpt"])
    stack.add("b", size_bytes=5)
    await stack.start()
    yield stack
    await stack.close()


@pytest.fixture
async def two(stack: FakeStack) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the gateway of that stack."""
    async with running_gateway(stack.address, lines_address=stack.address) as client:
        yield client
