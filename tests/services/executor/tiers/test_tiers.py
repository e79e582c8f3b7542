"""Blocks are saved, found in another stream and by another process, and continued with the same tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from pagewire.config import ExecutorConfig
from pagewire.errors import StartupError
from pagewire.services.executor.loading.weights.identity import content_digest
from pagewire.services.executor.models.protocol import Model
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.tiers import disk as disk_module
from pagewire.services.executor.tiers import loads as loads_module
from pagewire.services.executor.tiers.start import model_digest, with_tiers
from pagewire.v1 import executor_pb2
from tests.services.executor.helpers.stepping import CPU, LIMITS, VOCAB_SIZE, alone, prompt
from tests.services.executor.models.tiny import load, save_tiny
from tests.services.executor.service.test_replacement import save_other
from tests.services.executor.service.test_servicer import NUM_BLOCKS
from tests.services.executor.tiers.tiered_service import Service, Stream, blocks, counted, hashes_of, serving

PROMPT = prompt(29)
HASHES = hashes_of(PROMPT)  # of three full blocks
HOST, DISK = executor_pb2.KV_TIER_KIND_HOST, executor_pb2.KV_TIER_KIND_DISK
BLOCK_BYTES = 2 * 2 * 2 * 8 * 8 * 4


@pytest.fixture
def on_disk(plain: ExecutorConfig, tmp_path: Path) -> ExecutorConfig:
    return replace(plain, kv_offloading_dir=str(tmp_path / "kv"))


@pytest.fixture
def in_memory(plain: ExecutorConfig) -> ExecutorConfig:
    return replace(plain, kv_offloading_size=0.001)


@pytest.fixture(scope="module")
def tokens(model: Model) -> list[int]:
    """The tokens behind the prompt."""
    return alone(model, PROMPT, 10)


async def saved(service: Service, tokens: list[int]) -> None:
    """Computes and saves the prompt; returns once its blocks can be found."""
    stream = await service.opened()
    assert await stream.generate(PROMPT, [4, 2, 9, 1, 17], 10, saves=[blocks([4, 2, 9], HASHES)]) == tokens
    await found(service, len(HASHES))


async def found(service: Service, number: int) -> None:
    """Waits until each tier holds this many blocks."""
    for tier in service.tiers.contents.values():
        async with asyncio.timeout(20):
            while len(tier) < number:  # noqa: ASYNC110 - another thread's state
                await asyncio.sleep(0.005)


async def check_loading(stream: Stream, expected: list[int], kind: int = DISK, source: str = "") -> None:
    loaded = await stream.load([blocks([5, 6, 7], HASHES)], source)
    assert (loaded.load_id, list(loaded.missing)) == (1, [])
    assert [(one.kind, one.bytes) for one in loaded.bytes] == [(kind, 3 * BLOCK_BYTES)] and loaded.seconds > 0
    assert await stream.generate(PROMPT, [5, 6, 7, 1, 17], 10, computed=24) == expected


async def test_blocks_on_disk_continue_with_the_same_tokens(
    sockets: list[str], on_disk: ExecutorConfig, model: Model, tokens: list[int]
) -> None:
    async with serving(sockets[0], on_disk, model) as service:
        described = await service.describe()
        assert [tier.kind for tier in described.kv_tiers] == [DISK] and described.kv_tiers[0].bytes == 10 * 1024**3
        assert len(described.kv_format) == 64 and described.kv_groups[0].block_bytes == BLOCK_BYTES
        watch = service.stub.WatchTiers(executor_pb2.WatchTiersRequest())
        assert await watch.read() == executor_pb2.TierChanges(is_complete=True)
        await saved(service, tokens)
        stored = b""
        while len(stored) < 3 * 32:
            changes = await watch.read()
            assert changes.kind == DISK and not changes.removed
            stored += b"".join(one.hashes for one in changes.stored)
        assert stored == b"".join(HASHES)
        await check_loading(await service.opened(), tokens)
    async with serving(sockets[0], on_disk, model) as service:
        assert (await service.describe()).kv_format == described.kv_format
        watch = service.stub.WatchTiers(executor_pb2.WatchTiersRequest())
        (found,) = (await watch.read()).stored
        assert sorted(HASHES) == sorted(found.hashes[start : start + 32] for start in (0, 32, 64))
        await check_loading(await service.opened(), tokens)


async def test_blocks_in_host_memory_come_first(
    sockets: list[str], on_disk: ExecutorConfig, model: Model, tokens: list[int]
) -> None:
    async with serving(sockets[0], replace(on_disk, kv_offloading_size=0.001), model) as service:
        assert [tier.kind for tier in (await service.describe()).kv_tiers] == [HOST, DISK]
        await saved(service, tokens)
        await check_loading(await service.opened(), tokens, HOST)


async def test_blocks_of_another_executor_are_read_from_its_memory(
    sockets: list[str],
    plain: ExecutorConfig,
    in_memory: ExecutorConfig,
    model: Model,
    other_model: Model,
    tokens: list[int],
) -> None:
    async with serving(sockets[0], in_memory, model) as first, serving(sockets[1], plain, other_model) as second:
        await saved(first, tokens)
        await check_loading(await second.opened(), tokens, HOST, sockets[0])
        assert not first.calls["ReadBlocks"]


async def test_blocks_of_another_host_are_sent(
    sockets: list[str],
    plain: ExecutorConfig,
    on_disk: ExecutorConfig,
    in_memory: ExecutorConfig,
    model: Model,
    other_model: Model,
    tokens: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("pagewire.services.executor.tiers.shared._BOOT_ID", Path("/proc/sys/kernel/random/uuid"))
    for config in (in_memory, on_disk):
        async with serving(sockets[0], config, model) as first, serving(sockets[1], plain, other_model) as second:
            await saved(first, tokens)
            await check_loading(await second.opened(), tokens, HOST, sockets[0])
            assert first.calls["ReadBlocks"] == 1


async def test_a_source_that_is_gone_or_foreign_has_no_blocks(
    sockets: list[str],
    plain: ExecutorConfig,
    in_memory: ExecutorConfig,
    model: Model,
    other_model: Model,
    tokens: list[int],
) -> None:
    async with serving(sockets[1], plain, other_model) as second:
        loaded = await (await second.opened()).load([blocks([5, 6, 7], HASHES)], sockets[0])
        assert (list(loaded.missing), list(loaded.bytes)) == ([0, 1, 2], [])
        async with serving(sockets[0], replace(in_memory, hf_overrides='{"rope_theta": 5.0}'), model) as first:
            await saved(first, tokens)
            loaded = await (await second.opened()).load([blocks([5, 6, 7], HASHES)], sockets[0])
            assert list(loaded.missing) == [0, 1, 2], "it serves another model"
            request = executor_pb2.ReadBlocksRequest(kv_format="other")
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await first.stub.ReadBlocks(request).read()
            assert raised.value.code() == grpc.StatusCode.FAILED_PRECONDITION


async def test_forgotten_blocks_are_not_found(
    sockets: list[str], on_disk: ExecutorConfig, model: Model, tokens: list[int]
) -> None:
    async with serving(sockets[0], replace(on_disk, kv_offloading_size=0.001), model) as service:
        await saved(service, tokens)
        some = executor_pb2.BlockHashes(hashes=HASHES[1])
        await service.stub.ForgetBlocks(executor_pb2.ForgetBlocksRequest(blocks=[some]))
        loaded = await (await service.opened()).load([blocks([5, 6, 7], HASHES)])
        assert list(loaded.missing) == [1]
        await service.stub.ForgetBlocks(executor_pb2.ForgetBlocksRequest())
        stream = await service.opened()
        assert list((await stream.load([blocks([5, 6, 7], HASHES)])).missing) == [0, 1, 2]
        assert await stream.generate(PROMPT, [5, 6, 7, 1, 17], 10) == tokens
    assert not files(on_disk)


def files(config: ExecutorConfig) -> list[Path]:
    """Returns the files of blocks."""
    return list(Path(config.kv_offloading_dir or "").rglob("*-0"))


def torn(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flipped(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[1000] ^= 4
    path.write_bytes(content)


def foreign(path: Path) -> None:
    path.write_bytes(b"something else" * 1000)


def empty(path: Path) -> None:
    path.write_bytes(b"")


def of_another_block(path: Path) -> None:
    other = next(one for one in path.parents[1].rglob("*-0") if one != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [torn, flipped, foreign, empty, of_another_block])
async def test_a_damaged_block_is_computed(
    sockets: list[str],
    on_disk: ExecutorConfig,
    model: Model,
    tokens: list[int],
    damage: Callable[[Path], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with serving(sockets[0], on_disk, model) as service:
        await saved(service, tokens)
    (path,) = (one for one in files(on_disk) if one.name == f"{HASHES[1].hex()}-0")
    damage(path)
    before = counted("kv_tier_missed_blocks", cause="damaged")
    async with serving(sockets[0], on_disk, model) as service:
        stream = await service.opened()
        await found(service, 3 if damage in (flipped, of_another_block) else 2)
        loaded = await stream.load([blocks([5, 6, 7], HASHES)])
        assert list(loaded.missing) == [1]
        assert counted("kv_tier_missed_blocks", cause="damaged") == before + 1
        assert await stream.generate(PROMPT, [5, 8, 10, 1, 17], 10, computed=8) == tokens
        assert not path.exists()
    assert len([line for line in caplog.messages if "damaged" in line]) == 1


@pytest.mark.parametrize("number", [28, 30, 5], ids=["full", "read_only", "unwritable"])
async def test_a_disk_that_takes_nothing_costs_nothing_else(
    sockets: list[str],
    on_disk: ExecutorConfig,
    model: Model,
    tokens: list[int],
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    request: pytest.FixtureRequest,
) -> None:
    cause = "disk_" + request.node.callspec.id

    def failing(*arguments: object) -> None:
        raise OSError(number, "cannot write")

    monkeypatch.setattr("pagewire.services.executor.tiers.block_files._write", failing)
    before = counted("kv_offload_stores_skipped", cause=cause)
    async with serving(sockets[0], on_disk, model) as service:
        stream = await service.opened()
        for _ in range(3):
            assert await stream.generate(PROMPT, [4, 2, 9, 1, 17], 10, saves=[blocks([4, 2, 9], HASHES)]) == tokens
        await asyncio.to_thread(service.tiers.saves.wait, None, 10)
        async with asyncio.timeout(10):
            while counted("kv_offload_stores_skipped", cause=cause) == before:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        assert counted("kv_offload_stores_skipped", cause=cause) == before + 1, "then it pauses"
    assert len([line for line in caplog.messages if "cannot be written" in line]) == 1


async def test_a_slow_disk_delays_no_step_and_a_load_for_a_bounded_time(
    sockets: list[str], on_disk: ExecutorConfig, model: Model, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on = threading.Event()
    async with serving(sockets[0], on_disk, model) as service:
        await saved(service, tokens)
        monkeypatch.setattr("pagewire.services.executor.tiers.served.LOAD_S", 0.1)
        monkeypatch.setattr(disk_module, "_SLOW_READ_S", 0.05)
        read = service.tiers.disk.directory.read if service.tiers.disk else None
        assert read is not None

        def slow(*arguments: object) -> int:
            assert goes_on.wait(20)
            return read(*arguments)  # type: ignore[arg-type]

        monkeypatch.setattr(service.tiers.disk.directory, "read", slow)  # type: ignore[union-attr]
        stream = await service.opened()
        loaded = await stream.load([blocks([5, 6, 7], HASHES)])
        assert list(loaded.missing) == [0, 1, 2] and loaded.seconds < 5
        again = await stream.load([blocks([5, 6, 7], HASHES)], load_id=2)
        assert list(again.missing) == [0, 1, 2], "others do not wait for the disk as well"
        assert await stream.generate(PROMPT, [5, 6, 7, 1, 17], 10) == tokens
        goes_on.set()
        monkeypatch.undo()
        assert await stream.generate(PROMPT, [5, 6, 7, 1, 17], 10, computed=24) == tokens, "nothing came late"


async def test_a_load_ends_with_its_stream(
    sockets: list[str], in_memory: ExecutorConfig, model: Model, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert loads_module.LOAD_S == 10.0
    async with serving(sockets[0], in_memory, model) as service:
        await saved(service, tokens)
        stream = await service.opened()
        await stream.step(loads=[executor_pb2.KVLoad(load_id=1, blocks=[blocks([5, 6, 7], HASHES)])])
        stream = await service.opened()
        assert await stream.generate(PROMPT, [5, 6, 7, 1, 17], 10) == tokens
        assert not service.tiers.loads.running
        await check_loading(await service.opened(), tokens, HOST)


def test_another_longest_request_is_another_format(plain: ExecutorConfig, model: Model) -> None:
    """Keys are rotated by it where positions are scaled: in LongRoPE, and in dynamic NTK scaling."""
    longest = (LIMITS.max_model_len, LIMITS.max_model_len // 2, LIMITS.max_model_len)
    digests = [model_digest(plain, assemble(model, replace(LIMITS, max_model_len=n), 4, CPU)) for n in longest]
    assert digests[0] == digests[2] != digests[1]


async def test_other_weights_have_other_blocks(sockets: list[str], tmp_path: Path) -> None:
    save_tiny(tmp_path / "a", "Llama", vocab_size=VOCAB_SIZE, max_position_embeddings=96)
    other = executor_pb2.Weights(model=str(save_other(tmp_path / "a", tmp_path / "b")), number=1)
    config = ExecutorConfig(model=str(tmp_path / "a"), dtype="float32", kv_offloading_dir=str(tmp_path / "kv"))
    model = load(tmp_path / "a")
    tokens = alone(model, PROMPT, 10)
    digest = content_digest(tmp_path / "a")
    async with serving(sockets[0], config, model, digest) as service:
        formats = [(await service.describe()).kv_format]
        await saved(service, tokens)
        first = executor_pb2.Weights(model=str(tmp_path / "a"), number=2)
        for wanted in (other, first):
            stream = await service.opened()
            loaded = await service.stub.LoadWeights(executor_pb2.LoadWeightsRequest(weights=wanted))
            await service.stub.InstallWeights(executor_pb2.InstallWeightsRequest(weights=loaded.weights))
            with pytest.raises(EOFError):
                await stream.result()
            stream = await service.opened()
            formats.append((await service.describe()).kv_format)
            if wanted is other:
                assert list((await stream.load([blocks([5, 6, 7], HASHES)])).missing) == [0, 1, 2]
                assert await stream.generate(PROMPT, [5, 6, 7, 1, 17], 10) != tokens
            else:
                assert not (await stream.load([blocks([5, 6, 7], HASHES)])).missing
                assert await stream.generate(PROMPT, [5, 6, 7, 1, 17], 10, computed=24) == tokens
    assert formats[0] == formats[2] != formats[1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (executor_pb2.BlockSet(group=1), "0 blocks of group 1"),
        (executor_pb2.BlockSet(ids=[1], hashes=b"x"), "1 blocks of group 0 have 1 bytes of hashes"),
        (executor_pb2.BlockSet(ids=[10_000], hashes=b"x" * 32), "outside of its 24"),
    ],
    ids=["group", "hashes", "id"],
)
async def test_blocks_that_do_not_exist_end_the_stream(
    sockets: list[str],
    in_memory: ExecutorConfig,
    model: Model,
    tokens: list[int],
    wrong: executor_pb2.BlockSet,
    message: str,
) -> None:
    async with serving(sockets[0], in_memory, model) as service:
        for step in ({"saves": [wrong]}, {"loads": [executor_pb2.KVLoad(load_id=1, blocks=[wrong])]}):
            stream = await service.opened()
            await stream.step(**step)
            with pytest.raises(grpc.aio.AioRpcError, match=message):
                await stream.result()


def test_a_directory_that_cannot_hold_blocks_is_refused(model: Model, plain: ExecutorConfig, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "file", tmp_path / "file" / "kv", tmp_path / "loop"):
        with pytest.raises(StartupError, match=f"--kv-offloading-dir: {path} is no directory"):
            with_tiers(replace(plain, kv_offloading_dir=str(path)), assemble(model, LIMITS, NUM_BLOCKS, CPU))
    small = replace(plain, kv_offloading_dir=str(tmp_path), kv_offloading_dir_size=7 * BLOCK_BYTES / 1024**3)
    with pytest.raises(StartupError, match=r"--kv-offloading-dir-size .* give at least 0\.0001, for 8 blocks"):
        with_tiers(small, assemble(model, LIMITS, NUM_BLOCKS, CPU))
