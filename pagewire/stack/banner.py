"""The text that `pagewire serve` prints once it is ready: its addresses, and a first call to try."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pagewire.config import ServeConfig
from pagewire.process import local_executors
from pagewire.stack.launch import grpc_address, rest_url
from pagewire.version import __version__

if TYPE_CHECKING:
    from pagewire.v1.inference_pb2 import Model

_TIMEOUT_S = 4.0
_SHOWN = 10  # names of models


def served_model(address: str) -> Model | None:
    """Returns the model of the tokenizer service at `address`; None if the service does not answer."""
    # Deferred: until the services have started, importing gRPC would take processor time from them.
    import grpc

    from pagewire.v1 import inference_pb2, inference_pb2_grpc

    with grpc.insecure_channel(address) as channel:
        try:
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            return stub.ListModels(inference_pb2.ListModelsRequest(), timeout=_TIMEOUT_S).models[0]
        except grpc.RpcError:
            return None


def banner(
    config: ServeConfig,
    model: Model | None,
    seconds: float,
    others: Sequence[str] = (),
    on_request: Sequence[str] = (),
) -> str:
    """Returns the text.

    seconds: from the command to readiness. model: None if it is not known; then no call is suggested. others: names of
    further models that are loaded. on_request: names of those that requests load.
    """
    name = (config.served_model_name or "").split(",")[0]
    rest, grpc = rest_url(config), grpc_address(config)
    of_first = f"  ({name} alone)" if others or len(on_request) > (name in on_request) else ""
    tokens = ""
    if config.scheduler_grpc_port:
        tokens = f"\n        {grpc_address(replace(config, grpc_port=config.scheduler_grpc_port))}  (token level)"
    admin = (
        ""
        if config.admin_port is None
        else f"\n  Admin {rest_url(replace(config, host=config.admin_host, port=config.admin_port))}/metrics"
    )
    address = "" if config.grpc_port == ServeConfig.grpc_port else f" --address {grpc.removeprefix('grpcs://')}"
    executors = local_executors.names(config)
    if executors:
        replicas = "" if len(executors) == 1 else f"\n  {len(executors)} executors: {executors[0]} to {executors[-1]}"
    else:
        replicas = f"\n  Executors on a Ray cluster: {config.data_parallel_size}"
    calls = (
        ""
        if model is None
        else f"\n{_calls(model, name, rest, address, bool(config.api_key or config.api_key_file))}\n"
    )
    return f"""
Pagewire {__version__} serves {_all(name, others, on_request)}, ready after {seconds:.1f} s

  Page  {rest}/
  REST  {rest}/v1  (its documentation: {rest}/docs)
  gRPC  {grpc}{of_first}{tokens}{admin}{replicas}
{calls}
Ctrl-C stops it.
"""


def _all(name: str, others: Sequence[str], on_request: Sequence[str]) -> str:
    """Returns the names of all models, the first of which is that of requests without one."""
    loaded = _listed([name, *others] if name not in on_request else others)
    return "; ".join(filter(None, [loaded, f"on request: {_listed(on_request)}" if on_request else ""]))


def _listed(names: Sequence[str]) -> str:
    more = [f"and {len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return ", ".join([*names[:_SHOWN], *more])


def _calls(model: Model, name: str, rest: str, address: str, needs_key: bool) -> str:
    """Returns an example call by curl and, for a model that generates text, by a command."""
    route, body, command = _example(model)
    key = ' -H "Authorization: Bearer $PAGEWIRE_API_KEY"' if needs_key else ""
    data = shlex.quote(json.dumps({"model": name} | body))
    curl = f"  curl {rest}{route}{key} -H 'Content-Type: application/json' \\\n    -d {data}"
    return f"{curl}\n  pagewire {command}{address}" if command else curl


def _example(model: Model) -> tuple[str, dict[str, object], str]:
    """Returns (route, body without the model, command or "")."""
    from pagewire.v1 import common_pb2

    if model.kind == common_pb2.MODEL_KIND_EMBED:
        return "/v1/embeddings", {"input": "Hello!"}, ""
    if model.kind == common_pb2.MODEL_KIND_CLASSIFY:
        return "/classify", {"input": "Hello!"}, ""
    if not model.has_chat_template:
        return "/v1/completions", {"prompt": "Once upon a time"}, 'generate "Once upon a time"'
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello!"}]}, "chat"
