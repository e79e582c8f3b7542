"""The operator's defaults for the form of outputs."""

from pathlib import Path
from typing import Any

import pytest

from pagewire.config.values.text import disables_whitespace
from pagewire.errors import StartupError
from pagewire.v1 import common_pb2
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
