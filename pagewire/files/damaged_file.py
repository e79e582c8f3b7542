"""The remedy for a damaged file of a model."""

from pathlib import Path

_LFS_POINTER = b"version https://git-lfs.github.com/"


def remedy(path: Path) -> str:
    """Returns the end of the message, which differs for the pointers of a repository that was cloned without Git
    LFS."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(len(_LFS_POINTER)) == _LFS_POINTER
    except OSError:
        is_pointer = False
    if is_pointer:
        return "it is only the pointer that Git LFS puts in place of a file: run `git lfs pull` where it was cloned"
    return "download it again"
