"""Programs written for OpenAI, vLLM or SGLang: what they send is taken, under whatever name, or refused by name."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.gateway.chat.bodies import ChatCompletionRequest
from pagewire.gateway.completions.bodies import CompletionRequest
from pagewire.gateway.schema.unsupported import UNSUPPORTED
from tests.gateway.conftest import running_gateway, wait_ready
from tests.gateway.fake_tokenizer import FakeTokenizer
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def names_in(text: str) -> list[str]:
    return text.split()


# Of the bodies of OpenAI's API, vLLM 0.32 and SGLang 0.5.23, as their sources name them.
SAMPLING = names_in("""
    allowed_token_ids bad_words bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels
    custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank ebnf ec_transfer_params extra_key
    frequency_penalty ignore_eos images_config include_stop_str_in_output kv_transfer_params length_penalty logit_bias
    logprobs lora_path max_tokens min_p min_tokens mm_payload model n ngram_corpus_id no_stop_trim presence_penalty
    priority prompt_logprobs regex repetition_detection repetition_penalty request_id response_format
    return_cached_tokens_details return_hidden_states return_mm_kwargs return_routed_experts return_token_ids
    return_token_offsets return_tokens_as_token_ids return_weight_versions rid routed_dp_rank
    routed_experts_prompt_start routed_experts_start_len seed session_id session_params skip_special_tokens
    spaces_between_special_tokens stop stop_regex stop_token_ids stream stream_interval stream_options
    structured_outputs suffix temperature thinking_token_budget top_k top_p truncate_prompt_tokens truncation_side
    use_beam_search user vllm_xargs watermarking
""")
OF_CHATS = names_in("""
    add_generation_prompt add_special_tokens audio chat_template chat_template_kwargs continue_final_message documents
    echo function_call functions include_reasoning input_ids max_completion_tokens max_dynamic_patch media_io_kwargs
    messages metadata min_dynamic_patch mm_processor_kwargs modalities parallel_tool_calls prediction prompt_cache_key
    reasoning_effort return_meta_info return_prompt_text return_prompt_token_ids safety_identifier separate_reasoning
    service_tier store stream_reasoning tool_choice tools top_logprobs use_audio_in_video verbosity web_search_options
""")
OF_TEXTS = ["add_special_tokens", "best_of", "echo", "json_schema", "prompt", "prompt_embeds"]


@pytest.mark.parametrize(("body", "names"), [(ChatCompletionRequest, OF_CHATS), (CompletionRequest, OF_TEXTS)])
def test_no_parameter_of_others_is_unknown(body: type, names: list[str]) -> None:
    assert {*SAMPLING, *names} - body.model_fields.keys() - UNSUPPORTED.keys() == set()


OTHER_NAMES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"rid": "mine"}, {"request_id": "mine"}),
    ({"no_stop_trim": True}, {"include_stop_str_in_output": True}),
    ({"json_schema": '{"type": "object"}'}, {"guided_json": '{"type": "object"}'}),
    ({"regex": "a+"}, {"structured_outputs": {"regex": "a+"}}),
    ({"ebnf": 'root ::= "a"'}, {"structured_outputs": {"grammar": 'root ::= "a"'}}),
    ({"top_k": -1}, {"top_k": -1}),
    # What asks for nothing, or changes nothing.
    (
        {"session_id": "s", "custom_labels": {"a": "b"}, "spaces_between_special_tokens": False, "lora_path": None},
        {"watermarking": False, "stream_interval": 1, "return_hidden_states": False},
    ),
]


@pytest.mark.parametrize(("theirs", "ours"), OTHER_NAMES)
async def test_other_names_mean_the_same(
    client: httpx.AsyncClient, fake: FakeTokenizer, theirs: dict[str, Any], ours: dict[str, Any]
) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), (TEXT, {"prompt": "p"})):
        fake.received.clear()
        for extra in (theirs, ours):
            answer = await client.post(
                path, json=body | {"seed": 1} | extra, headers={} if "rid" in theirs else {"x-request-id": "same"}
            )
            assert answer.status_code == 200, answer.text
        assert fake.received[0] == fake.received[1]


async def test_one_meaning_is_said_once(client: httpx.AsyncClient) -> None:
    for extra, param in (
        ({"rid": "a", "request_id": "b"}, "rid"),
        ({"regex": "a", "guided_regex": "b"}, "regex"),
        ({"regex": "a", "ebnf": "b"}, "ebnf"),
    ):
        answer = await client.post(TEXT, json={"prompt": "p"} | extra)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_tiers_and_hints_of_openai(ai: openai.AsyncOpenAI) -> None:
    options: dict[str, Any] = {"model": "fake", "messages": MESSAGES, "max_tokens": 4, "store": True}
    prediction: Any = {"type": "content", "content": "hello"}
    answer = await ai.chat.completions.create(**options, service_tier="flex", prediction=prediction)
    assert answer.service_tier == "default"
    assert (await ai.chat.completions.create(**options)).service_tier is None
    stream = await ai.chat.completions.create(**options, service_tier="auto", stream=True)
    assert {chunk.service_tier async for chunk in stream} == {"default"}


TEMPLATE = "{{ verbosity }}:{% for d in documents %}{{ d.title }}={{ d.text }};{% endfor %}{{ messages[0].content }}"


async def test_a_template_of_the_request(tmp_path: Path, smollm2_gguf: Path) -> None:
    scheduler = FakeScheduler(lambda request: [EOS])
    body = {
        "messages": MESSAGES,
        "chat_template": TEMPLATE,
        "documents": [{"title": "Bergen", "text": "rain"}],
        "verbosity": "low",
    }
    for trusts in (True, False):
        line = TokenizerLine(tmp_path, scheduler, smollm2_gguf, trust_request_chat_template=trusts)
        async with line.running(), running_gateway(line.config.listen) as client:
            await wait_ready(client)
            answer = await client.post(CHAT, json=body)
            tokens = await client.post("/tokenize", json=body)
            if trusts:
                assert answer.status_code == 200, answer.text
                assert tokens.json()["tokens"] == list(scheduler.requests[-1].prompt_token_ids)
                text = load_tokenizer(smollm2_gguf).decode(tokens.json()["tokens"], skip_special_tokens=False)
                assert text == "low:Bergen=rain;hi"
            else:
                assert (answer.status_code, tokens.status_code) == (400, 400)
                assert "--trust-request-chat-template" in answer.json()["error"]["message"]
