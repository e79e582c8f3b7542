"""The leader samples; the other ranks have the same tokens in their rows."""

from pathlib import Path

import pytest

from pagewire.services.executor.graphs.recorded_steps import RecordedSteps
from pagewire.services.executor.parallel.group import LEADER, Group
from pagewire.services.executor.parallel.shared_memory import SharedMemory
from pagewire.services.executor.parallel.tokens import tokens_of
from pagewire.services.executor.start.assembly import assemble
from tests.kernels.cpu.test_collectives import on_ranks
from tests.services.executor.helpers.stepping import CPU, GREEDY, LIMITS, Driver, prompt, sampling_params, tiny_llama

SIZE, NUM_BLOCKS, NUM_TOKENS = 3, 40, 6
WANTED = [
    GREEDY,
    sampling_params(temperature=1.0, seed=5),
    sampling_params(temperature=0, repetition_penalty=1.7),  # an extra, which only the leader knows of
    sampling_params(temperature=0.7, seed=9, logprobs=2),
]


def generate(path: Path, group: Group, recorded: bool) -> list[list[int]]:
    """Runs requests without extras first, alone; then all, one with its prompt in two steps; a row is used again."""
    graphs = RecordedSteps(LIMITS.max_num_seqs, LIMITS.max_num_batched_tokens) if recorded else None
    tokens = tokens_of(group, LIMITS.max_num_seqs, CPU)
    driver = Driver(assemble(tiny_llama(path), LIMITS, NUM_BLOCKS, CPU, graphs=graphs, tokens=tokens), NUM_BLOCKS)
    params = WANTED if group.rank == LEADER else [GREEDY] * len(WANTED)
    results = []
    for round in range(2):
        ids = [10 * round + index for index in range(len(params))]
        for request_id, sampling in zip(ids, params, strict=True):
            driver.add(request_id, prompt(9, seed=request_id), sampling)
        first, *others = ids
        driver.step({first: 4, ids[1]: 9})
        driver.step({first: 5, **{request_id: 9 if request_id > ids[1] else 1 for request_id in others}})
        for _ in range(NUM_TOKENS):
            driver.step(dict.fromkeys(ids, 1))
        results += [driver.tokens[request_id] for request_id in ids]
        for request_id in ids:
            driver.finish(request_id)
    return results


@pytest.mark.parametrize("recorded", [False, True])
def test_followers_have_the_leaders_tokens(tmp_path: Path, recorded: bool) -> None:
    memory = SharedMemory([SIZE])
    expected = generate(tmp_path, Group(), recorded)
    groups = [Group(rank, SIZE, tensor=memory.channel(0, rank)) for rank in range(SIZE)]
    paths = [tmp_path / str(rank) for rank in range(SIZE)]
    for rank, tokens in enumerate(on_ranks(SIZE, lambda rank: generate(paths[rank], groups[rank], recorded))):
        assert tokens == expected, f"rank {rank}"
