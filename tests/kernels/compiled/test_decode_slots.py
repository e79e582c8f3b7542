"""The work of decode attention, counted by compiling it for GPUs that need not be there, and by a simulator."""

import itertools
import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from benchmarks.kernels import aot
from benchmarks.kernels.compiler import ARCHITECTURES, Specialization, _compile, _dump, compile_for
from benchmarks.kernels.forms.specializations import attention_form
from benchmarks.kernels.grids import forms_of
from benchmarks.kernels.main_loop import count, main_loop
from benchmarks.kernels.slots import DEVICES, HEADS, SHAPES, Decode, decode
from pagewire.kernels import tuning
from pagewire.kernels.triton.attention import decode_attention
from pagewire.kernels.triton.attention.decode_attention import PREFETCHED

Key = tuple[str, tuple[int, int, int], str]  # device, heads, shape

SHAPE = {"kv_bytes": 2, "block_size": 16, "batch": 64, "query_len": 1}
# Machine instructions before the first load of keys; the plan, the block ids and the query are loaded among them. Half
# of them are addresses of the loads behind it. On sm_90 those that no earlier kernel decides come before the wait, with
# prefetches of long splits and of short ones, of which a program executes either.
MOST_INSTRUCTIONS = 75
MOST_BEFORE_THE_WAIT, MOST_BEHIND_IT = 134, 62


def before_the_first_keys(capability: int, heads: tuple[int, int, int]) -> list[str]:
    num_heads, num_kv_heads, head_dim = heads
    shape = SHAPE | {"head_dim": head_dim, "group": num_heads // num_kv_heads}
    form = attention_form("decode_attention", capability, shape)
    listing = _dump("-sass", _compile(form, capability).asm["cubin"])
    instructions = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(.*?) ;", listing, re.MULTILINE)
    first = next(i for i, text in enumerate(instructions) if "LDGSTS" in text)
    before = [text for text in instructions[:first] if not text.startswith("@!PT")]  # the assembler's, never executed
    assert not [text for text in before if "BAR." in text or "CALL" in text], "a barrier, or a division of 64 bits"
    return before


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_little_comes_before_the_first_keys(heads: tuple[int, int, int]) -> None:
    assert len(before_the_first_keys(80, heads)) <= MOST_INSTRUCTIONS


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_keys_are_asked_for_while_the_kernel_before_ends(heads: tuple[int, int, int]) -> None:
    before = before_the_first_keys(90, heads)
    wait = before.index("ACQBULK")
    prefetches = [i for i, text in enumerate(before) if "CCTL.E.PF2" in text]
    loads = [i for i, text in enumerate(before) if "LDG." in text]
    # Keys and values: a tile of a long split, or all tiles of a short one, each thread a line of one or two tiles.
    assert len(prefetches) == 2 + 2 * PREFETCHED.value * heads[2] // 128
    assert prefetches[-1] < wait <= MOST_BEFORE_THE_WAIT
    assert len(before) - wait - 1 <= MOST_BEHIND_IT
    early = [before[i] for i in loads if i < wait]
    assert early and all("STRONG.GPU" in text for text in early), "the L1 cache may hold what was there before"


@pytest.mark.parametrize(("block_n", "num_warps", "barriers", "programs"), [(64, 4, 9, 3), (32, 1, 2, 6)])
def test_one_warp_hardly_waits_for_others(block_n: int, num_warps: int, barriers: int, programs: int) -> None:
    """Counts, for Llama's heads, barriers of a tile of keys and programs of a multiprocessor."""
    config = {"block_n": block_n, "num_warps": num_warps, "num_stages": 3}
    bf16 = torch.bfloat16
    form = Specialization(*decode_attention.specialization(128, 4, 16, bf16, bf16, config, capability=90))
    assert count(main_loop(form, 90), "BAR.") <= barriers
    assert compile_for(form, 90).programs_per_sm(ARCHITECTURES[90]) == programs
    tuned = forms_of("decode_attention", SHAPE | {"head_dim": 128}, config)
    assert any(config.items() <= other.items() for other in tuned[1:]), "it is not tried"


@pytest.fixture(scope="module")
def decodes() -> dict[Key, Decode]:
    return {
        (name, heads, shape): decode(heads, capability, multiprocessors, seq_lens)
        for name, capability, multiprocessors in DEVICES
        for heads in HEADS
        for shape, seq_lens in SHAPES.items()
    }


# Requests of different lengths end at different times, and 256 KB for each slot do not divide well.
LESS_EFFICIENT = {("A100", (14, 2, 64), "64 x 1024"): 0.79, ("H100", (14, 2, 64), "256 x 128-4096"): 0.88}


@pytest.mark.parametrize("shape", ["16 x 4096", "64 x 1024", "64 x 4096", "256 x 1024", "256 x 128-4096"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("device", ["H100", "A100"])  # an H200 has as many slots as an H100
def test_large_batches_fill_the_slots(
    decodes: dict[Key, Decode], device: str, heads: tuple[int, int, int], shape: str
) -> None:
    assert decodes[device, heads, shape].schedule.efficiency >= LESS_EFFICIENT.get((device, heads, shape), 0.9)


def test_programs_are_neither_tiny_nor_too_many_to_merge(decodes: dict[Key, Decode]) -> None:
    for (_, _, shape), found in decodes.items():
        assert found.schedule.splits <= 64
        assert found.schedule.shortest >= (256 if shape == "16 x 4096" else 128)


def test_a_lone_request_is_read_before_the_wait_and_merged_by_few_loads(decodes: dict[Key, Decode]) -> None:
    """Counts with few KV heads, too, of which each is merged by one program."""
    for heads, waits in zip(HEADS, (2, 3, 2), strict=True):
        found = decodes["H200", heads, "1 x 8192"]
        assert (found.early, found.merge_waits) == (1.0, waits)
    assert all(found.merge_waits <= 4 for found in decodes.values())


def test_tables_count_on_as_many_programs_as_fit(decodes: dict[Key, Decode]) -> None:
    for (_, capability, multiprocessors), heads in itertools.product(DEVICES, HEADS):
        shape = SHAPE | {"head_dim": heads[2], "group": heads[0] // heads[1], "context": 4096}
        planned = tuning.lookup("decode_attention", capability, **shape)["programs_per_sm"] * multiprocessors
        name = next(name for name, other, count in DEVICES if (other, count) == (capability, multiprocessors))
        assert planned == decodes[name, heads, "64 x 4096"].schedule.slots


@pytest.mark.parametrize("capability", ARCHITECTURES)
def test_no_table_counts_on_more_programs_than_fit(capability: int) -> None:
    """Waves of so many programs would be two."""
    record, entries = aot.recorded(), tuning.load_table("decode_attention", capability)
    forms = [(entry, attention_form("decode_attention", capability, entry.shape)) for entry in entries]
    known = [(entry, used) for entry, form in forms if (used := record.get((capability, form.name, form.variant)))]
    assert len(known) > 20
    for entry, used in known:
        fits = used.programs_per_sm(ARCHITECTURES[capability])
        assert entry.config["programs_per_sm"] <= fits, dict(entry.shape)
