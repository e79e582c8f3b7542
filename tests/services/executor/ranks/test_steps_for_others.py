"""Steps as the leader sends them to the other ranks."""

import numpy as np

from pagewire.services.executor.ranks.step_message import step_to_proto
from pagewire.services.executor.service import convert
from pagewire.services.executor.step.step import Blocks, Image, NewRequest, Step
from pagewire.v1.common_pb2 import SamplingParams, TokenSequence


def test_a_step_for_other_ranks_says_what_they_need():
    """All but how tokens are sampled; and images as they were."""
    image = Image(b"hash", 1, 2, {"pixels": np.arange(6, dtype=np.float32).reshape(2, 3)})
    params = SamplingParams(temperature=0.5, seed=3, prompt_logprobs=2, bad_words=[TokenSequence(token_ids=[4])])
    request = NewRequest(
        request_id=7,
        token_ids=np.array([5, 9, 9, 6], dtype=np.int32),
        num_prompt_tokens=3,
        num_computed_tokens=1,
        blocks=[Blocks(2, np.array([8, 1], dtype=np.int32))],
        sampling=params,
        second_text_start=2,
        images=[image],
    )
    step = Step(
        step_id=3,
        request_ids=[4, 7],
        num_scheduled_tokens=np.array([3, 3]),
        num_new_blocks=np.array([[1], [0]]),
        new_block_ids=np.array([6], dtype=np.int32),
        finished_request_ids=[2],
        new_requests=[request],
        num_draft_tokens=np.array([2, 0]),
    )
    received = convert.step_from_proto(step_to_proto(step))
    (new,) = received.new_requests
    np.testing.assert_equal(vars(received) | {"new_requests": []}, vars(step) | {"new_requests": []})
    assert new.sampling.temperature == 0 and new.sampling.prompt_logprobs == 2 and not new.sampling.bad_words
    same = {"sampling": None, "matcher": None}
    np.testing.assert_equal(
        vars(new) | same | {"blocks": [vars(b) for b in new.blocks], "images": [vars(i) for i in new.images]},
        vars(request) | same | {"blocks": [vars(b) for b in request.blocks], "images": [vars(image)]},
    )
