"""A served model as the routes list it."""

from google.protobuf.json_format import MessageToDict
from msgspec import UNSET

from pagewire.gateway.models.bodies import Capability, Model
from pagewire.gateway.models.line import STATES, State
from pagewire.gateway.models.models import Named
from pagewire.v1 import inference_pb2
from pagewire.v1.common_pb2 import ModelKind
from pagewire.v1.lines_pb2 import Line


def entry(named: Named) -> Model:
    line = named.line
    is_known = line.told is None or line.told.HasField("model") or bool(line.listing)
    return _entry(named.model, line.state, line.told or Line(), root=named.root, is_known=is_known)


def entry_of(told: Line) -> Model:
    """Returns the entry of a line as the stack tells it."""
    model = inference_pb2.Model()
    model.CopyFrom(told.model)
    model.id = told.name
    return _entry(model, STATES[told.state], told, root="", is_known=told.HasField("model"))


def _entry(model: inference_pb2.Model, state: State, told: Line, *, root: str, is_known: bool) -> Model:
    size = model.files.size_bytes or (0 if model.parent else told.size_bytes)
    return Model(
        id=model.id,
        created=model.create_time.seconds,
        root=root or model.root,
        parent=model.parent or None,
        max_model_len=model.max_model_len or None,
        state=state,
        capabilities=capabilities(model) if is_known and not model.parent else [],
        size=size or None,
        progress=told.progress or UNSET,
        problem=told.problem or UNSET,
        default_sampling_params=MessageToDict(model.default_sampling_params, preserving_proto_field_name=True),
        default_sampling_source=model.default_sampling_source,
    )


def capabilities(model: inference_pb2.Model) -> list[Capability]:
    """Returns what a model serves."""
    generates = model.kind == ModelKind.MODEL_KIND_UNSPECIFIED
    embeds, classifies = model.kind == ModelKind.MODEL_KIND_EMBED, model.kind == ModelKind.MODEL_KIND_CLASSIFY
    found: dict[Capability, bool] = {
        "chat": generates and model.has_chat_template,
        "completions": generates,
        "embeddings": embeds,
        "score": embeds or classifies,
        "rerank": embeds or classifies,
        "classify": classifies,
        "images": model.reads_images,
        "tools": model.calls_tools,
        "reasoning": model.reasons,
    }
    return [name for name, has in found.items() if has]
