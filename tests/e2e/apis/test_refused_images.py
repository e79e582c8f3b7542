"""Bad images over the token-level stream, with the real scheduler and the real executor."""

import asyncio
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from pagewire.services.executor.start.assembly import assemble
from pagewire.v1 import common_pb2, scheduler_pb2
from pagewire.v1.scheduler_link_pb2 import SchedulerLinkServiceConnectRequest, TokenSubmission
from tests.e2e.stack.test_scheduler_and_executor import scheduler
from tests.services.executor.batch.images.test_refused_images import as_message, changed, tensor
from tests.services.executor.helpers.stepping import CPU, LIMITS
from tests.services.executor.models.tiny import load
from tests.services.executor.models.tiny_vision import ImagePrompt, qwen2_5_vl_config, save_tiny_vision, tensors
from tests.services.executor.service.test_servicer import INFO, serving
from tests.services.scheduler.service_line import Collected

NUM_TOKENS = 20


async def test_a_bad_image_ends_its_own_request_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = qwen2_5_vl_config()
    reference = save_tiny_vision(tmp_path, config)
    runner = assemble(load(tmp_path), LIMITS, 64, CPU, image_cache_bytes=1 << 20)
    info = dataclasses.replace(INFO, vocab_size=120, kv_groups=runner.kv_groups)
    image = tensors(config, 2)
    # One long text first: the image is in its second and third blocks.
    prompt = ImagePrompt(config, [*range(10, 20)], image, [6] * 20)
    good = as_message(dataclasses.replace(prompt.images[0], hash=b"\x01" * 32))
    doubles = tensor(np.zeros((24, 96), np.float64))
    bad = [
        changed(good, pixel_values=tensor(np.zeros((24, 95), np.float32))),
        changed(good, pixel_values=doubles),
        changed(good, pixel_values=common_pb2.Tensor(data=b"x", shape=[24, 96], dtype="float32")),
        changed(good, image_grid_thw=tensor(np.array([[1, 6, 6]]))),
        good,  # in the prompt there are fewer places than it has embeddings
    ]
    prompts = [prompt.token_ids] * 4 + [prompt.token_ids[:15] + [6] * 21]
    expected = prompt.expected(reference, NUM_TOKENS)

    def request(number: int, token_ids: list[int], sent: common_pb2.PromptImage) -> TokenSubmission:
        params = common_pb2.SamplingParams(temperature=0, ignore_eos=True, max_tokens=NUM_TOKENS)
        request = scheduler_pb2.TokenRequest(prompt_token_ids=token_ids, sampling_params=params)
        return TokenSubmission(request_id=number, request=request, images=[sent])

    address, collected = f"unix:{tmp_path}/e.sock", Collected()
    async with serving(address, lambda: (runner, info)), scheduler(tmp_path, "s", address) as stub:
        call = stub.Connect()
        collected.add(await call.read())
        # The bad ones, then good ones that have the same hash and begin with the same tokens.
        requests = [request(10 + i, token_ids, bad[i]) for i, token_ids in enumerate(prompts)]
        requests += [request(20 + i, prompt.token_ids, good) for i in range(5)]
        await call.write(SchedulerLinkServiceConnectRequest(requests=requests))
        await collected.read_until_finished(call, *range(10, 15), *range(20, 25))
        # And when all is quiet: nothing that was computed of a bad one is found.
        for number, token_ids in ((15, prompts[4]), (25, prompt.token_ids), (26, prompt.token_ids)):
            await call.write(SchedulerLinkServiceConnectRequest(requests=[request(number, token_ids, good)]))
            await collected.read_until_finished(call, number)
        call.cancel()
        await asyncio.sleep(0)
    for number in range(20, 27):
        assert collected.token_ids[number] == expected, number
    assert collected.errors.keys() == set(range(10, 16))
    assert {error.code for error in collected.errors.values()} == {3}  # INVALID_ARGUMENT
    assert "has the shape [24, 95]; expected [24, 96]" in collected.errors[10].message
    assert "stands for 6 placeholder tokens (id 90); the prompt has 5" in collected.errors[15].message
    assert all(collected.token_ids.get(number, []) == [] for number in collected.errors)
    assert "lost the executor" not in caplog.text
