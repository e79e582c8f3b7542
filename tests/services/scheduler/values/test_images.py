"""Images of prompts: their effect on blocks, steps and limits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagewire.errors import InvalidRequest
from pagewire.services.scheduler.memory.kv_cache import KVCacheManager
from pagewire.services.scheduler.service import convert
from pagewire.services.scheduler.values.executor_info import KVGroup
from pagewire.services.scheduler.values.images import MAX_REQUEST_IMAGE_BYTES, MAX_STEP_IMAGE_BYTES, PromptImages
from pagewire.services.scheduler.values.request import FinishReason, Request
from pagewire.services.scheduler.values.step import ScheduledStep
from pagewire.v1 import common_pb2, scheduler_pb2
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from tests.fakes import FakeExecutor
from tests.services.scheduler.pure_line import PureLine

BLOCK_SIZE = 4


def image(name: int, offset: int, num_tokens: int, num_bytes: int = 8) -> common_pb2.PromptImage:
    tensors = {
        "pixel_values": common_pb2.Tensor(data=bytes(num_bytes), shape=[num_bytes // 4], dtype="float32"),
        "image_grid_thw": common_pb2.Tensor(data=bytes(24), shape=[1, 3], dtype="int64"),
    }
    return common_pb2.PromptImage(hash=bytes([name] * 32), offset=offset, num_tokens=num_tokens, tensors=tensors)


def hashes(num_tokens: int, *images: common_pb2.PromptImage) -> list[bytes]:
    """Returns a prompt in which every token is the placeholder."""
    request = Request(1, [7] * num_tokens, common_pb2.SamplingParams(), images=PromptImages(images, num_tokens))
    kv = KVCacheManager([KVGroup(64)], BLOCK_SIZE, True, 64)
    kv.get_computed_blocks(request)
    return list(request.blocks.hashes)


def test_blocks_with_another_image_are_other_blocks() -> None:
    plain, one = hashes(17), hashes(17, image(1, 5, 6))
    assert one == hashes(17, image(1, 5, 6))
    assert [a == b for a, b in zip(plain, one, strict=True)] == [True, False, False, False]
    assert [a == b for a, b in zip(one, hashes(17, image(2, 5, 6)), strict=True)] == [True, False, False, False]


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=4), st.data())
def test_equal_blocks_have_equal_images(layout: list[tuple[int, int]], data: st.DataObject) -> None:
    """Prompts of the same tokens share a block only if each token up to its end is the same one of the same image."""
    other = data.draw(st.permutations(layout))

    def placed(parts: list[tuple[int, int]]) -> tuple[list[common_pb2.PromptImage], list[tuple[int, int]]]:
        images: list[common_pb2.PromptImage] = []
        tokens: list[tuple[int, int]] = []
        for name, gap in parts:
            num_tokens = 2 * name - 1  # the same for the same image
            tokens += [(0, 0)] * gap
            images.append(image(name, len(tokens), num_tokens))
            tokens += [(name, index) for index in range(num_tokens)]
        return images, tokens + [(0, 0)] * (41 - len(tokens))

    (images, tokens), (other_images, other_tokens) = placed(layout), placed(other)
    pairs = zip(hashes(41, *images), hashes(41, *other_images), strict=True)
    for index, (one, two) in enumerate(pairs):
        end = (index + 1) * BLOCK_SIZE
        if one == two:
            assert tokens[:end] == other_tokens[:end]


def test_pixels_of_what_is_computed_do_not_travel() -> None:
    images = PromptImages([image(1, 0, 4), image(2, 6, 4)], 12)
    for num_computed, expected in ((0, [True, True]), (4, [False, True]), (8, [False, True]), (10, [False, False])):
        sent = images.from_token(num_computed)
        assert ["pixel_values" in part.tensors for part in sent] == expected
        assert all("image_grid_thw" in part.tensors for part in sent)  # positions behind it follow from its grid
        assert [part.hash for part in sent] == [part.hash for part in images.images]


def test_who_is_refused_leaves_nothing_that_others_find() -> None:
    """Others enter with the same prompt while the first is in flight; the blocks of its window are not released."""
    for refused_token_id in (None, 7):
        executor = FakeExecutor(
            windows={8: 64}, block_size=4, max_num_batched_tokens=8, refused_token_id=refused_token_id
        )
        line, prompt = PureLine(executor), [7, *range(8, 40)]
        images = PromptImages([image(1, 3, 6)], len(prompt))
        first = [line.add(prompt, images=images, max_tokens=30) for _ in range(2)]
        line.run()
        later = line.add(prompt, images=images, max_tokens=30)
        line.run()
        if refused_token_id is None:
            assert all(line.ends[request.request_id] == [FinishReason.LENGTH] for request in (*first, later))
            assert (later.num_cached_tokens or 0) >= 28
        else:
            assert all(line.ends[request.request_id] == [FinishReason.ERROR] for request in (*first, later))
            assert later.num_cached_tokens == 0
            assert executor.rows.keys() == set() and line.replica.kv.num_free_blocks == line.replica.kv.num_blocks


def test_a_step_takes_no_more_images_than_a_message_does() -> None:
    step = ScheduledStep(1)
    assert step.takes_more
    step.num_image_bytes = MAX_STEP_IMAGE_BYTES
    assert not step.takes_more


@pytest.mark.parametrize(
    ("images", "message"),
    [
        ([image(1, 10, 3)], "tokens 10 to 13; images follow each other within the 12 tokens"),
        ([image(1, -1, 3)], "tokens -1 to 2"),
        ([image(1, 2, 0)], "tokens 2 to 2"),
        ([image(1, 2, 3), image(2, 4, 3)], r"images\[1\] is at tokens 4 to 7"),
        ([common_pb2.PromptImage(hash=b"short", offset=0, num_tokens=1)], "hash has 5 bytes; a sha256 has 32"),
        ([image(1, 0, 3, MAX_REQUEST_IMAGE_BYTES)], "send fewer or smaller images"),
    ],
)
def test_images_that_do_not_fit_are_refused(images: list[common_pb2.PromptImage], message: str) -> None:
    request = TokenSubmission(request=scheduler_pb2.TokenRequest(prompt_token_ids=[7] * 12), images=images)
    with pytest.raises(InvalidRequest, match=message):
        convert.to_request(1, request)
