"""Routes of OpenAI, vLLM, SGLang and Ollama that are not served: the answer gives the reason, not just 404."""

from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from pagewire.gateway.core.errors import ApiError
from pagewire.gateway.core.reading.json_route import JsonRoute

router = APIRouter(route_class=JsonRoute, include_in_schema=False)

_ADAPTERS = "see /v1/load_lora_adapter and /v1/unload_lora_adapter"
_IMAGES = "images stay cached; /reset_prefix_cache forgets what was computed from them"
_TIERS = "--kv-offloading-dir decides where copies are kept; /reset_prefix_cache forgets them, too"
_PAUSE = "see /sleep?mode=keep and /wake_up, between which requests keep their tokens"
_ADD = "PUT /v1/admin/models/NAME adds a model, or one with further names (`aliases`)"
_SCALE = "the deployment starts and stops executors"
_WEIGHTS = "weights are replaced from files, all at once; see /v1/admin/weights"

UNSERVED: Mapping[str, str] = {
    "/api/copy": _ADD,
    "/api/create": _ADD,
    "/api/delete": "DELETE /v1/admin/models/NAME ends a model, and `pagewire rm` deletes its files",
    "/api/push": "models are downloaded alone; see /api/pull",
    "/clear_hicache_storage_backend": _TIERS,
    "/close_session": "the server has no sessions; the prefix cache finds earlier turns",
    "/cohere/v2/chat": "see /v1/chat/completions",
    "/collective_rpc": "clients run no code in executors",
    "/configure_logging": "flags configure logging",
    "/continue_generation": _PAUSE,
    "/encode": "see /v1/embeddings",
    "/fault_tolerance/apply": "recovery is automatic",
    "/fault_tolerance/status": "recovery is automatic; see /readyz",
    "/finish_weight_update": _WEIGHTS,
    "/generative_scoring": "see /score",
    "/get_weights_by_name": _WEIGHTS,
    "/get_world_size": "see /server_info",
    "/hicache/storage-backend": _TIERS,
    "/inference/v1/generate": "see /v1/completions, which takes and returns token ids, or the gRPC API",
    "/init_weight_transfer_engine": _WEIGHTS,
    "/init_weights_update_group": _WEIGHTS,
    "/invocations": "call the route that you need",
    "/is_paused": _PAUSE,
    "/is_scaling_elastic_ep": _SCALE,
    "/kv_event_sources": "see pagewire.v1.AdminService/SubscribeKvEvents of gRPC, and --kv-events-config",
    "/load_lora_adapter": _ADAPTERS,
    "/load_lora_adapter_from_tensors": "adapters are loaded from files; see /v1/load_lora_adapter",
    "/open_session": "the server has no sessions; the prefix cache finds earlier turns",
    "/parse_function_call": "calls are parsed as they are generated; see tools of /v1/chat/completions",
    "/pause": _PAUSE,
    "/pause_generation": _PAUSE,
    "/pd_role_switch": "--role of an executor decides, from its start",
    "/release_kv_cache_memory": "see /sleep and /wake_up",
    "/release_memory_occupation": "see /sleep and /wake_up",
    "/reset_encoder_cache": _IMAGES,
    "/reset_mm_cache": _IMAGES,
    "/resume": _PAUSE,
    "/resume_memory_occupation": "see /sleep and /wake_up",
    "/scale_elastic_ep": _SCALE,
    "/separate_reasoning": "reasoning is separated as it is generated; see /v1/chat/completions",
    "/set_internal_state": "flags configure the server",
    "/set_trace_level": "flags configure tracing",
    "/shutdown_weight_transfer_engine": _WEIGHTS,
    "/slow_down": "executors always run at full speed",
    "/start_draft_weight_update": _WEIGHTS,
    "/start_profile": "use the profilers in the benchmarks folder",
    "/start_weight_update": _WEIGHTS,
    "/stop_profile": "use the profilers in the benchmarks folder",
    "/unload_lora_adapter": _ADAPTERS,
    "/update_weight_version": _WEIGHTS,
    "/update_weights": _WEIGHTS,
    "/update_weights_from_distributed": _WEIGHTS,
    "/update_weights_from_ipc": _WEIGHTS,
    "/update_weights_from_tensor": _WEIGHTS,
    "/v1/assistants": "see /v1/chat/completions",
    "/v1/audio/speech": "no served model generates audio",
    "/v1/audio/transcriptions": "no served model reads audio",
    "/v1/audio/translations": "no served model reads audio",
    "/v1/chat/completions/batch": "send one request per chat, or see /v1/batches",
    "/v1/chat/completions/derender": "see /detokenize",
    "/v1/chat/completions/render": "see /tokenize",
    "/v1/completions/derender": "see /detokenize",
    "/v1/completions/render": "see /tokenize",
    "/v1/decisions": "see /v1/classify",
    "/v1/fine_tuning/jobs": "the server does not train models",
    "/v1/images/edits": "no served model generates images",
    "/v1/images/generations": "no served model generates images",
    "/v1/images/variations": "no served model generates images",
    "/v1/moderations": "see /v1/classify, with a model that classifies",
    "/v1/realtime": "no served model handles audio",
    "/v1/systemone": "see /v1/chat/completions",
    "/v1/threads": "see /v1/chat/completions",
    "/v1/vector_stores": "vectors are computed, not stored; see /v1/embeddings",
    "/v1/videos": "no served model generates images",
    "/vertex_generate": "call the route that you need",
    "/weight_checker": _WEIGHTS,
    "/weight_info": _WEIGHTS,
}


def _refusal(path: str, why: str) -> Callable[..., Coroutine[Any, Any, Response]]:
    async def refuse(request: Request) -> Response:
        raise ApiError(501, f"{path} is not supported by Pagewire: {why}", code="unsupported_route")

    return refuse


for _path, _why in UNSERVED.items():
    router.add_api_route(_path, _refusal(_path, _why), methods=["GET", "POST", "PUT", "DELETE"])
