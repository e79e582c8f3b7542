"""The table of sampling parameters against the message that carries them, and what becomes of a message."""

import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor import FieldDescriptor
from hypothesis import given
from hypothesis import strategies as st

from pagewire.config import sampling_code
from pagewire.config.sampling_checks import check_for_model, check_num_prompt_logprobs, resolve
from pagewire.config.sampling_params import MIN_TEMPERATURE, PARAMETERS, Parameter, with_defaults
from pagewire.errors import InvalidRequest
from pagewire.v1.common_pb2 import Grammar, SamplingParams, Thinking, TokenSequence
from pagewire.wire import sampling_options
from tests.makers.sampling_values import a_value, wrong_values

REPOSITORY = Path(__file__).parents[3]
FIELDS = SamplingParams.DESCRIPTOR.fields_by_name
TYPES = {
    FieldDescriptor.TYPE_FLOAT: float,
    FieldDescriptor.TYPE_INT32: int,
    FieldDescriptor.TYPE_INT64: int,
    FieldDescriptor.TYPE_BOOL: bool,
}


def of(**fields: Any) -> SamplingParams:
    return SamplingParams(**fields)


def test_the_table_has_every_field_with_one_value() -> None:
    single = {
        name: TYPES[field.type] for name, field in FIELDS.items() if not field.is_repeated and not field.message_type
    }
    assert {parameter.name: parameter.type for parameter in PARAMETERS} == single
    assert len(PARAMETERS) == len(single), "none twice"


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_a_parameter_has_a_valid_default_and_room_on_the_wire(parameter: Parameter) -> None:
    if parameter.default is not None:
        assert parameter.default in parameter.valid
        # Otherwise what is not sent would read as something else.
        assert FIELDS[parameter.name].has_presence or parameter.default == 0
    if parameter.type is int:
        for end in (parameter.valid.minimum, parameter.valid.maximum):
            assert end is not None, "what no field can carry has to be refused before"
            of(**{parameter.name: end})


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_a_wrong_value_is_named_with_what_is_allowed(parameter: Parameter) -> None:
    wrong = [float("nan"), math.inf, -math.inf] if parameter.type is float else []
    for value in [*wrong, *wrong_values(parameter)]:
        try:
            params = of(**{parameter.name: value})
        except ValueError:
            continue  # no client can send it
        with pytest.raises(InvalidRequest, match=f"^{parameter.name} is .*; it must be ") as error:
            resolve(params)
        assert str(error.value).endswith(parameter.allowed)
        assert error.value.field == f"sampling_params.{parameter.name}"


@given(
    st.fixed_dictionaries({}, optional={parameter.name: st.just(a_value(parameter)) for parameter in PARAMETERS}),
    st.lists(st.integers(0, 99), max_size=3),
)
def test_a_resolved_message_says_everything_and_changes_nothing(given: dict[str, Any], token_ids: list[int]) -> None:
    message = of(**given, stop_token_ids=token_ids, logit_bias_ids=token_ids, logit_bias_values=[1.0] * len(token_ids))
    before = message.SerializeToString()
    resolved = resolve(message)
    assert message.SerializeToString() == before
    for parameter in PARAMETERS:
        name = parameter.name
        if name in given:
            assert getattr(resolved, name) == given[name]
        elif parameter.default is not None:
            assert getattr(resolved, name) == parameter.default
        else:
            assert resolved.HasField(name) == (name == "seed")  # type: ignore[arg-type]
    for name in ("stop_token_ids", "logit_bias_ids", "logit_bias_values"):
        assert getattr(resolved, name) == getattr(message, name)
    assert resolve(resolved) == with_defaults(resolved) == resolved


def test_a_drawn_seed_is_another_each_time() -> None:
    assert len({resolve(of()).seed for _ in range(10)}) == 10


@pytest.mark.parametrize(("temperature", "greedy"), [(1e-38, True), (9e-6, True), (2e-5, False), (0.5, False)])
def test_a_tiny_temperature_is_greedy(temperature: float, greedy: bool) -> None:
    assert (temperature < MIN_TEMPERATURE) == greedy
    assert (with_defaults(of(temperature=temperature)).temperature == 0) == greedy


def test_what_belongs_together_is_checked_together() -> None:
    resolve(of(min_tokens=4, max_tokens=4))
    resolve(of(min_tokens=4))
    with pytest.raises(InvalidRequest, match=r"min_tokens is 5; it must be in \[0, max_tokens\]"):
        resolve(of(min_tokens=5, max_tokens=4))
    with pytest.raises(InvalidRequest, match="logit_bias_values has 1 entries, but logit_bias_ids has 2"):
        resolve(of(logit_bias_ids=[1, 2], logit_bias_values=[1.0]))
    with pytest.raises(InvalidRequest, match=r"logit_bias_values of token 7 is -101; it must be in \[-100, 100\]"):
        resolve(of(logit_bias_ids=[7], logit_bias_values=[-101.0]))


def test_what_the_model_allows() -> None:
    check_for_model(of(logprobs=5, stop_token_ids=[0, 9], logit_bias_ids=[9]), vocab_size=10, max_logprobs=5)
    with pytest.raises(InvalidRequest, match="logprobs is 6, but this model returns at most 5"):
        check_for_model(of(logprobs=6), vocab_size=10, max_logprobs=5)
    with pytest.raises(InvalidRequest, match="stop_token_ids contains -1; the vocabulary is 0 to 9"):
        check_for_model(of(stop_token_ids=[3, -1]), vocab_size=10, max_logprobs=5)
    with pytest.raises(InvalidRequest, match="allowed_token_ids contains 10; the vocabulary is 0 to 9"):
        check_for_model(of(allowed_token_ids=[3, 10]), vocab_size=10, max_logprobs=5)
    with pytest.raises(InvalidRequest, match=r"bad_words\[1\] contains 10; the vocabulary is 0 to 9"):
        check_for_model(of(bad_words=bad_words([1], [3, 10])), vocab_size=10, max_logprobs=5)
    with pytest.raises(InvalidRequest, match="allowed_token_ids has 11 ids, and the vocabulary only 10"):
        check_for_model(of(allowed_token_ids=[1] * 11), vocab_size=10, max_logprobs=5)
    with pytest.raises(InvalidRequest, match="logit_bias_ids contains 10; the vocabulary is 0 to 9"):
        check_for_model(of(logit_bias_ids=[3, 10]), vocab_size=10, max_logprobs=5)


def bad_words(*words: list[int]) -> list[TokenSequence]:
    return [TokenSequence(token_ids=word) for word in words]


CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"allowed_token_ids": [7], "min_tokens": 1}, "min_tokens is 1, but all allowed tokens are end tokens"),
    ({"allowed_token_ids": [2, 7], "stop_token_ids": [2], "min_tokens": 3}, "all allowed tokens are end tokens"),
    ({"stop_token_ids": range(10), "min_tokens": 1}, "all allowed tokens are end tokens"),
    ({"allowed_token_ids": [3], "bad_words": bad_words([3], [4, 5])}, "bad_words has all tokens that are allowed"),
]
POSSIBLE: list[dict[str, Any]] = [
    {"allowed_token_ids": [7]},
    {"allowed_token_ids": [7], "min_tokens": 1, "ignore_eos": True},
    {"allowed_token_ids": [2, 7], "min_tokens": 1},
    {"allowed_token_ids": [7], "min_tokens": 1, "grammar": Grammar(regex="a")},
    {"allowed_token_ids": [3], "bad_words": bad_words([3, 3])},
]


@pytest.mark.parametrize(("params", "message"), CONTRADICTIONS)
def test_parameters_that_leave_no_token_are_refused(params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_for_model(of(**params), vocab_size=10, max_logprobs=5, eos_token_ids=[7])


@pytest.mark.parametrize("params", POSSIBLE)
def test_parameters_that_leave_a_token_are_possible(params: dict[str, Any]) -> None:
    check_for_model(of(**params), vocab_size=10, max_logprobs=5, eos_token_ids=[7])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"bad_words": bad_words([1], [])}, r"bad_words\[1\] has 0 tokens; 1 to 64 are possible"),
        ({"bad_words": bad_words([1] * 65)}, r"bad_words\[0\] has 65 tokens"),
        ({"bad_words": bad_words(*[[1]] * 2049)}, "bad_words has 2049 sequences"),
    ],
)
def test_restrictions_that_cannot_be_followed_are_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        resolve(SamplingParams(**fields))


def test_a_description_begins_with_the_name_of_its_field() -> None:
    """Services that know a field by another name replace the beginning."""
    wrong = of(
        **{"top_p": 2.0, "min_tokens": 5, "max_tokens": 4, "logit_bias_ids": [1], "logit_bias_values": [200.0]},
        grammar=Grammar(regex="a", whitespace_pattern=" "),
        thinking=Thinking(budget=-1),
        allowed_token_ids=[1],
        bad_words=bad_words([]),
    )
    violations = list(violations_of(lambda: resolve(wrong)))
    of_model = of(logprobs=9, prompt_logprobs=9, stop_token_ids=[99], bad_words=bad_words([99]))
    violations += violations_of(lambda: check_for_model(of_model, vocab_size=10, max_logprobs=5))
    violations += violations_of(lambda: check_num_prompt_logprobs(of(prompt_logprobs=9), 10**6))
    assert len(violations) == 11
    for field, description in violations:
        assert description.startswith(f"{field.removeprefix('sampling_params.')} "), field


def violations_of(check: Callable[[], object]) -> Sequence[tuple[str, str]]:
    with pytest.raises(InvalidRequest) as error:
        check()
    return error.value.violations


def test_the_python_types_are_in_step_with_the_table() -> None:
    assert sampling_code.code() == Path(sampling_options.__file__).read_text(), "run `make options`"


# Where a parameter that kernels read has to occur: an implementation that lacks it ignores it silently. Floats are rows
# of one matrix, which the reference reads by name.
KERNELS = ("kernels/triton", "kernels/fallback", "tests/kernels")


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda parameter: parameter.name)
def test_a_row_of_the_table_has_reached_every_place(parameter: Parameter) -> None:
    """Everything else is made from the table. tests/services/executor has a test of processed log probabilities."""
    if parameter.column is None:
        places: tuple[str, ...] = (f"services/{parameter.service}",)
    else:
        shared = "kernels/sampling_parameters.py" if parameter.type is float else "kernels/reference"
        places = (shared, *KERNELS)
    missing = [place for place in places if not is_named_in(REPOSITORY / place, parameter.name)]
    assert not missing, f"{parameter.name} is not used in: {', '.join(missing)}"


def is_named_in(place: Path, name: str) -> bool:
    word = re.compile(rf"(?<![a-z]){name.removesuffix('_penalty')}", re.IGNORECASE)
    return any(word.search(path.read_text()) for path in ([place] if place.is_file() else place.rglob("*.py")))
