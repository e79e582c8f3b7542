"""The served models by Ollama's names, and as it lists and shows them."""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Literal

import grpc
from google.protobuf.json_format import MessageToDict

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.tokenizer_client import TokenizerClient
from pagewire.gateway.dialects.ollama.answers import (
    OllamaDetails,
    OllamaModel,
    OllamaProcess,
    OllamaShown,
)
from pagewire.gateway.models.models import Models, Named
from pagewire.v1 import common_pb2
from pagewire.v1.inference_pb2 import GetTokenizerInfoRequest, Model
from pagewire.v1.lines_pb2 import Line
from pagewire.wire.model_names import not_served

LATEST = ":latest"
# What Ollama answers for a model that stays for ever.
FOR_EVER = "2318-12-31T23:59:59Z"
_UNITS = ((10**12, "T", 1), (10**9, "B", 1), (10**6, "M", 2), (10**3, "K", 0))
# Our parameters -> Ollama's, as far as they differ.
_PARAMETERS = {"max_tokens": "num_predict", "repetition_penalty": "repeat_penalty"}

Capability = Literal["completion", "tools", "vision", "thinking", "insert", "embedding"]


async def find_model(models: Models, name: str, *, loaded: bool = True) -> Named:
    """Returns the served model that a client names. Raises ApiError 404, or what Models.list_all() does.

    loaded: whether all is needed that is known once it was loaded.
    """
    names = (name, name.removesuffix(LATEST))
    served = {one.model.id: one for one in await models.list_named(names)}
    found = served.get(names[0]) or served.get(names[1])
    if found is None and models.takes_all is not None:
        found = next(one for one in served.values() if one.line is models.takes_all)
    if found is None:
        raise ApiError(404, not_served(name, served), param="model", code="model_not_found")
    if loaded and found.line.told is not None and not found.line.listing:
        await found.line.reach(computes=False)
        return await find_model(models, name, loaded=False)
    return found


def tagged(name: str) -> str:
    """Returns a name with its tag, as Ollama lists it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def listed(model: Model) -> OllamaModel:
    name = tagged(model.id)
    return OllamaModel(
        name=name,
        model=name,
        modified_at=_modified(model),
        size=model.files.size_bytes,
        digest=model.files.digest,
        details=_details(model),
    )


def loaded(served: Named) -> OllamaProcess:
    model, told = served.model, served.line.told or Line()
    name = tagged(model.id)
    until = told.rest_time.ToDatetime(UTC).isoformat().replace("+00:00", "Z")
    return OllamaProcess(
        name=name,
        model=name,
        size=told.memory_bytes or model.files.size_bytes,
        digest=model.files.digest,
        details=_details(model),
        expires_at=until if told.HasField("rest_time") else FOR_EVER,
        context_length=model.max_model_len,
    )


async def shown(served: Named) -> OllamaShown:
    model, is_loaded = served.model, served.line.state in ("ready", "asleep")
    template = await _template(served.line.client) if is_loaded else ""
    parameters = MessageToDict(model.default_sampling_params, preserving_proto_field_name=True)
    return OllamaShown(
        license="",
        modelfile=f"FROM {model.root}\n",
        parameters="\n".join(f"{_PARAMETERS.get(name, name):30} {value:g}" for name, value in parameters.items()),
        template=template,
        details=_details(model),
        model_info=_info(model),
        capabilities=_capabilities(model),
        modified_at=_modified(model),
    )


async def _template(tokenizer: TokenizerClient) -> str:
    """Returns the chat template; "" if the operator does not show it."""
    try:
        info = await tokenizer.call(tokenizer.inference.GetTokenizerInfo, GetTokenizerInfoRequest())
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
            return ""
        raise
    return info.tool_chat_template or info.chat_template


def _info(model: Model) -> dict[str, str | int]:
    files = model.files
    architecture = files.architecture or "unknown"
    info: dict[str, str | int] = {
        "general.architecture": architecture,
        "general.parameter_count": files.num_parameters,
        f"{architecture}.block_count": files.num_layers,
        f"{architecture}.context_length": model.max_model_len or files.trained_len,
        f"{architecture}.embedding_length": files.hidden_size,
    }
    return {name: value for name, value in info.items() if value}


def _capabilities(model: Model) -> list[Capability]:
    if model.kind == common_pb2.MODEL_KIND_EMBED:
        return ["embedding"]
    found: Sequence[tuple[Capability, bool]] = (
        ("completion", model.kind == common_pb2.MODEL_KIND_UNSPECIFIED),
        ("tools", model.calls_tools),
        ("vision", model.reads_images),
        ("thinking", model.reasons),
        ("insert", model.fills_in_middle),
    )
    return [name for name, has in found if has]


def _details(model: Model) -> OllamaDetails:
    files = model.files
    return OllamaDetails(
        parent_model=model.parent,
        format=files.format,
        family=files.architecture,
        families=[files.architecture] if files.architecture else [],
        parameter_size=_count(files.num_parameters),
        quantization_level=files.quantization,
    )


def _count(number: int) -> str:
    """Returns a number as Ollama writes it: 134.52M, 8.0B."""
    unit, letter, digits = next((one for one in _UNITS if number >= one[0]), (1, "", 0))
    return f"{number / unit:.{digits}f}{letter}" if number else ""


def _modified(model: Model) -> str:
    seconds = model.files.modify_time.seconds or model.create_time.seconds
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")
