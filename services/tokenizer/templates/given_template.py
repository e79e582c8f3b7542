"""The template of --chat-template."""

from pathlib import Path

import jinja2

from pagewire.services.tokenizer.templates.chat import ChatError, environment


def read_template(path_or_template: str) -> str:
    """Reads the value of --chat-template, which is a file or the template itself.

    Raises ChatError if it is neither, or not valid jinja.
    """
    if any(mark in path_or_template for mark in ("{%", "{{", "{#", "\n")):
        template = path_or_template
    else:
        path = Path(path_or_template)
        if not path.is_file():
            raise ChatError(f"--chat-template {path_or_template!r} is neither a file nor a jinja template")
        template = path.read_text(encoding="utf-8")
    try:
        environment().parse(template)
    except jinja2.TemplateSyntaxError as error:
        raise ChatError(f"--chat-template is not valid jinja, line {error.lineno}: {error.message}") from error
    return template
