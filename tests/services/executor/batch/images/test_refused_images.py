"""Images that the model cannot read: their request is refused by name, and others are not affected."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagewire.services.executor.batch.images import image_inputs
from pagewire.services.executor.runner.model_runner import ModelRunner
from pagewire.services.executor.service import convert
from pagewire.services.executor.start.assembly import assemble
from pagewire.services.executor.step.failures import Cause, Failure
from pagewire.v1 import common_pb2, executor_pb2
from tests.services.executor.helpers.stepping import CPU, LIMITS, make_driver, tiny_llama
from tests.services.executor.models.tiny import load
from tests.services.executor.models.tiny_vision import (
    IMAGE_TOKEN,
    ImagePrompt,
    idefics3_config,
    llava_config,
    qwen2_5_vl_config,
    save_tiny_vision,
    tensors,
)
from tests.sweep import examples

CONFIGS = {"llava": llava_config(), "idefics3": idefics3_config(), "qwen2_5_vl": qwen2_5_vl_config()}


@dataclass(repr=False)
class Served:
    config: Any
    runner: ModelRunner
    good: ImagePrompt
    token_id: int  # that follows it

    def refusal(self, token_ids: list[int], *images: common_pb2.PromptImage, num_computed_tokens: int = 0) -> str:
        """Returns the outcome of a request from a scheduler, beside a good request, which gets its token."""
        good = self.good
        step = convert.step_from_proto(
            executor_pb2.StepRequest(
                step_id=1,
                new_requests=[
                    new_request(1, token_ids, images, num_computed_tokens),
                    new_request(2, good.token_ids, [as_message(image) for image in good.images]),
                ],
                request_ids=[1, 2],
                num_scheduled_tokens=[len(token_ids) - num_computed_tokens, len(good.token_ids)],
                num_new_blocks=[0, 0],
            )
        )
        self.runner.reset()
        output = self.runner.execute(step)
        result = convert.result_to_proto(output, output.wait(), 0, 0, None)
        assert result.token_ids[1] == self.token_id
        assert 2 not in result.errors
        assert result.errors[1].code in (0, 3)
        return result.errors[1].message


@pytest.fixture(scope="module", params=CONFIGS)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
    path, config = tmp_path_factory.mktemp(request.param), CONFIGS[request.param]
    reference = save_tiny_vision(path, config)
    good = ImagePrompt(config, [5, 6], tensors(config, 1), [7])
    runner = assemble(load(path), LIMITS, 64, CPU, image_cache_bytes=1 << 20)
    return Served(config, runner, good, good.expected(reference, 1)[0])


def new_request(
    request_id: int, token_ids: list[int], images: Any, num_computed_tokens: int = 0
) -> executor_pb2.NewRequest:
    return executor_pb2.NewRequest(
        request_id=request_id,
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        num_computed_tokens=num_computed_tokens,
        blocks=[executor_pb2.Blocks(ids=range(request_id * 12, request_id * 12 + 12))],
        sampling_params=common_pb2.SamplingParams(temperature=0),
        images=images,
    )


def tensor(array: np.ndarray) -> common_pb2.Tensor:
    return common_pb2.Tensor(data=array.tobytes(), shape=array.shape, dtype=str(array.dtype))


def as_message(image: Any) -> common_pb2.PromptImage:
    sent = {name: tensor(array) for name, array in image.tensors.items()}
    return common_pb2.PromptImage(hash=image.hash, offset=image.offset, num_tokens=image.num_tokens, tensors=sent)


def changed(image: common_pb2.PromptImage, **changes: common_pb2.Tensor | None) -> common_pb2.PromptImage:
    kept = {name: value for name, value in (dict(image.tensors) | changes).items() if value is not None}
    return common_pb2.PromptImage(hash=image.hash, offset=image.offset, num_tokens=image.num_tokens, tensors=kept)


def test_wrong_tensors_are_named(served: Served) -> None:
    prompt = ImagePrompt(served.config, [5], tensors(served.config, 2), [6])
    token_ids, image = prompt.token_ids, as_message(prompt.images[0])
    pixels = prompt.images[0].tensors["pixel_values"]
    floats, short = tensor(pixels), tensor(pixels)
    short.data = short.data[:-1]
    negative = common_pb2.Tensor(data=b"", shape=[-1, 3], dtype="float32")
    cases = {
        rf"images\[0\]: 'pixel_values' has {pixels.nbytes - 1} bytes; .* takes {pixels.nbytes}": changed(
            image, pixel_values=short
        ),
        r"'pixel_values' has the shape \[-1, 3\]": changed(image, pixel_values=negative),
        r"'pixel_values' has the shape \[0, 1099511627776\]": changed(
            image, pixel_values=common_pb2.Tensor(shape=[0, 1 << 40], dtype="float32")
        ),
        "'pixel_values' has dtype 'object'": changed(image, pixel_values=common_pb2.Tensor(dtype="object")),
        "pixel_values is int64; expected float32": changed(image, pixel_values=tensor(pixels.astype(np.int64))),
        r"pixel_values has the shape \[7\]; expected": changed(image, pixel_values=tensor(np.zeros(7, np.float32))),
        r"pixel_values has the shape \[\]; expected": changed(image, pixel_values=tensor(np.zeros((), np.float32))),
        "'other' is not among the tensors of an image, pixel_values": changed(image, other=floats),
        "there is no pixel_values, and its tokens": changed(image, pixel_values=None),
    }
    for message, wrong in cases.items():
        assert_refused(served, token_ids, wrong, message)
    fewer = common_pb2.PromptImage(offset=1, num_tokens=image.num_tokens - 1, tensors=image.tensors)
    assert_refused(served, token_ids, fewer, f"{image.num_tokens} placeholder tokens .id 90.; the prompt has")
    late = common_pb2.PromptImage(offset=5, num_tokens=image.num_tokens, tensors=image.tensors)
    assert_refused(served, token_ids, late, f"at tokens 5 to {5 + image.num_tokens}; images follow each other")
    assert served.refusal(token_ids, image) == ""


def assert_refused(served: Served, token_ids: list[int], image: common_pb2.PromptImage, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        raise ValueError(served.refusal(token_ids, image))


@pytest.mark.parametrize("served", ["qwen2_5_vl"], indirect=True)
def test_wrong_grids_are_named(served: Served) -> None:
    prompt = ImagePrompt(served.config, [5], tensors(served.config, 2), [6])
    token_ids, image = prompt.token_ids, as_message(prompt.images[0])
    for grid, message in {
        (1, 6, 6): r"expected \[36, 96\], the patches of a 6 x 6 grid",
        (1, 3, 8): "both multiples of 2",
        (2, 4, 3): r"expected \[\[1, height, width\]\]",
        (1, -4, -6): "both multiples",
        (1, 1 << 62, 1 << 62): "the patches of a",
        (24,): "image_grid_thw is .24.",
    }.items():
        wrong = changed(image, image_grid_thw=tensor(np.array(grid if len(grid) == 1 else [grid])))
        assert_refused(served, token_ids, wrong, message)
    assert_refused(served, token_ids, changed(image, image_grid_thw=None), "there is no image_grid_thw")
    # A grid alone, as it comes when the image's tokens are computed, is not believed either.
    alone = changed(image, pixel_values=None, image_grid_thw=tensor(np.array([[1, 1 << 30, 1 << 30]])))
    message = served.refusal(token_ids, alone, num_computed_tokens=7)
    assert "the prompt has 6 at its place" in message
    # Something between the placeholders has no place in the grid.
    split = [*token_ids[:3], 8, *token_ids[3:]]
    wider = changed(image)
    wider.num_tokens += 1
    assert_refused(served, split, wider, "there are other tokens between the placeholder tokens")


@pytest.mark.parametrize("served", ["idefics3"], indirect=True)
def test_a_tile_of_zeros_is_a_tile(served: Served) -> None:
    """Tests token 0, which transformers takes for padding."""
    black = {"pixel_values": np.zeros((1, 2, 3, 28, 28), np.float32)}
    prompt = ImagePrompt(served.config, [5], black, [6])
    assert served.refusal(prompt.token_ids, as_message(prompt.images[0])) == ""


@pytest.mark.parametrize("served", ["qwen2_5_vl"], indirect=True)
def test_an_image_that_memory_was_not_set_aside_for_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_inputs, "MAX_IMAGE_BYTES", 10_000)
    prompt = ImagePrompt(served.config, [5], tensors(served.config, 2, (6, 6)), [6])
    message = r"images\[0\]: its pixel_values have 13824 bytes; 10000 are possible"
    assert_refused(served, prompt.token_ids, as_message(prompt.images[0]), message)


@pytest.mark.parametrize("served", ["qwen2_5_vl"], indirect=True)
def test_another_image_of_the_same_hash_is_encoded(served: Served) -> None:
    """The hash is its sender's word: embeddings that are too few or too many are never found by it."""
    for size in ((4, 6), (2, 4), (4, 6)):
        prompt = ImagePrompt(served.config, [5], tensors(served.config, 2, size), [6])
        same = as_message(replace(prompt.images[0], hash=b"\x01" * 32))
        assert served.refusal(prompt.token_ids, same) == ""


def test_a_text_model_takes_no_images(tmp_path: Path) -> None:
    prompt = ImagePrompt(CONFIGS["llava"], [5], tensors(CONFIGS["llava"], 1), [6])
    driver = make_driver(tiny_llama(tmp_path))
    driver.add(0, prompt.token_ids, images=prompt.images)
    output = driver.launch({0: len(prompt.token_ids)})
    assert output.failures == {
        0: Failure(Cause.IMAGE, "the request has images, which LlamaForCausalLM does not read; leave them out")
    }


_SIZES = st.one_of(st.integers(-1, 4), st.sampled_from([6, 14, 24, 28, 96, 1 << 40]))


@st.composite
def any_tensor(draw: st.DrawFn) -> common_pb2.Tensor:
    shape = draw(st.lists(_SIZES, max_size=5))
    dtype = draw(st.sampled_from(["float32", "int64"]))
    num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
    data = bytes(num_bytes if 0 <= num_bytes < 1 << 20 else 8)
    if dtype == "int64":  # a grid, where there are three
        data = np.resize(draw(st.lists(_SIZES, min_size=3, max_size=3)), len(data) // 8).tobytes()
    return common_pb2.Tensor(data=data, shape=shape, dtype=dtype)


@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_no_image_ends_anything_but_its_request(served: Served, data: st.DataObject) -> None:
    image = tensors(served.config, 2)
    token_ids = ImagePrompt(served.config, [5], image, [6]).token_ids
    names = st.sampled_from([*image, "image_grid_thw", "image_sizes"])
    sent: Mapping[str, common_pb2.Tensor] = {name: tensor(array) for name, array in image.items()}
    wrong = data.draw(st.dictionaries(names, any_tensor(), max_size=2))
    offset, num_tokens = data.draw(st.integers(-1, 12)), data.draw(st.integers(-1, 12))
    token_ids = data.draw(st.permutations(token_ids))
    served.refusal(
        token_ids,
        common_pb2.PromptImage(hash=b"\x02" * 32, offset=offset, num_tokens=num_tokens, tensors={**sent, **wrong}),
        num_computed_tokens=data.draw(st.sampled_from([0, 4])),
    )
    assert IMAGE_TOKEN in token_ids
