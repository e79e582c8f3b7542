"""The template of --chat-template, and the syntax of all templates."""

import os
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext

from pagewire.errors import StartupError


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %} marks assistant text for training; here it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (jinja declares it so)

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Any) -> str:
        return caller()


EXTENSIONS = (_GenerationTag, jinja2.ext.loopcontrols)


def read_template(path_or_template: str) -> str:
    """Reads the value of --chat-template, which is a file or the template itself.

    Raises StartupError if it is neither, cannot be read, or is not valid jinja.
    """
    template = path_or_template
    if not any(mark in template for mark in ("{%", "{{", "{#", "\n")):
        path = Path(template)
        if not os.path.isfile(path):  # noqa: PTH113 (the other raises an error for a name that is too long)
            raise StartupError(
                f"--chat-template {template!r:.200} is neither a file nor a jinja template: correct the path, or leave "
                "it out"
            )
        try:
            template = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise StartupError(f"--chat-template {path}: cannot be read as UTF-8 text ({error}); correct it") from error
    try:
        jinja2.Environment(extensions=EXTENSIONS).parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise StartupError(
            f"--chat-template is not valid jinja, line {error.lineno}: {error.message}; correct it"
        ) from error
    return template
