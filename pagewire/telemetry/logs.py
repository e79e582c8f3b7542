"""The format of log lines of every process; cheap to import for the supervisor."""

import json
import logging
import os
import re
import sys
import time
from typing import Any

from pagewire.config import ServiceConfig

# A message may contain text of clients, which must not look like another line or control the terminal.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029]")

# The name of one of several services of a kind, such as executor-1, from the program that starts them. Behind OF it has
# the model, if there are several.
NAME, OF = "PAGEWIRE_SERVICE_NAME", " of "
# Attributes that records may have besides their message.
_IDS = ("request_id", "trace_id")


def _harmless(message: str) -> str:
    """Indents further lines and escapes control characters."""
    escaped = _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), message)
    return escaped.replace("\n", "\n    ")


class _TextFormatter(logging.Formatter):
    def __init__(self, service: str, model: str) -> None:
        of_model = f"[{model}] ".replace("%", "%%") if model else ""
        super().__init__(f"%(asctime)s %(levelname).1s {service:<9} {of_model}%(message)s", "%H:%M:%S")

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = _harmless(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: Any) -> str:
        return _harmless(super().formatException(ei))

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        return line + "".join(f" {name}={value}" for name in _IDS if (value := getattr(record, name, None)))


class _JsonFormatter(logging.Formatter):
    def __init__(self, service: str, model: str) -> None:
        super().__init__()
        self._service = {"service": service} | ({"model": model} if model else {})

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            **self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name in _IDS if (value := getattr(record, name, None))}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def setup(service: str, config: ServiceConfig) -> None:
    """Sets up logging to stderr, with the format and the level of the configuration. service: its kind."""
    name, _, model = os.environ.get(NAME, "").partition(OF)
    if name.startswith(f"{service}-"):
        service = name
    handler = logging.StreamHandler(sys.stderr)
    formatter = _JsonFormatter if config.log_format == "json" else _TextFormatter
    handler.setFormatter(formatter(service, model))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.upper())
    for noisy in ("asyncio", "httpx", "httpx2", "urllib3", "filelock"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
