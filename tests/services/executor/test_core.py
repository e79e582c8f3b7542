"""The executor's part of a request's way imports no feature: these enter by seams."""

from pathlib import Path

from tests.pagewire.test_imports import REPOSITORY, edges

ROOT = REPOSITORY / "services/executor"
CORE = ("service/servicer.py", "service/worker.py", "runner/model_runner.py")
FEATURES = (
    "grammar",
    "batch/images",
    "loading",
    "models/drafting",
    "models/vision",
    "runner/pipeline",
    "ranks",
    "speculation",
    "start",
    "graphs/recorded_steps.py",
    "runner/prompt_logprobs.py",
    "service/replacement.py",
    "service/sleep",
    "tiers",
)


def reachable(starts: list[Path]) -> set[Path]:
    imported: dict[Path, set[Path]] = {}
    for importer, file in edges("services/executor"):
        imported.setdefault(importer, set()).add(file)
    found, left = set[Path](), starts
    while left:
        found.update(left)
        left = [file for importer in left for file in imported.get(importer, ()) if file not in found]
    return found


def test_the_core_imports_no_feature() -> None:
    starts = [ROOT / name for name in CORE]
    assert all((ROOT / name).exists() for name in (*CORE, *FEATURES))
    core = {path.relative_to(ROOT) for path in reachable(starts)}
    wrong = {str(path) for path in core for feature in FEATURES if path.is_relative_to(feature)}
    assert not wrong, f"import these where the runner is assembled (start/assembly.py, main.py): {sorted(wrong)}"
    assert len(core) > 40
