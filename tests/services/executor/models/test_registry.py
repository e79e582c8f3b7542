"""The registry, and the page that is made of it: every row has a test, and the page is current."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire.services.executor.loading.weights.prefix import renamed
from pagewire.services.executor.models.registry import ARCHITECTURES, THROUGH_TRANSFORMERS
from pagewire.services.executor.models.registry.table import example_model, page
from tests.services.executor.models.tiny import assert_same_logits, load, save_tiny

TESTS = Path(__file__).parents[3]
DOCS = TESTS.parent / "docs"


def marked(tree: ast.AST) -> Iterator[str]:
    """Names in `pytest.mark.architecture(...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.architecture":
            yield from (ast.literal_eval(argument) for argument in node.args)


def test_every_architecture_is_compared_with_its_reference() -> None:
    files = TESTS.rglob("test_*.py")
    names = {name for file in files for name in marked(ast.parse(file.read_text()))}
    untested = ARCHITECTURES.keys() - names
    assert not untested, f"mark the test that compares {sorted(untested)} with @pytest.mark.architecture(...)"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_names_of_tensors_begin_as_stated(name: str) -> None:
    """A checkpoint with a model's own names keeps them; one that something wraps loses what that put in front."""
    architecture = ARCHITECTURES[name]
    names = list(example_model(architecture).load_targets())
    assert list(renamed(names, architecture.prefixes, architecture.base).values()) == names
    assert list(renamed([f"module.{own}" for own in names], {}, architecture.base).values()) == names


@pytest.mark.parametrize("name", THROUGH_TRANSFORMERS)
def test_architectures_through_transformers(tmp_path: Path, name: str) -> None:
    sizes = {"head_dim": 8} if name == "HeliumForCausalLM" else {}
    expected = save_tiny(tmp_path, name.removesuffix("ForCausalLM"), **sizes)
    assert_same_logits(load(tmp_path), expected)


def test_the_page_of_models_is_current() -> None:
    figures = json.loads((DOCS / "models.json").read_text())
    assert page(figures) == (DOCS / "models.md").read_text(), (
        "run `python -m pagewire.services.executor.models.registry.table docs/models.json > docs/models.md`"
    )
