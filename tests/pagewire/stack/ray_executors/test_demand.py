from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed: pip install 'pagewire[ray]'")

from pagewire.config import RayExecutorsConfig
from pagewire.errors import StartupError
from pagewire.stack.ray_executors.cluster import connect, demand


def nodes(*resources: dict[str, float]) -> list[dict[str, Any]]:
    return [{"Alive": True, "Resources": one} for one in resources] + [{"Alive": False, "Resources": {"GPU": 8}}]


@pytest.mark.parametrize(
    ("flags", "there", "expected"),
    [
        ({}, nodes({"CPU": 8}), {"num_gpus": 0, "num_cpus": 8}),
        ({"data_parallel_size": 2}, nodes({"CPU": 8}), {"num_gpus": 0, "num_cpus": 4}),
        ({"data_parallel_size": 3}, nodes({}, {"CPU": 8}, {"CPU": 6}), {"num_gpus": 0, "num_cpus": 3}),
        ({"data_parallel_size": 9}, nodes({"CPU": 2}), {"num_gpus": 0, "num_cpus": 1}),
        ({"num_threads": 5}, nodes({"CPU": 8}), {"num_gpus": 0, "num_cpus": 5}),
        ({"tensor_parallel_size": 2}, nodes({"CPU": 8}), {"num_gpus": 0, "num_cpus": 8}),
        ({"tensor_parallel_size": 2, "num_threads": 3}, nodes({"CPU": 8}), {"num_gpus": 0, "num_cpus": 6}),
        ({"tensor_parallel_size": 4}, nodes({"CPU": 8, "GPU": 8}), {"num_gpus": 4, "num_cpus": 4}),
        ({"pipeline_parallel_size": 2}, nodes({"CPU": 8}), {"num_gpus": 0, "num_cpus": 4}),
        ({"pipeline_parallel_size": 2}, nodes({"CPU": 8}, {"CPU": 6}), {"num_gpus": 0, "num_cpus": 6}),
        (
            {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
            nodes({"CPU": 8, "GPU": 4}, {"CPU": 8, "GPU": 4}),
            {"num_gpus": 4, "num_cpus": 4},
        ),
        ({}, [], {"num_gpus": 0, "num_cpus": 1}),
        ({}, nodes({"CPU": 8}, {"CPU": 8, "GPU": 1}), {"num_gpus": 1, "num_cpus": 1}),
        ({"device": "cpu"}, nodes({"CPU": 8, "GPU": 1}), {"num_gpus": 0, "num_cpus": 8}),
        ({"device": "cuda"}, nodes({"CPU": 8}), {"num_gpus": 1, "num_cpus": 1}),
    ],
)
def test_what_an_actor_needs(flags: Any, there: list[dict[str, Any]], expected: dict[str, float]) -> None:
    assert demand(RayExecutorsConfig(**flags), there) == expected


def test_a_ray_client_is_refused_by_name() -> None:
    with pytest.raises(StartupError, match="ray://head:10001"):
        connect(RayExecutorsConfig(ray_address="ray://head:10001"))


def test_a_cluster_that_is_not_there_is_named() -> None:
    with pytest.raises(StartupError, match="no Ray cluster answers at 127"):
        connect(RayExecutorsConfig(ray_address="127.0.0.1:1"))
