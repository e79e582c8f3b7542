"""The flags of speculative decoding."""

import dataclasses
import json
from pathlib import Path

import pytest

from pagewire.config import ExecutorConfig
from pagewire.config.speculation import METHODS, Speculation, older_flags
from pagewire.errors import StartupError


def of(config: object = None, **flags: object) -> Speculation | None:
    text = config if config is None or isinstance(config, str) else json.dumps(config)
    return Speculation.of(ExecutorConfig(speculative_config=text, **flags))  # type: ignore[arg-type]


def test_ngrams_draft_unless_another_method_or_none_is_named():
    default = Speculation("ngram", if_possible=True, draft_bounds=((16, 0),))
    assert of() == of(spec_method="auto") == of({"method": "auto"}) == default
    assert of(spec_method="ngram+self") == dataclasses.replace(default, with_copy=True)
    with pytest.raises(StartupError, match="leave the draft model out"):
        of(spec_method="ngram+self", spec_model="self:q4")
    fewer = dataclasses.replace(default, num_speculative_tokens=3, adaptive=False)
    assert of({"num_speculative_tokens": 3, "adaptive": False}) == fewer
    by_size = of({"num_speculative_tokens_per_batch_size": [[1, 40, 2]]})
    assert by_size == dataclasses.replace(default, draft_bounds=((1, 2),))
    assert of(speculative_disable_by_batch_size=4) == dataclasses.replace(default, draft_bounds=((4, 0),))
    assert of(spec_method="none") is None and of({"method": "none"}) is None
    assert of(spec_method="none", spec_tokens=4) is None
    for named in (of({"method": "suffix"}), of(spec_method="suffix"), of({"method": "suffix"}, spec_method="auto")):
        assert named == Speculation("suffix")


def test_all_ways_of_asking_for_ngrams_say_the_same():
    expected = Speculation("ngram", 7, prompt_lookup_max=4, prompt_lookup_min=3)
    lookup = {"prompt_lookup_max": 4, "prompt_lookup_min": 3}
    assert of({"method": "ngram", "num_speculative_tokens": 7, **lookup}) == expected
    assert of({"method": "ngram_gpu", "num_speculative_tokens": 7, "rejection_sample_method": "standard", **lookup})
    assert of(lookup, spec_method="ngram", spec_tokens=7) == expected
    older = {"ngram_prompt_lookup_max": 4, "ngram_prompt_lookup_min": 3}
    assert of(speculative_model="[ngram]", num_speculative_tokens=7, **older) == expected
    assert of({"model": "[ngram]", "num_speculative_tokens": 7, **lookup}) == expected


def test_the_method_follows_from_the_model():
    for model, method in (("self:q4", "self"), ("some/Model-EAGLE3-x", "eagle3"), ("/models/small", "draft_model")):
        speculation = of(spec_model=model)
        assert speculation is not None and (speculation.method, speculation.model) == (method, model)


def test_vllms_names_of_mtp_layers_mean_the_method():
    for name in ("mtp", "deepseek_mtp", "mimo_mtp", "glm4_moe_mtp"):
        speculation = of({"method": name, "num_speculative_tokens": 1})
        assert speculation is not None and speculation.method == "mtp"


def test_one_bound_of_the_lookup_does_not_contradict_the_other():
    high, low = of({"prompt_lookup_min": 9}, spec_method="ngram"), of({"prompt_lookup_max": 1}, spec_method="ngram")
    assert high is not None and (high.prompt_lookup_min, high.prompt_lookup_max) == (9, 9)
    assert low is not None and (low.prompt_lookup_min, low.prompt_lookup_max) == (1, 1)


def test_bounds_by_the_number_of_requests():
    ranges = of({"method": "suffix", "num_speculative_tokens_per_batch_size": [[9, 64, 1], [1, 8, 5]]})
    assert ranges is not None and ranges.draft_bounds == ((1, 5), (9, 1))
    by_size = {"num_speculative_tokens_per_batch_size": [[1, 8, 5], [40, 64, 1]]}
    both = of({"method": "suffix"} | by_size, speculative_disable_by_batch_size=32)
    assert both is not None and both.draft_bounds == ((1, 5), (32, 0))


@pytest.mark.parametrize(
    ("config", "flags", "message"),
    [
        ("{", {}, "is not JSON"),
        ([5], {}, "expected an object"),
        ({"methd": "ngram"}, {}, "unknown key methd; did you mean method"),
        ({"method": "medusa"}, {}, "unknown method 'medusa'; choose one of ngram, suffix"),
        ({"method": "draft_model"}, {}, 'add "model"'),
        ({"num_speculative_tokens": 99}, {}, "a whole number from 1 to 16, got 99"),
        ({"num_speculative_tokens": True}, {}, "a whole number from 1 to 16, got true"),
        ({"adaptive": 1}, {}, "adaptive: expected true or false, got 1"),
        ({"rejection_sample_method": "typical"}, {}, "never change the distribution"),
        (
            {"method": "ngram", "num_speculative_tokens_per_batch_size": [[1, 8, 5], [8, 9, 1]]},
            {},
            "8 requests in two ranges",
        ),
        ({"num_speculative_tokens_per_batch_size": [[8, 1, 5]]}, {}, "a list of"),
        (
            {"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 2},
            {},
            "prompt_lookup_min 5 is above prompt_lookup_max 2",
        ),
        ({"num_speculative_tokens": 3}, {"spec_tokens": 4}, "num_speculative_tokens is 4 and 3; give one of them"),
        (
            None,
            {"speculative_model_quantization": "fp8"},
            "--speculative-model-quantization has no effect without a draft model: add --spec-model, or leave it out",
        ),
        ({"revision": "v1"}, {}, "--speculative-config: revision has no effect without a draft model"),
        (None, {"speculative_model": "[ngram]", "spec_method": "suffix"}, "method is 'ngram' and 'suffix'"),
    ],
)
def test_what_is_wrong_is_named(config: object, flags: dict[str, object], message: str):
    with pytest.raises(StartupError) as raised:
        of(config, **flags)
    assert message in str(raised.value)


def test_older_names_are_answered_with_what_to_use_now():
    config = ExecutorConfig(speculative_model="[ngram]", num_speculative_tokens=5, ngram_prompt_lookup_max=4)
    assert older_flags(config) == [
        "--speculative-model is an older name: use --spec-model (or --spec-method ngram)",
        "--num-speculative-tokens is an older name: use --spec-tokens",
        "--ngram-prompt-lookup-max is an older name: use --speculative-config '{\"prompt_lookup_max\": ...}'",
    ]


def test_the_help_and_the_guide_name_each_method() -> None:
    (method,) = (one for one in dataclasses.fields(ExecutorConfig) if one.name == "spec_method")
    texts = method.metadata["help"], Path("docs/usage.md").read_text(encoding="utf-8")
    assert [(name, [name in text for text in texts]) for name in METHODS] == [(name, [True] * 2) for name in METHODS]
