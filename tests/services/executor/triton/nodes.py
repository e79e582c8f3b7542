"""The kernels that a decode step launches for each layer, in Triton's interpreter. Run by test_triton_executor.py as

    TRITON_INTERPRET=1 PAGEWIRE_CPU_KERNELS=triton python -m tests.services.executor.triton.nodes DIRECTORY

in a process of its own. Prints as JSON, by model and number of requests, the kernels that one layer more takes: ours by
their names, and torch's operations, each of which is a node of a CUDA graph, too. Ours are not executed, as what is
launched does not depend on values.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

from pagewire.kernels.ops.definition import implementation
from pagewire.services.executor.start.assembly import assemble
from tests.kernels.triton.interpreted import nothing_computed
from tests.services.executor.helpers.stepping import CPU, LIMITS, Driver, prompt, tiny_llama

_4_BITS = {
    "quantization_config": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 32,
        "sym": True,
        "desc_act": False,
    },
}
_EXPERTS = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 4}
# By name: what is other than a dense Llama's, and numbers of requests.
MODELS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "dense": ({}, (8, 12)),
    "4 bits": (_4_BITS, (8, 12)),
    "experts": (_EXPERTS, (8,)),
}
_LIMITS = replace(LIMITS, max_num_seqs=12)
# These give a tensor, or another view of one, and launch nothing.
_WITHOUT_LAUNCH = {"empty", "empty_like", "new_empty", "empty_strided", "detach", "lift_fresh"}


class Nodes(TorchDispatchMode):
    """Counts while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "pagewire":
            with self:  # torch's operations in ours are to be seen, too
                return implementation(function.overloadpacket.__name__)(*args)
        if not self._is_view(function):
            self.found[str(function)] += 1
        return function(*args, **(kwargs or {}))

    @staticmethod
    def _is_view(function: Any) -> bool:
        return function.is_view or function.overloadpacket.__name__ in _WITHOUT_LAUNCH

    @contextmanager
    def counting(self) -> Iterator[None]:
        def count(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
            self.found[executor.fn.__name__] += 1

        with mock.patch.object(GridExecutor, "__call__", count), self:
            yield


def step_nodes(directory: Path, num_layers: int, num_reqs: int, changes: dict[str, Any]) -> Counter[str]:
    runner = assemble(tiny_llama(directory, num_hidden_layers=num_layers, **changes), _LIMITS, 32, CPU)
    driver = Driver(runner, 32)
    for request_id in range(num_reqs):
        driver.add(request_id, prompt(3, seed=request_id))
    with nothing_computed():
        driver.step(dict.fromkeys(range(num_reqs), 3))
    nodes = Nodes()
    with nodes.counting():
        driver.step(dict.fromkeys(range(num_reqs), 1))
    return nodes.found


def layer_nodes(directory: Path, num_reqs: int, changes: dict[str, Any]) -> dict[str, int]:
    one, two = (step_nodes(directory, num_layers, num_reqs, changes) for num_layers in (1, 2))
    return dict(two - one)


def main() -> None:
    torch.use_deterministic_algorithms(True)  # also fills unwritten memory: no run differs by chance
    directory = Path(sys.argv[1])
    answer = {
        model: {num_reqs: layer_nodes(directory / model, num_reqs, changes) for num_reqs in sizes}
        for model, (changes, sizes) in MODELS.items()
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
