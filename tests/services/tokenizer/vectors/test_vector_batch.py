"""Batches of vectors, with all answers that the scheduler may give."""

import asyncio
from collections.abc import Iterator
from typing import cast

import pytest

from pagewire.services.tokenizer.scheduler_link import SchedulerLink, SubmittedRequest
from pagewire.services.tokenizer.vectors.vector_batch import VectorBatch
from pagewire.v1.common_pb2 import Vector
from pagewire.v1.scheduler_link_pb2 import TokenSubmission
from pagewire.v1.scheduler_pb2 import TokenRequest


class Link:
    """Answers at once with (the prompt's token, the number of the weights), as the stream to the scheduler would."""

    def __init__(self, versions: Iterator[int]) -> None:
        self.versions = versions
        self.num_requests = 0

    def submit(self, request: SubmittedRequest) -> None:
        self.num_requests += 1
        asyncio.get_running_loop().call_soon(self._answer, request)

    def _answer(self, request: SubmittedRequest) -> None:
        version = next(self.versions)
        request.message.weights_version = f"v{version}"
        request.listener.on_weights(f"v{version}")
        request.listener.on_vector(Vector(values=[request.message.request.prompt_token_ids[0], version]))


@pytest.mark.parametrize(
    ("versions", "num_requests"),
    [([1, 1, 1, 1], 4), ([1, 1, 2, 2, 2, 2], 6), ([2, 1, 2, 1, 2, 2, 2, 2], 8), ([1, 2, 2, 2, 3, 3, 3, 3], 8)],
    ids=["none", "once", "by turns", "twice"],
)
async def test_all_vectors_are_of_the_same_weights(versions: list[int], num_requests: int) -> None:
    link = Link(iter(versions))
    messages = [TokenSubmission(request=TokenRequest(prompt_token_ids=[token])) for token in range(4)]
    vectors = await VectorBatch(cast(SchedulerLink, link), messages).run()
    assert [vector.values[0] for vector in vectors] == [0, 1, 2, 3]
    assert len({vector.values[1] for vector in vectors}) == 1
    assert link.num_requests == num_requests
