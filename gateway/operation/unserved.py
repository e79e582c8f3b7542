"""Routes of OpenAI, vLLM, SGLang and Ollama that are not served: clients are told so, and why, not just 404."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.json_route import JsonRoute

router = APIRouter(route_class=JsonRoute, include_in_schema=False)

_CACHES = "caches are the server's own; restart it to empty them, or keep requests apart by cache_salt"
_SCALE = "executors are started and stopped by whoever deploys them"
_WEIGHTS = "weights are replaced from files, as a whole and in one call; see /v1/admin/weights"

UNSERVED: Mapping[str, str] = {
    "/api/chat": "of Ollama's API; see /v1/chat/completions",
    "/api/generate": "of Ollama's API; see /v1/completions",
    "/api/show": "of Ollama's API; see /v1/models",
    "/api/tags": "of Ollama's API; see /v1/models",
    "/clear_hicache_storage_backend": _CACHES,
    "/close_session": "there are no sessions; the prefix cache finds what was said before",
    "/cohere/v2/chat": "see /v1/chat/completions",
    "/collective_rpc": "clients run no code in executors",
    "/configure_logging": "logging is set by flags",
    "/continue_generation": "generation cannot be paused",
    "/encode": "see /v1/embeddings",
    "/fault_tolerance/apply": "recovery needs no order",
    "/fault_tolerance/status": "recovery needs no order; see /readyz",
    "/finish_weight_update": _WEIGHTS,
    "/flush_cache": _CACHES,
    "/generative_scoring": "see /score",
    "/get_weights_by_name": _WEIGHTS,
    "/get_world_size": "see /server_info",
    "/hicache/storage-backend": _CACHES,
    "/inference/v1/generate": "see /v1/completions, which takes and tells token ids, or the gRPC API",
    "/init_weight_transfer_engine": _WEIGHTS,
    "/init_weights_update_group": _WEIGHTS,
    "/invocations": "name the route that you want",
    "/is_paused": "generation cannot be paused",
    "/is_scaling_elastic_ep": _SCALE,
    "/is_sleeping": "executors do not sleep",
    "/kv_event_sources": "events of the KV cache are not published",
    "/load_lora_adapter": "there are no LoRA adapters",
    "/load_lora_adapter_from_tensors": "there are no LoRA adapters",
    "/open_session": "there are no sessions; the prefix cache finds what was said before",
    "/parse_function_call": "calls are told apart where they are generated; see tools of /v1/chat/completions",
    "/pause": "generation cannot be paused",
    "/pause_generation": "generation cannot be paused",
    "/pd_role_switch": "prompts and outputs are computed in one place",
    "/release_kv_cache_memory": "executors do not sleep",
    "/release_memory_occupation": "executors do not sleep",
    "/reset_encoder_cache": _CACHES,
    "/reset_mm_cache": _CACHES,
    "/reset_prefix_cache": _CACHES,
    "/resume": "generation cannot be paused",
    "/resume_memory_occupation": "executors do not sleep",
    "/scale_elastic_ep": _SCALE,
    "/separate_reasoning": "reasoning is told apart where it is generated; see /v1/chat/completions",
    "/set_internal_state": "what can be set is set by flags",
    "/set_trace_level": "tracing is set by flags",
    "/shutdown_weight_transfer_engine": _WEIGHTS,
    "/sleep": "executors do not sleep",
    "/slow_down": "executors run as fast as they can",
    "/start_draft_weight_update": _WEIGHTS,
    "/start_profile": "profiles are made with the tools of the benchmarks folder",
    "/start_weight_update": _WEIGHTS,
    "/stop_profile": "profiles are made with the tools of the benchmarks folder",
    "/unload_lora_adapter": "there are no LoRA adapters",
    "/update_weight_version": _WEIGHTS,
    "/update_weights": _WEIGHTS,
    "/update_weights_from_distributed": _WEIGHTS,
    "/update_weights_from_ipc": _WEIGHTS,
    "/update_weights_from_tensor": _WEIGHTS,
    "/v1/assistants": "see /v1/chat/completions",
    "/v1/audio/speech": "no model here speaks",
    "/v1/audio/transcriptions": "no model here hears",
    "/v1/audio/translations": "no model here hears",
    "/v1/chat/completions/batch": "send one request per chat, or see /v1/batches",
    "/v1/chat/completions/derender": "see /detokenize",
    "/v1/chat/completions/render": "see /tokenize",
    "/v1/completions/derender": "see /detokenize",
    "/v1/completions/render": "see /tokenize",
    "/v1/decisions": "see /v1/classify",
    "/v1/fine_tuning/jobs": "models are served, not trained",
    "/v1/images/edits": "no model here draws",
    "/v1/images/generations": "no model here draws",
    "/v1/images/variations": "no model here draws",
    "/v1/load_lora_adapter": "there are no LoRA adapters",
    "/v1/moderations": "see /v1/classify, of a model that classifies",
    "/v1/realtime": "no model here hears or speaks",
    "/v1/systemone": "see /v1/chat/completions",
    "/v1/threads": "see /v1/chat/completions",
    "/v1/unload_lora_adapter": "there are no LoRA adapters",
    "/v1/vector_stores": "vectors are made, not kept; see /v1/embeddings",
    "/v1/videos": "no model here draws",
    "/vertex_generate": "name the route that you want",
    "/wake_up": "executors do not sleep",
    "/weight_checker": _WEIGHTS,
    "/weight_info": _WEIGHTS,
}


def _refusal(path: str, why: str) -> Callable[..., Coroutine[Any, Any, Response]]:
    async def refuse(request: Request) -> Response:
        raise ApiError(501, f"{path} is not supported by Pagewire: {why}", code="unsupported_route")

    return refuse


for _path, _why in UNSERVED.items():
    router.add_api_route(_path, _refusal(_path, _why), methods=["GET", "POST", "PUT", "DELETE"])
