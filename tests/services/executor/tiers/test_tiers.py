"""Blocks are saved, found in another stream and by another process, and continued with the same tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.config import ExecutorConfig
from pagewire.services.executor.models.protocol import Model
from pagewire.v1 import executor_pb2
from tests.services.executor.helpers.stepping import alone, prompt, tiny_llama, write_tiny_llama
from tests.services.executor.tiers.tiered_service import Stream, blocks, hashes_of, serving

PROMPT = prompt(29)
HASHES = hashes_of(PROMPT)  # of three full blocks
DISK = executor_pb2.KV_TIER_KIND_DISK


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_llama(tmp_path_factory.mktemp("tiny_llama"))


@pytest.fixture
def socket() -> Iterator[str]:
    with tempfile.TemporaryDirectory(prefix="pw-") as directory:
        yield f"unix:{directory}/executor.sock"


@pytest.fixture
def config(tmp_path: Path) -> ExecutorConfig:
    return ExecutorConfig(model=str(write_tiny_llama(tmp_path / "model")), kv_offloading_dir=str(tmp_path / "kv"))


async def test_saved_blocks_continue_with_the_same_tokens(socket: str, config: ExecutorConfig, model: Model) -> None:
    expected = alone(model, PROMPT, 10)
    async with serving(socket, config, model) as service:
        described = await service.describe()
        assert [tier.kind for tier in described.kv_tiers] == [DISK] and described.kv_tiers[0].bytes == 10 * 1024**3
        assert len(described.kv_format) == 64 and described.kv_groups[0].block_bytes == 2 * 2 * 2 * 8 * 8 * 4
        watch = service.stub.WatchTiers(executor_pb2.WatchTiersRequest())
        assert await watch.read() == executor_pb2.TierChanges(is_complete=True)
        stream = await service.opened()
        assert await stream.generate(PROMPT, [4, 2, 9, 1, 17], 10, saves=[blocks([4, 2, 9], HASHES)]) == expected
        stored = b""
        while len(stored) < 3 * 32:
            changes = await watch.read()
            assert changes.kind == DISK and not changes.removed
            stored += b"".join(one.hashes for one in changes.stored)
        assert stored == b"".join(HASHES)
        await check_loading(await service.opened(), expected)
    async with serving(socket, config, model) as service:
        assert (await service.describe()).kv_format == described.kv_format
        watch = service.stub.WatchTiers(executor_pb2.WatchTiersRequest())
        (found,) = (await watch.read()).stored
        assert sorted(HASHES) == sorted(found.hashes[start : start + 32] for start in (0, 32, 64))
        await check_loading(await service.opened(), expected)


async def check_loading(stream: Stream, expected: list[int]) -> None:
    loaded = await stream.load([blocks([5, 6, 7], HASHES)])
    assert (loaded.load_id, list(loaded.missing)) == (1, [])
    assert [(one.kind, one.bytes) for one in loaded.bytes] == [(DISK, 3 * 2048)] and loaded.seconds > 0
    assert await stream.generate(PROMPT, [5, 6, 7, 1, 17], 10, computed=24) == expected
