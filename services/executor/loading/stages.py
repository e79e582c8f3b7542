"""The layers of each stage of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable

from pagewire.config.values import executor as values
from pagewire.services.executor.config.model_config import ModelLoadError
from pagewire.services.executor.layers.weights import WeightModule
from pagewire.services.executor.models.causal import CausalModel
from pagewire.services.executor.models.dense.gemma2 import GemmaModel
from pagewire.services.executor.models.protocol import Leaf, OwnModel
from pagewire.services.executor.models.vision.vision_model import VisionModel
from pagewire.services.executor.parallel.stage import Stage, divide


def stage_of(model: OwnModel, stage: Stage) -> Stage:
    """Returns the stage with its layers. model: the whole model, with or without weights. The cost of a layer is the
    size of its weights, as in steps with few tokens. Raises ModelLoadError if this number of stages is impossible."""
    name = model.config.architecture
    if not isinstance(model, CausalModel | GemmaModel) or isinstance(model, VisionModel):
        raise ModelLoadError(f"--pipeline-parallel-size {stage.count}: {name} is not divided into stages; leave it out")
    if refused := values.of_stages(stage.count, len(model.layers)):
        raise ModelLoadError(refused)
    head = model.embed if model.lm_head is None else model.lm_head
    costs = [_num_weights(layer.leaves()) for layer in model.layers]
    return divide(costs, _num_weights([head]), stage.count)[stage.index]


def _num_weights(leaves: Iterable[Leaf]) -> float:
    shards = (shard for leaf in leaves if isinstance(leaf, WeightModule) for shard in leaf.shards)
    return float(sum(shard.out_features * shard.in_features for shard in shards))
