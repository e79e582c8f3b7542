"""The operator's defaults for the form of outputs: --structured-outputs-config."""

from pagewire.v1.common_pb2 import Grammar


def disable_whitespace(grammar: Grammar) -> None:
    """Applies the default to a grammar of JSON that does not name its whitespace."""
    if grammar.WhichOneof("form") == "json_schema" and not grammar.HasField("whitespace_pattern"):
        grammar.disable_any_whitespace = True
