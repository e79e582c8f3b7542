"""The files of an installation: one top-level name, and in it everything that the folders at the top hold."""

from pathlib import Path

from hatchling.builders.wheel import WheelBuilder

REPOSITORY = Path(__file__).parents[2]
FOLDERS = ("gateway", "kernels", "quantize", "services")


def test_the_wheel_has_one_top_level_name_and_copies_of_all_folders() -> None:
    paths = {file.distribution_path for file in WheelBuilder(str(REPOSITORY)).recurse_included_files()}
    assert {path.partition("/")[0] for path in paths} == {"pagewire"}
    sources = {path for folder in FOLDERS for path in (REPOSITORY / folder).rglob("*") if path.is_file()}
    sources |= set((REPOSITORY / "protos/pagewire/v1").glob("*.py"))
    for path in sources:
        if "__pycache__" not in path.parts:
            inside = path.relative_to(REPOSITORY).as_posix().removeprefix("protos/pagewire/")
            assert f"pagewire/{inside}" in paths


def test_folders_are_linked_into_the_package() -> None:
    for name in FOLDERS:
        assert (REPOSITORY / "pagewire" / name).readlink() == Path("..") / name
    assert (REPOSITORY / "pagewire/v1").readlink() == Path("../protos/pagewire/v1")
