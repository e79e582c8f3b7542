"""Writes pagewire/wire/sampling_options.py: the table of sampling parameters as Python types, for type checkers.

`make options` runs it; `tests/pagewire/config/test_sampling_params.py` checks that the file is in step with the table.
"""

from pagewire.config.sampling_params import PARAMETERS, Parameter

_HEAD = '''"""The sampling parameters with one value, as Python types.

Generated from the table in pagewire/config/sampling_params.py by `make options`; do not edit.
"""

from dataclasses import dataclass
from typing import TypedDict


class ParameterOptions(TypedDict, total=False):
    """Options of the Python client; None leaves one unset."""

'''
_DATACLASS = '''

@dataclass(kw_only=True)
class ParameterFields:
    """Fields of `pagewire.SamplingParams`; None leaves one unset."""

'''


def _type(parameter: Parameter) -> str:
    return parameter.type.__name__ if parameter.type is bool else f"{parameter.type.__name__} | None"


def code() -> str:
    """Returns the content of the file."""
    options = [f"    {one.name}: {_type(one)}\n" for one in PARAMETERS]
    fields = [f"    {one.name}: {_type(one)} = {False if one.type is bool else None}\n" for one in PARAMETERS]
    return "".join([_HEAD, *options, _DATACLASS, *fields])


if __name__ == "__main__":
    print(code(), end="")
