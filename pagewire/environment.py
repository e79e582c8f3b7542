"""Is this environment the one that Pagewire was installed into?"""

import importlib.metadata
import importlib.util
from pathlib import Path

import pagewire
from pagewire.errors import StartupError

# Our top-level packages; their names are common words.
_PACKAGES = ("gateway", "kernels", "protos", "services")


def check_packages() -> None:
    """Raises StartupError when a foreign distribution takes the place of one of our packages, naming the cure."""
    home = Path(pagewire.__file__).resolve().parent.parent
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        if spec is None:
            continue
        locations = [Path(location).resolve() for location in spec.submodule_search_locations or ()]
        if home / name not in locations[:1]:
            found = locations[0] if locations else spec.origin
            raise StartupError(
                f"the Python package {name!r} in {found} hides Pagewire's own in {home / name}."
                f" Remove it (pip uninstall {name}) or install Pagewire in an environment of its own"
            )
    try:
        version = importlib.metadata.version("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    raise StartupError(
        f"Hugging Face's package 'kernels' {version} is installed; transformers would take Pagewire's `kernels` for"
        " it. Remove it (pip uninstall kernels) or install Pagewire in an environment of its own"
    )
