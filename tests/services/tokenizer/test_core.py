"""The path of a plain request imports no feature: features are handed in by `main.py`."""

from pathlib import Path

from tests.pagewire.test_imports import REPOSITORY, edges

ROOM = REPOSITORY / "services" / "tokenizer"
BEGINNINGS = ("service/servicer.py", "service/link_servicer.py")
FEATURES = ("generation/choices", "vectors", "images", "parsers")


def test_a_plain_request_meets_no_feature() -> None:
    imports: dict[Path, set[Path]] = {}
    for importer, imported in edges("services/tokenizer"):
        imports.setdefault(importer, set()).add(imported)
    core: set[Path] = set()
    waiting = {ROOM / name for name in BEGINNINGS}
    while waiting:
        core.add(path := waiting.pop())
        waiting |= imports.get(path, set()) - core
    names = {str(path.relative_to(ROOM)) for path in core}
    assert {"generation/text_generator.py", "output/text_stream.py", "scheduler_link.py", "pool/codec.py"} <= names
    assert not {name for name in names if name.startswith(FEATURES)}
