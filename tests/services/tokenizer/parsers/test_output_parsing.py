"""Reasoning and tool calls at the tokenizer's own API: separated, merged, resumed."""

import asyncio
import json
from pathlib import Path

import grpc
import pytest

from pagewire.files.tokenizer_files.loading import load_tokenizer
from pagewire.services.tokenizer.output import text_output
from pagewire.services.tokenizer.output.text_output import TextDelta
from pagewire.services.tokenizer.pool.codec_source import FileSource
from pagewire.services.tokenizer.pool.pool import TokenizerPool
from pagewire.v1 import common_pb2, inference_pb2
from pagewire.v1.inference_pb2 import GenerateResponse, OutputParsing, ToolCallDelta
from tests.services.tokenizer import tiny_tokenizers
from tests.services.tokenizer.chat_templates import FAMILIES
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine

ALL = OutputParsing(reasoning=True, tool_calls=True)
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 👍🏽", "days": 2}}\n</tool_call>'
OUTPUT = f"<think>\nWhere? 👍🏽\n</think>\n\nI look.\n{CALL}\n{CALL}"
CHAT = inference_pb2.ChatPrompt(messages=[inference_pb2.ChatMessage(role="user", content="Weather?")])
STOP, TOOL_CALLS = common_pb2.FINISH_REASON_STOP, common_pb2.FINISH_REASON_TOOL_CALLS


@pytest.fixture(scope="module")
def pool(smollm2_gguf: Path):
    pool = TokenizerPool(FileSource(str(smollm2_gguf), chat_template=FAMILIES["qwen3"]), size=1)
    yield pool
    pool.close()


@pytest.fixture
def make_line(tmp_path: Path, smollm2_gguf: Path, smollm2):
    def make(output: str = OUTPUT, eos: bool = True, config: dict | None = None, **scheduler) -> TokenizerLine:
        tokens = smollm2.encode(output, add_special_tokens=False) + [EOS] * eos
        return TokenizerLine(tmp_path, FakeScheduler(lambda request: tokens, **scheduler), smollm2_gguf, **config or {})

    return make


def merged(responses: list[GenerateResponse]) -> tuple[str, str, list[tuple[str, str]]]:
    """Returns (reasoning, text, calls)."""
    calls: list[list[str]] = []
    for delta in (delta for response in responses for delta in response.tool_calls):
        if delta.id:
            assert delta.index == len(calls)
            calls.append([delta.name, ""])
        calls[delta.index][1] += delta.arguments
    said = "".join(response.reasoning for response in responses), "".join(response.text for response in responses)
    return *said, [(name, arguments) for name, arguments in calls]


EXPECTED = ("Where? 👍🏽", "I look.", [("get_weather", '{"city": "Zürich 👍🏽", "days": 2}')] * 2)


@pytest.mark.parametrize("tokens_per_step", [1, 5, 1000])
async def test_an_output_is_separated(make_line, pool, tokens_per_step: int) -> None:
    async with make_line(tokens_per_step=tokens_per_step).running(pool=pool) as line:
        result = await line.generate(chat=CHAT, output_parsing=ALL)
        raw = await line.generate(chat=CHAT)
        only_calls = await line.generate(chat=CHAT, output_parsing=OutputParsing(tool_calls=True))
    assert merged(result.responses) == EXPECTED
    assert result.finish_reason == TOOL_CALLS
    assert (raw.text, raw.finish_reason) == (OUTPUT, STOP)
    assert result.token_ids == raw.token_ids
    assert merged(only_calls.responses)[:2] == ("", "<think>\nWhere? 👍🏽\n</think>\n\nI look.")


async def test_an_output_that_ends_too_early_has_no_other_reason_for_it(make_line, pool) -> None:
    async with make_line(eos=False).running(pool=pool) as line:
        result = await line.generate(chat=CHAT, output_parsing=ALL, sampling_params={"max_tokens": 40})
    assert result.finish_reason == common_pb2.FINISH_REASON_LENGTH
    [(name, arguments)] = merged(result.responses)[2]
    assert name == "get_weather" and EXPECTED[2][0][1].startswith(arguments)


async def test_logprobs_and_token_ids_are_those_of_all_tokens(make_line, pool) -> None:
    async with make_line().running(pool=pool) as line:
        result = await line.generate(chat=CHAT, output_parsing=ALL, sampling_params={"logprobs": 0})
    assert [token.token_id for token in result.logprobs] == result.token_ids
    assert merged(result.responses) == EXPECTED


async def test_a_request_that_is_resumed_repeats_and_loses_nothing(make_line, pool) -> None:
    """Resumes after every response. The prompt, which shows the parser how the output begins, is given as token ids."""
    async with make_line().running(pool=pool) as line:
        whole = await line.generate(chat=CHAT, output_parsing=ALL)
        prompt = inference_pb2.TokenIds(ids=whole.prompt_token_ids)
        for num_read in range(1, len(whole.responses)):
            before = whole.responses[:num_read]
            given = [token_id for response in before for token_id in response.token_ids]
            resumed = await line.generate(token_ids=prompt, resume_token_ids=given, output_parsing=ALL)
            assert merged([*before, *resumed.responses]) == EXPECTED
            assert resumed.finish_reason == TOOL_CALLS


async def test_a_resumed_request_that_had_met_its_stop_string_says_no_more(make_line, pool) -> None:
    async with make_line().running(pool=pool) as line:
        whole = await line.generate(chat=CHAT, output_parsing=ALL, stop=["</tool_call>"])
        prompt = inference_pb2.TokenIds(ids=whole.prompt_token_ids)
        again = await line.generate(
            token_ids=prompt, resume_token_ids=whole.token_ids, output_parsing=ALL, stop=["</tool_call>"]
        )
    assert merged(whole.responses) == (*EXPECTED[:2], EXPECTED[2][:1])
    assert merged(again.responses) == ("", "", [])
    assert whole.finish_reason == again.finish_reason == TOOL_CALLS


async def test_prompts_that_open_the_reasoning_are_recognized(make_line) -> None:
    line = make_line("Where?\n</think>\n\nThere.", config={"chat_template": FAMILIES["deepseek_r1"]})
    async with line.running():
        result = await line.generate(chat=CHAT, output_parsing=ALL)
        prompt = inference_pb2.TokenIds(ids=result.prompt_token_ids)
        resumed = await line.generate(
            token_ids=prompt, resume_token_ids=result.responses[0].token_ids, output_parsing=ALL
        )
    assert merged(result.responses) == ("Where?", "There.", [])
    assert merged([result.responses[0], *resumed.responses]) == ("Where?", "There.", [])


@pytest.mark.parametrize("tokens_per_step", [1, 1000])
async def test_reasoning_tokens_are_counted_over_a_resumption(make_line, smollm2, tokens_per_step: int) -> None:
    reasoning = "Where? There?\n</think"  # a mark of several tokens counts up to its last one
    expected = len(smollm2.encode(reasoning, add_special_tokens=False))
    line = make_line(
        f"{reasoning}>\n\nThere.", config={"chat_template": FAMILIES["deepseek_r1"]}, tokens_per_step=tokens_per_step
    )
    async with line.running():
        whole = await line.generate(chat=CHAT, output_parsing=ALL)
        prompt = inference_pb2.TokenIds(ids=whole.prompt_token_ids)
        resumed = await line.generate(token_ids=prompt, resume_token_ids=whole.token_ids[:3], output_parsing=ALL)
        unparsed = await line.generate(chat=CHAT)
    assert whole.usage.reasoning_tokens == resumed.usage.reasoning_tokens == expected
    assert unparsed.usage.reasoning_tokens == 0


JSON = {"grammar": common_pb2.Grammar(json_schema="{}")}


@pytest.mark.parametrize(
    ("template", "kwargs", "options", "expected"),
    [
        ("deepseek_r1", {}, {"thinking_token_budget": 7}, (True, 7)),
        ("qwen3", {}, {"thinking_token_budget": 0}, (False, 0)),
        ("qwen3", {}, {"sampling_params": JSON, "output_parsing": ALL}, (False, None)),
        # The prompt has ended the reasoning; it is not separated; there is nothing to restrict.
        ("qwen3", {"reasoning_effort": "none"}, {"sampling_params": JSON, "thinking_token_budget": 7}, None),
        ("qwen3", {}, {"sampling_params": JSON}, None),
        ("qwen3", {}, {"output_parsing": ALL}, None),
    ],
)
async def test_the_executor_learns_where_the_reasoning_is(
    make_line, smollm2, template: str, kwargs: dict, options: dict, expected: tuple | None
) -> None:
    chat = inference_pb2.ChatPrompt(messages=CHAT.messages, **kwargs)
    line = make_line("a", config={"chat_template": FAMILIES[template]})
    async with line.running():
        result = await line.generate(chat=chat, **options)
        prompt = inference_pb2.TokenIds(ids=result.prompt_token_ids)
        await line.generate(token_ids=prompt, resume_token_ids=result.token_ids[:1], **options)
    for request in line.scheduler.requests:
        params = request.sampling_params
        assert params.HasField("thinking") == (expected is not None)
        if expected is not None:
            thinking = params.thinking
            budget = thinking.budget if thinking.HasField("budget") else None
            assert (thinking.begun, budget) == expected
            assert smollm2.decode(list(thinking.start.token_ids), skip_special_tokens=False) == "<think>"
            assert smollm2.decode(list(thinking.end.token_ids), skip_special_tokens=False) == "</think>"


async def test_a_budget_needs_marks(make_line) -> None:
    async with make_line("a").running() as line:
        with pytest.raises(grpc.aio.AioRpcError, match="start the server with --reasoning-parser") as raised:
            await line.generate(chat=CHAT, thinking_token_budget=7)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_budget_of_reasoning_that_a_grammar_holds(make_line) -> None:
    """The grammar of GPT-OSS describes all messages."""
    tools = [inference_pb2.Tool(name="now", strict=True)]
    line = make_line("a", config={"chat_template": FAMILIES["gpt_oss"]})
    async with line.running():
        for strict in (True, False):
            tools[0].strict = strict
            chat = inference_pb2.ChatPrompt(messages=CHAT.messages, tools=tools)
            call = line.generate(chat=chat, output_parsing=ALL, thinking_token_budget=7)
            if strict:
                with pytest.raises(grpc.aio.AioRpcError, match="cannot be combined with strict tools"):
                    await call
            else:
                assert (await call).text == "a"


@pytest.mark.parametrize("skip_special_tokens", [True, False])
async def test_marks_that_are_special_tokens(tmp_path: Path, skip_special_tokens: bool) -> None:
    path = tiny_tokenizers.save_byte_level(
        tmp_path / "model", chat_template=FAMILIES["mistral"], extra_special_tokens=["[TOOL_CALLS]", "[ARGS]"]
    )
    (path / "config.json").write_text("{}")
    tokenizer = load_tokenizer(path)
    tokens = tokenizer.encode('Well.[TOOL_CALLS]now[ARGS]{"a": 1}', add_special_tokens=False)
    assert tokenizer.decode(tokens, skip_special_tokens=True) == 'Well.now{"a": 1}'
    line = TokenizerLine(tmp_path, FakeScheduler(lambda request: [*tokens, EOS]), path)
    options = {"skip_special_tokens": skip_special_tokens}
    async with line.running():
        result = await line.generate(chat=CHAT, output_parsing=OutputParsing(tool_calls=True), **options)
        plain = await line.generate(chat=CHAT, **options)
    assert merged(result.responses) == ("", "Well.", [("now", '{"a": 1}')])
    assert plain.text == tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"tool_call_parser": "none", "reasoning_parser": "none"}, ("", OUTPUT, [])),
        ({"tool_call_parser": "none"}, ("Where? 👍🏽", f"I look.\n{CALL}\n{CALL}", [])),
        ({"reasoning_parser": "deepseek_r1", "tool_call_parser": "hermes", "enable_auto_tool_choice": True}, EXPECTED),
    ],
)
async def test_flags_name_the_parsers(make_line, pool, flags: dict, expected: tuple) -> None:
    async with make_line(config=flags).running(pool=pool) as line:
        assert merged((await line.generate(chat=CHAT, output_parsing=ALL)).responses) == expected


def test_unread_output_is_merged_whole() -> None:
    """Strings of a protobuf message replace each other when messages are merged."""
    outputs = [
        GenerateResponse(reasoning="a", token_ids=[1]),
        GenerateResponse(reasoning="b", text="c", token_ids=[2]),
        TextDelta("d", [3], common_pb2.Usage()),
        GenerateResponse(tool_calls=[ToolCallDelta(id="x", name="f")]),
        GenerateResponse(tool_calls=[ToolCallDelta(arguments="{}")], finish_reason=TOOL_CALLS),
    ]
    said = text_output.merged(outputs)
    assert merged([said]) == ("ab", "cd", [("f", "{}")])
    assert (list(said.token_ids), said.finish_reason) == ([1, 2, 3], TOOL_CALLS)
    assert json.loads(said.tool_calls[1].arguments) == {}


TOOL = inference_pb2.Tool(name="get_weather", parameters_json='{"properties": {"city": {"type": "string"}}}')
WITH_TOOL = inference_pb2.ChatPrompt(messages=CHAT.messages, tools=[TOOL])


async def test_calls_may_be_required_over_grpc(make_line, pool) -> None:
    line = make_line('[{"name": "get_weather", "arguments": {"city": "Oslo"}}]')
    async with line.running(pool=pool):
        required = await line.generate(chat=WITH_TOOL, output_parsing=OutputParsing(required=True))
        # Tools that may be called need not be those that are shown.
        listed = await line.generate(chat=CHAT, output_parsing=OutputParsing(required=True, tools=[TOOL]))
    for result in (required, listed):
        assert merged(result.responses) == ("", "", [("get_weather", '{"city": "Oslo"}')])
    first, second = (request.sampling_params.grammar for request in line.scheduler.requests)
    assert "get_weather" in first.structural_tag and first == second


@pytest.mark.parametrize(
    ("template", "options", "num_calls"),
    [
        # A model without a format of calls was not trained to end a list of them.
        ("", {}, 1),
        ("", {"first_tool_call_only": False}, 2),
        ("qwen3", {}, 2),
        ("qwen3", {"first_tool_call_only": True}, 1),
    ],
)
async def test_how_many_calls_a_model_makes_of_which_one_is_required(
    make_line, template: str, options: dict[str, bool], num_calls: int
) -> None:
    call = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'
    line = make_line(f"[{call}, {call}]", config={"chat_template": FAMILIES[template]} if template else {})
    async with line.running():
        result = await line.generate(chat=WITH_TOOL, output_parsing=OutputParsing(required=True, **options))
    assert merged(result.responses)[2] == [("get_weather", '{"city": "Oslo"}')] * num_calls
    [request] = line.scheduler.requests
    calls = json.loads(request.sampling_params.grammar.structural_tag)["format"]["content"]
    assert calls["stop_after_first"] == (num_calls == 1)


async def test_equal_chats_of_which_one_must_be_called_have_prompts_of_their_own(make_line, smollm2) -> None:
    """SmolLM2's template shows no tools, so a prompt names them only if they must be called."""
    forms = [OutputParsing(required=True), OutputParsing(), OutputParsing(named="get_weather")]
    async with (line := make_line("{}")).running():
        results = await asyncio.gather(*(line.generate(chat=WITH_TOOL, output_parsing=form) for form in forms))
        counted = [
            await line.stub.Tokenize(inference_pb2.TokenizeRequest(chat=WITH_TOOL, output_parsing=form))
            for form in forms
        ]
    assert [one.token_ids for one in counted] == [result.prompt_token_ids for result in results]
    some, none, one = (smollm2.decode(result.prompt_token_ids, skip_special_tokens=True) for result in results)
    function = '{"name": "get_weather", "parameters": {"properties": {"city": {"type": "string"}}}}'
    assert f"You call functions. Functions: [{function}]" in some
    assert f"Call this function: {function}" in one
    assert "get_weather" not in none


@pytest.mark.parametrize("thought", ["", "<think>\nWhere?\n</think>\n\n"])
async def test_reasoning_before_calls_that_must_be(make_line, pool, thought: str) -> None:
    line = make_line(f'{thought}[{{"name": "get_weather", "arguments": {{"city": "Oslo"}}}}]')
    async with line.running(pool=pool):
        result = await line.generate(chat=WITH_TOOL, output_parsing=OutputParsing(required=True, reasoning=True))
    assert merged(result.responses) == ("Where?" * bool(thought), "", [("get_weather", '{"city": "Oslo"}')])
    # The grammar is for what comes after it.
    [request] = line.scheduler.requests
    assert request.sampling_params.HasField("thinking") and request.sampling_params.HasField("grammar")


async def test_schemas_of_tools_decide_what_is_text_even_after_a_restart(make_line) -> None:
    output = "<tool_call>\n<function=get_weather>\n<parameter=city>\n12\n</parameter>\n</function>\n</tool_call>"
    async with (line := make_line(output, config={"chat_template": FAMILIES["qwen3_coder"]})).running():
        whole = await line.generate(chat=WITH_TOOL, output_parsing=OutputParsing(tool_calls=True))
        untold = await line.generate(chat=CHAT, output_parsing=OutputParsing(tool_calls=True))
        before = whole.responses[:15]
        resumed = await line.generate(
            token_ids=inference_pb2.TokenIds(ids=whole.prompt_token_ids),
            resume_token_ids=[token_id for response in before for token_id in response.token_ids],
            output_parsing=OutputParsing(tool_calls=True, tools=[TOOL]),
        )
    assert merged(whole.responses) == ("", "", [("get_weather", '{"city": "12"}')])
    assert merged(untold.responses) == ("", "", [("get_weather", '{"city": 12}')])
    assert merged([*before, *resumed.responses]) == merged(whole.responses)


@pytest.mark.parametrize(
    ("chat", "parsing", "message"),
    [
        (CHAT, OutputParsing(required=True), "output_parsing.required needs tools"),
        (WITH_TOOL, OutputParsing(named="now"), "'now', which is not among the tools: get_weather"),
        (
            inference_pb2.ChatPrompt(
                messages=CHAT.messages, tools=[inference_pb2.Tool(name="f", parameters_json="[", strict=True)]
            ),
            OutputParsing(tool_calls=True),
            "schema of the parameters of 'f' is not valid JSON",
        ),
    ],
)
async def test_what_cannot_be_forced_is_refused(make_line, pool, chat, parsing: OutputParsing, message: str) -> None:
    async with (line := make_line()).running(pool=pool):
        with pytest.raises(grpc.aio.AioRpcError, match=message) as raised:
            await line.generate(chat=chat, output_parsing=parsing)
    assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT
