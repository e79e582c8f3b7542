"""Parameters of other servers that this one does not support: refused by name, never ignored."""

from collections.abc import Collection, Mapping
from typing import Any

from pagewire.gateway.core.reading.names import Refused

# Of a body's schema: the parameters that it refuses, and why.
REFUSED = "x-refused"

_CHAT_ONLY = "only chats have it"
_CODE = "requests cannot carry code"
_EXPERTS = "the routing of tokens to experts is not returned"
_IMAGES = "the server's flags set how images are read"
_ONE_PLACE = "the scheduler decides which executors compute prompt and output"
_PLACED = "the scheduler chooses the executor of a request"

UNSUPPORTED: Mapping[str, Refused] = {
    "audio": Refused("no served model generates audio"),
    "best_of": Refused("request n choices with logprobs, and select the best", (1,)),
    "bootstrap_host": Refused(_ONE_PLACE),
    "bootstrap_port": Refused(_ONE_PLACE),
    "bootstrap_room": Refused(_ONE_PLACE),
    "chat_template": Refused(_CHAT_ONLY),
    "custom_logit_processor": Refused(_CODE),
    "custom_params": Refused(_CODE),
    "data_parallel_rank": Refused(_PLACED),
    "disagg_prefill_dp_rank": Refused(_PLACED),
    "documents": Refused(_CHAT_ONLY, ([],)),
    "echo": Refused("only text completions have it", (False,)),
    "ec_transfer_params": Refused(_ONE_PLACE),
    "extra_key": Refused("see cache_salt"),
    "function_call": Refused(_CHAT_ONLY, ("none",)),
    "functions": Refused(_CHAT_ONLY, ([],)),
    "guided_decoding_backend": Refused("one engine serves all forms", ("auto", "guidance")),
    "guided_whitespace_pattern": Refused("see whitespace_pattern of structured_outputs"),
    "images_config": Refused(_IMAGES),
    "include_reasoning": Refused(_CHAT_ONLY),
    "input_ids": Refused("only text completions take token ids as a prompt"),
    "kv_transfer_params": Refused(_ONE_PLACE),
    "logprob_token_ids": Refused("request more alternatives (logprobs), or score a text (echo)", ([],)),
    "logits_processors": Refused(_CODE, ([],)),
    "lora_path": Refused("name the adapter as the model"),
    "max_dynamic_patch": Refused(_IMAGES),
    "media_io_kwargs": Refused(_IMAGES),
    "min_dynamic_patch": Refused(_IMAGES),
    "mm_payload": Refused(_IMAGES),
    "mm_processor_kwargs": Refused(_IMAGES),
    "modalities": Refused("models generate text only", (["text"],)),
    "parallel_tool_calls": Refused(_CHAT_ONLY, (True, False)),
    "ngram_corpus_id": Refused("drafts do not come from a corpus"),
    "prediction": Refused(_CHAT_ONLY),
    "prompt_cache_retention": Refused("the prefix cache keeps blocks while it has room", ("in_memory", "in-memory")),
    "prompt_embeds": Refused("send prompts as text or token ids"),
    "reasoning": Refused("see reasoning_effort"),
    "reasoning_effort": Refused(_CHAT_ONLY),
    "repetition_detection": Refused("see repetition_penalty and frequency_penalty"),
    "return_cached_tokens_details": Refused("the usage has one count of cached tokens", (False,)),
    "return_hidden_states": Refused("see /pooling", (False,)),
    "return_meta_info": Refused("see /generate", (False,)),
    "return_mm_kwargs": Refused(_IMAGES, (False,)),
    "return_prompt_text": Refused("see /detokenize", (False,)),
    "return_prompt_token_ids": Refused("see return_token_ids", (False,)),
    "return_routed_experts": Refused(_EXPERTS, (False,)),
    "return_token_offsets": Refused("see return_token_ids", (False,)),
    "return_weight_versions": Refused("see system_fingerprint", (False,)),
    "routed_dp_rank": Refused(_PLACED),
    "routed_experts_prompt_start": Refused(_EXPERTS, (0,)),
    "routed_experts_start_len": Refused(_EXPERTS, (0,)),
    "separate_reasoning": Refused(_CHAT_ONLY, (True,)),
    "service_tier": Refused(_CHAT_ONLY, ("auto", "default")),
    "session_params": Refused("the server has no sessions; the prefix cache finds earlier turns"),
    "stop_regex": Refused("use stop, or regex for the form of the whole output"),
    "store": Refused(_CHAT_ONLY, (False,)),
    "stream_interval": Refused("each event is sent as soon as there is output", (1,)),
    "stream_reasoning": Refused("reasoning is always streamed", (True,)),
    "suffix": Refused("see /v1/completions", ("",)),
    "tool_choice": Refused(_CHAT_ONLY, ("none",)),
    "tools": Refused(_CHAT_ONLY, ([],)),
    "use_audio_in_video": Refused("no served model reads videos", (False,)),
    "verbosity": Refused(_CHAT_ONLY),
    "vllm_xargs": Refused("the server has no plug-ins"),
    "watermarking": Refused("outputs are not watermarked", (False,)),
    "web_search_options": Refused("the server does not search the web"),
}

# Inside a message or one of its parts.
UNSUPPORTED_IN_MESSAGE: Mapping[str, Refused] = {
    "annotations": Refused("chat templates ignore them", ([],)),
    "audio": Refused("no served model generates audio"),
    "refusal": Refused("chat templates ignore it"),
}


def refused_names(known: Collection[str], unsupported: Mapping[str, Refused]) -> dict[str, Any]:
    """Returns the names that a body refuses, with the reasons."""
    return {name: refused.why for name, refused in unsupported.items() if name not in known}
