"""The names that adapters may have."""

import re

# As of models: `org/name`. A name may be a path below a directory, so that no part may be "..".
_NAME = re.compile(r"(?!.*(?:^|/)\.\.?(?:/|$))[A-Za-z0-9][A-Za-z0-9._:+@/-]{0,254}")
RULE = "use up to 255 letters, digits and ._:+@/-, with a letter or digit first and no parts . or .."


def is_adapter_name(name: str) -> bool:
    """Returns whether an adapter can have this name."""
    return _NAME.fullmatch(name) is not None
