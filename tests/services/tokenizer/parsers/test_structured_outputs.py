"""Forms of outputs: the defaults of the operator, and choices without bad words."""

from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire.config.values.tokenizer import disables_whitespace
from pagewire.errors import StartupError
from pagewire.services.tokenizer.parsers.structured_outputs import leave_out
from pagewire.v1 import common_pb2
from pagewire.wire import rpc
from tests.services.tokenizer.service_line import EOS, FakeScheduler, TokenizerLine
from tests.services.tokenizer.tiny_tokenizers import save_byte_level


def grammar(form: str, **more: Any) -> common_pb2.SamplingParams:
    return common_pb2.SamplingParams(seed=1, grammar=common_pb2.Grammar(**{form: "{}"}, **more))


async def test_json_has_no_whitespace_if_the_operator_says_so(tmp_path: Path) -> None:
    flag = '{"disable_any_whitespace": true, "backend": "xgrammar"}'
    requests = {
        "json": (grammar("json_schema"), True),
        "a pattern of its own": (grammar("json_schema", whitespace_pattern=" ?"), False),
        "another form": (grammar("regex"), False),
        "no form": (common_pb2.SamplingParams(seed=1), None),
    }
    model = save_byte_level(tmp_path / "m")
    (model / "config.json").write_text("{}")
    scheduler = FakeScheduler(lambda request: [50, EOS])
    async with TokenizerLine(tmp_path, scheduler, model, structured_outputs_config=flag).running() as line:
        for name, (params, expected) in requests.items():
            await line.generate(text="a", sampling_params=params)
            sent = line.scheduler.requests[-1].sampling_params
            assert sent.HasField("grammar") == (expected is not None), name
            assert sent.grammar.disable_any_whitespace == bool(expected), name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"whitespace": true}', "unknown keys: whitespace; known are disable_any_whitespace, backend"),
        ('{"enable_in_reasoning": true}', "enable_in_reasoning is not supported: a form begins after"),
        ('{"disable_any_whitespace": 1}', "disable_any_whitespace is 1; it must be true or false"),
    ],
)
def test_a_default_without_meaning_is_refused(text: str, words: str) -> None:
    with pytest.raises(StartupError, match=words):
        disables_whitespace(text)


CHOICES = ["yes", "no", "yes, please", "yesterday", "Yes", "c++", "of c"]


@pytest.mark.parametrize(
    ("words", "left"),
    [
        ([], CHOICES),
        (["yes"], ["no", "yesterday", "Yes", "c++", "of c"]),
        ([" yes", "no"], ["yesterday", "Yes", "c++", "of c"]),
        (["c++"], ["yes", "no", "yes, please", "yesterday", "Yes", "of c"]),
        (["+", ","], ["yes", "no", "yesterday", "Yes", "of c"]),
        (["please", "(", "of c"], ["yes", "no", "yesterday", "Yes", "c++"]),
    ],
)
def test_choices_with_bad_words_are_not_offered(words: list[str], left: list[str]) -> None:
    grammar = common_pb2.Grammar(choice=common_pb2.Grammar.Choice(texts=CHOICES))
    leave_out(grammar, words)
    assert list(grammar.choice.texts) == left


@pytest.mark.parametrize(
    ("word", "without", "kept"),
    [
        ("猫", ["猫が好き", "黒猫"], ["犬"]),
        ("แมว", ["ฉันรักแมวมาก"], ["หมา"]),
        ("고양이", ["고양이가"], ["개"]),
        ("foo", ["foo_bar", "_foo", "foo2_foo", "猫foo猫"], ["food", "foo2", "fooé"]),
        ("foo_bar", ["a foo_bar"], ["foo", "bar"]),
        ("vi", ["vi ba"], ["việt"]),
        ("кот", ["кот!"], ["котик"]),
    ],
)
def test_words_are_whole_where_a_script_separates_them(word: str, without: list[str], kept: list[str]) -> None:
    grammar = common_pb2.Grammar(choice=common_pb2.Grammar.Choice(texts=[*without, *kept]))
    leave_out(grammar, [word])
    assert list(grammar.choice.texts) == kept


def test_searches_are_bounded_however_short_the_choices_are() -> None:
    phrases = [f"+{i}" for i in range(1024)]
    texts = ["a"] * (2**14 // 33)
    leave_out(common_pb2.Grammar(choice=common_pb2.Grammar.Choice(texts=texts)), phrases)
    with pytest.raises(rpc.RpcError, match="1024 texts to search for within 497 choices of 497 characters") as raised:
        leave_out(common_pb2.Grammar(choice=common_pb2.Grammar.Choice(texts=[*texts, "a"])), phrases)
    assert raised.value.code == grpc.StatusCode.INVALID_ARGUMENT


async def test_a_choice_of_bad_words_alone_is_refused(tmp_path: Path) -> None:
    model = save_byte_level(tmp_path / "m")
    (model / "config.json").write_text("{}")
    async with TokenizerLine(tmp_path, FakeScheduler(lambda request: [50, EOS]), model).running() as line:
        params = common_pb2.SamplingParams(seed=1, grammar={"choice": {"texts": ["yes", "no"]}})
        await line.generate(text="a", sampling_params=params, bad_words=["no"])
        assert list(line.scheduler.requests[-1].sampling_params.grammar.choice.texts) == ["yes"]
        with pytest.raises(grpc.aio.AioRpcError, match="bad_words leave no choice"):
            await line.generate(text="a", sampling_params=params, bad_words=["no", "yes"])
