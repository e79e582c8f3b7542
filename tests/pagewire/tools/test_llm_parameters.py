"""Parameters of the classes of vLLM: each one is taken, has no effect, or is refused with a remedy."""

from collections.abc import Callable
from typing import Any

import pytest

from pagewire import BeamSearchParams, PoolingParams, SamplingParams, StructuredOutputsParams
from pagewire.errors import StartupError
from pagewire.tools.llm.prompts import as_prompts, client_options, prompt_of
from pagewire.tools.llm.sampling import RequestOutputKind
from pagewire.tools.llm.stack_flags import config_of
from pagewire.v1.common_pb2 import Grammar
from pagewire.v1.inference_pb2 import GenerateRequest
from pagewire.wire.generate_request import generate_request


def sent(**given: Any) -> GenerateRequest:
    return generate_request("prompt", SamplingParams(**given).options())


# Fields of vllm.SamplingParams -> a value, and what the request has then.
TAKEN: dict[str, tuple[Any, Callable[[GenerateRequest], bool]]] = {
    "n": (3, lambda r: r.n == 3),
    "presence_penalty": (0.5, lambda r: r.sampling_params.presence_penalty == 0.5),
    "frequency_penalty": (0.5, lambda r: r.sampling_params.frequency_penalty == 0.5),
    "repetition_penalty": (2, lambda r: r.sampling_params.repetition_penalty == 2),
    "temperature": (0.5, lambda r: r.sampling_params.temperature == 0.5),
    "top_p": (0.5, lambda r: r.sampling_params.top_p == 0.5),
    "top_k": (5, lambda r: r.sampling_params.top_k == 5),
    "min_p": (0.5, lambda r: r.sampling_params.min_p == 0.5),
    "seed": (7, lambda r: r.sampling_params.seed == 7),
    "stop": ("END", lambda r: list(r.stop) == ["END"]),
    "stop_token_ids": ([4, 4, 5], lambda r: list(r.sampling_params.stop_token_ids) == [4, 5]),
    "ignore_eos": (True, lambda r: r.sampling_params.ignore_eos),
    "max_tokens": (9, lambda r: r.sampling_params.max_tokens == 9),
    "min_tokens": (2, lambda r: r.sampling_params.min_tokens == 2),
    "logprobs": (True, lambda r: r.sampling_params.logprobs == 1),
    "prompt_logprobs": (2, lambda r: r.sampling_params.prompt_logprobs == 2),
    "skip_special_tokens": (False, lambda r: not r.skip_special_tokens),
    "include_stop_str_in_output": (True, lambda r: r.include_stop_str_in_output),
    "structured_outputs": (
        StructuredOutputsParams(regex="a+"),
        lambda r: r.sampling_params.grammar == Grammar(regex="a+"),
    ),
    "logit_bias": ({"3": 1.5}, lambda r: list(r.sampling_params.logit_bias_ids) == [3]),
    "allowed_token_ids": ([3], lambda r: list(r.sampling_params.allowed_token_ids) == [3]),
    "bad_words": (["x"], lambda r: list(r.bad_words) == ["x"]),
    "skip_reading_prefix_cache": (True, lambda r: len(r.cache_salt) == 32),
    "thinking_token_budget": (5, lambda r: r.thinking_token_budget == 5),
    "best_of": (4, lambda r: r.best_of == 4),
    "truncate_prompt_tokens": (4, lambda r: r.truncate_prompt_tokens == 4),
}
# The values that change nothing, and one that is refused, if any is.
WITHOUT_EFFECT: dict[str, list[Any]] = {
    "detokenize": [True, False],
    "spaces_between_special_tokens": [True, False],
    "output_kind": list(RequestOutputKind),
    "stream_interval": [None, 8],
    "skip_clone": [True, False],
}
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "prompt_logprob_token_ids": (None, [1], "prompt_logprobs=N"),
    "prompt_logprob_start": (None, 3, "cut the list"),
    "logprob_token_ids": (None, [1], "logprobs=N"),
    "flat_logprobs": (False, True, "lists of dicts"),
    "extra_args": ({}, {"a": 1}, "no sampler but the built-in one"),
    "repetition_detection": (None, object(), "repetition_penalty or frequency_penalty"),
    "routed_experts_prompt_start": (0, 5, "not returned"),
    "trace_decode_token_ids": (None, [1], "set prompt_logprobs"),
    "output_text_buffer_length": (0, 5, "vLLM sets it itself"),
    # Of earlier versions.
    "logits_processors": ([], [lambda ids, logits: logits], "do not run in the executor"),
    "guided_decoding": (None, object(), "structured_outputs=StructuredOutputsParams"),
    "use_beam_search": (False, True, "call LLM.beam_search"),
    "length_penalty": (1.0, 2.0, "call LLM.beam_search"),
    "early_stopping": (False, True, "call LLM.beam_search"),
}
OF_VLLM = (
    "n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids"
    " ignore_eos max_tokens min_tokens logprobs prompt_logprobs prompt_logprob_token_ids prompt_logprob_start"
    " logprob_token_ids flat_logprobs detokenize skip_special_tokens spaces_between_special_tokens"
    " include_stop_str_in_output output_kind stream_interval skip_clone output_text_buffer_length structured_outputs"
    " logit_bias allowed_token_ids extra_args bad_words skip_reading_prefix_cache thinking_token_budget"
    " repetition_detection routed_experts_prompt_start trace_decode_token_ids"
)


def test_each_parameter_of_vllm_has_an_answer() -> None:
    assert set(OF_VLLM.split()) <= TAKEN.keys() | WITHOUT_EFFECT.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", TAKEN)
def test_a_parameter_is_taken(name: str) -> None:
    value, holds = TAKEN[name]
    assert holds(sent(**{name: value}))


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_a_parameter_has_no_effect(name: str) -> None:
    assert all(sent(**{name: value}) == sent() for value in WITHOUT_EFFECT[name])


@pytest.mark.parametrize("name", REFUSED)
def test_a_parameter_is_refused_by_its_name_unless_it_says_nothing(name: str) -> None:
    neutral, value, remedy = REFUSED[name]
    assert sent(**{name: neutral}) == sent()
    with pytest.raises(ValueError, match=f"{name} is not supported: .*{remedy}"):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -1}, "temperature is -1; it must be >= 0 and finite"),
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number, >= 0 and finite"),
        ({"top_k": 1.5}, "top_k is 1.5; it must be an integer"),
        ({"logprobs": -1}, "logprobs is -1; it must be >= 0"),
        ({"max_tokens": 0}, "max_tokens is 0"),
        ({"stop": [""]}, "stop has an empty text"),
        ({"bad_words": ["a", ""]}, "bad_words has an empty text"),
        ({"stop": "a", "detokenize": False}, "stop is found in the text"),
        ({"structured_outputs": StructuredOutputsParams(regex="a"), "grammar": Grammar(regex="a")}, "are the same"),
    ],
)
def test_a_wrong_value_is_named_when_it_is_given(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SamplingParams(**given)


def test_parameters_may_be_changed_and_copied_as_in_vllm() -> None:
    params = SamplingParams(stop="a", seed=-1)
    assert params.stop == ["a"] and params.seed is None
    copy = params.clone()
    copy.temperature, copy.stop = 0.5, "b"
    assert params.temperature is None and list(copy.options()["stop"]) == ["b"]
    copy.temperature = -1
    with pytest.raises(ValueError, match="temperature is -1"):
        copy.options()
    assert SamplingParams.from_optional(temperature=None, top_p=0.5, max_tokens=None) == SamplingParams(
        top_p=0.5, max_tokens=None
    )


@pytest.mark.parametrize(
    ("given", "grammar"),
    [
        ({"json": {"type": "object"}}, Grammar(json_schema='{"type": "object"}')),
        ({"json": "{}", "whitespace_pattern": " "}, Grammar(json_schema="{}", whitespace_pattern=" ")),
        ({"json_object": True}, Grammar(json_schema='{"type": "object"}')),
        ({"regex": "a"}, Grammar(regex="a")),
        ({"choice": ["a", "b"]}, Grammar(choice=Grammar.Choice(texts=["a", "b"]))),
        ({"grammar": 'root ::= "a"'}, Grammar(ebnf='root ::= "a"')),
        ({"structural_tag": "{}"}, Grammar(structural_tag="{}")),
    ],
)
def test_the_form_of_an_output(given: dict[str, Any], grammar: Grammar) -> None:
    assert StructuredOutputsParams(**given).as_grammar() == grammar


def test_a_form_is_one_form() -> None:
    with pytest.raises(ValueError, match="have json and regex; give one of json, regex"):
        StructuredOutputsParams(json="{}", regex="a")
    with pytest.raises(ValueError, match="have no form"):
        StructuredOutputsParams()
    with pytest.raises(ValueError, match=r"structured_outputs: .* call LLM\.generate"):
        BeamSearchParams(beam_width=2, max_tokens=3, structured_outputs=StructuredOutputsParams(regex="a"))
    with pytest.raises(ValueError, match="normalize is not supported"):
        PoolingParams(normalize=True)


# Arguments of vllm.LLM with its defaults, or with values that programs give.
OF_LLM: dict[str, Any] = {
    "runner": "auto",
    "convert": "auto",
    "task": "auto",
    "tokenizer": None,
    "tokenizer_mode": "auto",
    "skip_tokenizer_init": False,
    "trust_remote_code": True,
    "allowed_local_media_path": "",
    "allowed_media_domains": None,
    "tensor_parallel_size": 1,
    "dtype": "auto",
    "quantization": None,
    "revision": None,
    "tokenizer_revision": None,
    "chat_template": None,
    "seed": 0,
    "gpu_memory_utilization": 0.9,
    "swap_space": 4,
    "cpu_offload_gb": 0,
    "offload_group_size": 0,
    "offload_num_in_group": 1,
    "offload_prefetch_step": 1,
    "offload_params": set(),
    "enforce_eager": True,
    "max_seq_len_to_capture": 8192,
    "enable_return_routed_experts": False,
    "return_sampling_mask": False,
    "disable_custom_all_reduce": False,
    "disable_async_output_proc": False,
    "hf_token": None,
    "hf_overrides": {},
    "mm_processor_kwargs": None,
    "pooler_config": None,
    "override_pooler_config": None,
    "structured_outputs_config": None,
    "profiler_config": None,
    "attention_config": None,
    "kv_cache_memory_bytes": None,
    "compilation_config": 3,
    "quantization_config": None,
    "logits_processors": [],
    "spec_method": None,
    "spec_model": None,
    "spec_tokens": None,
    "disable_log_stats": True,
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "block_size": 16,
    "data_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "limit_mm_per_prompt": {"image": 1},
    "enable_lora": False,
    "max_logprobs": 20,
    "generation_config": "auto",
    "load_format": "auto",
    "enable_sleep_mode": True,
    "distributed_executor_backend": None,
}


@pytest.mark.parametrize("name", OF_LLM)
def test_each_argument_of_vllms_llm_has_an_answer(name: str) -> None:
    config = config_of("m", {name: OF_LLM[name]})
    assert config.model == "m" and config.trust_request_chat_template


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logits_processors": ["a.b"]}, "--logits-processors is not supported"),
        ({"pooler_config": {"pooling_type": "CLS"}}, "--pooler-config is not supported"),
    ],
)
def test_an_argument_that_would_change_answers_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(StartupError, match=message):
        config_of("m", given)


def test_prompts_have_the_forms_of_vllm() -> None:
    assert (
        as_prompts("a") == ["a"] and as_prompts([1, 2]) == [[1, 2]] and as_prompts({"prompt": "a"}) == [{"prompt": "a"}]
    )
    assert as_prompts(["a", [1]]) == ["a", [1]] and as_prompts([]) == []
    assert prompt_of({"prompt": "a", "cache_salt": "s"}) == ("a", {"cache_salt": "s"})
    assert prompt_of({"prompt": "a", "prompt_token_ids": [1]}) == ([1], {})
    for prompt, message in (
        ({"prompt": "a", "multi_modal_data": {"image": 1}}, "images go into messages of LLM.chat"),
        ({"role": "user", "content": "a"}, "messages are for LLM.chat"),
        ({"prompt": None}, "a prompt is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            prompt_of(prompt)


def test_options_have_the_names_of_vllm() -> None:
    given = {"truncation": True, "max_length": 5, "add_special_tokens": False}
    assert client_options({"tokenization_kwargs": given, "cache_salt": "s"}) == {
        "cache_salt": "s",
        "truncate_prompt_tokens": 5,
        "add_special_tokens": False,
    }
    with pytest.raises(ValueError, match=r"tokenization_kwargs\['padding'\] is not supported"):
        client_options({"tokenization_kwargs": {"padding": True}})
    with pytest.raises(ValueError, match="mm_processor_kwargs is not supported"):
        client_options({"mm_processor_kwargs": {"a": 1}})
