"""Seeds that follow from the server's seed and the request."""

import pytest

from pagewire.v1.common_pb2 import SamplingParams
from pagewire.v1.inference_pb2 import GenerateRequest
from pagewire.v1.scheduler_pb2 import TokenRequest
from pagewire.wire.request_seeds import fill_seed


def seed_for(request: GenerateRequest | TokenRequest, server_seed: int | None) -> int | None:
    fill_seed(request, server_seed)
    return request.sampling_params.seed if request.sampling_params.HasField("seed") else None


def test_the_same_request_has_the_same_seed_whatever_its_name() -> None:
    texts = [GenerateRequest(text="Say", request_id=name) for name in ("a", "b")]
    tokens = [TokenRequest(prompt_token_ids=[1, 2], external_id=name) for name in ("a", "b")]
    requests: list[GenerateRequest | TokenRequest] = [*texts, *tokens]
    seeds = [seed_for(request, 42) for request in requests]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3]
    assert [request.request_id for request in texts] == ["a", "b"]
    # Stored with golden outputs of clients: it must not change with a version.
    assert seeds[0] == 1427597861385173601
    assert all(seed is not None and 0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    "other", [GenerateRequest(text="say"), GenerateRequest(text="Say", sampling_params=SamplingParams(top_k=2))]
)
def test_another_request_has_another_seed(other: GenerateRequest) -> None:
    assert seed_for(other, 42) != seed_for(GenerateRequest(text="Say"), 42)


def test_seeds_of_the_server_and_of_the_client() -> None:
    assert seed_for(GenerateRequest(text="Say"), 42) != seed_for(GenerateRequest(text="Say"), 43)
    assert seed_for(GenerateRequest(text="Say"), None) is None
    assert seed_for(GenerateRequest(text="Say", sampling_params=SamplingParams(seed=7)), 42) == 7
