"""The served models as Anthropic's clients list them."""

from collections.abc import Sequence
from datetime import UTC, datetime

from pagewire.gateway.messages.bodies.answers import ModelInfo, ModelPage
from pagewire.v1 import inference_pb2


def model_page(models: Sequence[inference_pb2.Model]) -> ModelPage:
    data = [model_info(model) for model in models]
    return ModelPage(data=data, has_more=False, first_id=models[0].id, last_id=models[-1].id)


def model_info(model: inference_pb2.Model) -> ModelInfo:
    return ModelInfo(
        id=model.id,
        display_name=model.id,
        created_at=datetime.fromtimestamp(model.create_time.seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        max_input_tokens=model.max_model_len or None,
        max_tokens=model.max_model_len or None,
    )
