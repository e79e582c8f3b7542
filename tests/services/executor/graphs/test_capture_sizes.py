"""The decode steps that are captured; refusals are in test_startup.py."""

from pagewire.services.executor.graphs.capture_sizes import capture_sizes, draft_sizes, graph_shapes, prompt_sizes
from pagewire.services.executor.step.limits import Limits


def test_default_capture_sizes():
    assert capture_sizes(None, None, 10) == (1, 2, 4, 8, 10)
    assert capture_sizes(None, None, 1) == (1,)
    sizes = capture_sizes(None, None, 300)
    assert sizes[:6] == (1, 2, 4, 8, 16, 24) and sizes[-6:] == (240, 248, 256, 272, 288, 300)
    assert capture_sizes(None, None, 4096)[-1] == 512
    assert capture_sizes(None, 1000, 4096)[-2:] == (992, 1000)
    assert capture_sizes(None, 24, 300) == (1, 2, 4, 8, 16, 24)


def test_capture_sizes_as_asked():
    assert capture_sizes((8, 1, 8, 3), None, 8) == capture_sizes((8, 1, 8, 3), 8, 8) == (1, 3, 8)


def test_tokens_with_drafts():
    assert draft_sizes((1, 2, 4, 8), 3, 8192) == (2, 4, 8, 16, 24, 32)
    assert draft_sizes((1,), 5, 8192) == (2, 4, 6)
    sizes = draft_sizes(capture_sizes(None, None, 256), 5, 8192)
    assert (sizes[0], sizes[-1], len(sizes)) == (2, 512, 50), "larger steps keep the device busy"
    assert draft_sizes((1, 2, 4, 8), 3, 20) == (2, 4, 8, 16, 20)
    assert draft_sizes((1, 2), 0, 8192) == draft_sizes((), 3, 8192) == ()


def test_sizes_of_steps_with_prompts():
    assert prompt_sizes(None, 8192)[-1] == 2048 and prompt_sizes(4096, 8192)[-1] == 4096
    assert prompt_sizes(8192, 1000)[-1] == prompt_sizes(None, 1000)[-1] == 1000  # of a step
    assert prompt_sizes(0, 8192) == ()
    assert prompt_sizes(2, 8192) == prompt_sizes(None, 2) == ()  # two tokens may be those of two decodes
    sizes = prompt_sizes(None, 8192)
    assert sizes == tuple(sorted(sizes)) and len(sizes) < 30
    for num_tokens in range(64, 2049):
        padded = next(size for size in sizes if size >= num_tokens)
        # No more than a third is padding, or what products compute anyway.
        assert 3 * padded <= 4 * num_tokens or -(-padded // 128) == -(-num_tokens // 128)


def test_only_steps_that_there_are_have_shapes():
    def shapes(**limits: int) -> list[tuple[int, int, int]]:
        limits = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 100, "block_size": 16} | limits
        of_prompts = graph_shapes((), Limits(**limits), 0, (16, 64))
        return [(shape.num_tokens, shape.max_query_len, shape.min_query_len) for shape in of_prompts]

    assert shapes() == [(64, 64, 1), (64, 64, 17), (16, 16, 1)]
    assert shapes(max_num_seqs=1) == [(64, 64, 17), (16, 16, 1)]
    assert shapes(max_model_len=17) == [(16, 16, 1)]  # the longest query has 16 tokens
