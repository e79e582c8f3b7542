"""Values of any sampling parameter of the table, for tests that hold for every one of them."""

from typing import Any

from pagewire.config.sampling_params import Parameter


def a_value(parameter: Parameter) -> Any:
    """Valid and not the default; exact in fp32."""
    values = (True,) if parameter.type is bool else (0.5, 2.0, -1.5) if parameter.type is float else (3, -3)
    return next(value for value in values if value in parameter.valid and value != parameter.default)


def wrong_values(parameter: Parameter) -> list[Any]:
    """One beyond each end of the range."""
    valid = parameter.valid
    beyond = [
        valid.above,
        None if valid.minimum is None else valid.minimum - 1,
        None if valid.maximum is None else max(valid.maximum + 1, valid.maximum * 1.1),
    ]
    return [parameter.type(value) for value in beyond if value is not None]
