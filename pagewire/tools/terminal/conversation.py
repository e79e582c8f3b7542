"""A conversation in the terminal: its messages, its settings, and the commands that change them."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagewire.config.sampling_checks import check_value
from pagewire.config.sampling_params import BY_NAME, Parameter
from pagewire.errors import InvalidRequest
from pagewire.v1.inference_pb2 import Model

Message = dict[str, Any]

HELP = """\
/help               this
/system TEXT        instructions before the first message; without TEXT: none
/set                the settings; /set NAME VALUE changes one, /set NAME is the default again
/clear              forgets the conversation
/save FILE          writes the conversation as JSON; /load FILE continues it
/exit               leaves, as Ctrl-D does
Ctrl-C stops an answer. Alt-Enter begins a new line, as does a \\ at the end of one;
\"\"\" begins and ends several lines."""

# Sampling parameters that make sense in a chat: log probabilities are not shown, and an answer has to end.
_SETTINGS = tuple(name for name in BY_NAME if name not in ("ignore_eos", "logprobs", "prompt_logprobs", "priority"))
# Used if neither the user nor the server names any sampling: at temperature 1, small models lose coherence, and without
# a penalty they repeat themselves.
_READS_WELL = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}


class CommandError(Exception):
    """Raised for a command that cannot be executed; the message states the remedy."""


def chat_defaults(model: Model) -> dict[str, float]:
    """Returns the default sampling of a chat: none if the server has defaults, the model's or the operator's."""
    return {} if model.default_sampling_source else dict(_READS_WELL)


@dataclass
class Conversation:
    """A chat. settings: sampling parameters that the user set. defaults: values of the others. of_server: what the
    server takes for those that are in neither. first: the index of the first message that is still sent; earlier ones
    no longer fit."""

    system: str | None = None
    settings: dict[str, float] = field(default_factory=dict)
    defaults: Mapping[str, float] = field(default_factory=dict)
    of_server: Mapping[str, float] = field(default_factory=dict)
    turns: list[Message] = field(default_factory=list)
    first: int = 0

    @property
    def messages(self) -> list[Message]:
        """All messages."""
        return [*self._opening, *self.turns]

    def asking(self, question: str) -> list[Message]:
        """Returns the messages that make the model answer the question."""
        return [*self._opening, *self.turns[self.first :], {"role": "user", "content": question}]

    def add(self, question: str, answer: str) -> None:
        self.turns += [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    @property
    def _opening(self) -> list[Message]:
        return [{"role": "system", "content": self.system}] if self.system else []

    @property
    def sampling_params(self) -> dict[str, Any]:
        """Returns the sampling parameters. If the user set a temperature, there are no defaults."""
        return self.settings if "temperature" in self.settings else {**self.defaults, **self.settings}

    def command(self, line: str) -> str:
        """Executes a line that begins with /, and returns the text for the user. Raises CommandError."""
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        match name:
            case "/help" | "/?":
                return HELP
            case "/system":
                self.system = rest or None
                return ""
            case "/clear" | "/reset":
                self.turns.clear()
                self.first = 0
                return ""
            case "/set":
                return self._set(rest)
            case "/save":
                return self._save(_file(name, rest))
            case "/load":
                return self._load(_file(name, rest))
        raise CommandError(f"unknown command {name}; /help lists them")

    def _set(self, rest: str) -> str:
        name, _, value = rest.partition(" ")
        if name == "system":  # Ollama's form
            self.system = value.strip() or None
            return ""
        if name:
            if name not in _SETTINGS:
                raise CommandError(f"no setting {name}; there are {', '.join(_SETTINGS)}")
            if value.strip():
                self.settings[name] = _value(BY_NAME[name], value.strip())
            else:
                self.settings.pop(name, None)
            return ""
        return "\n".join(f"{name:<20}{self._shown(name)}" for name in _SETTINGS)

    def _shown(self, name: str) -> str:
        given = self.sampling_params
        if name in given:
            return str(given[name])
        return f"{self.of_server[name]} (default)" if name in self.of_server else "(default)"

    def _save(self, path: Path) -> str:
        text = json.dumps({"messages": self.messages}, indent=2, ensure_ascii=False)
        try:
            path.write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise CommandError(f"{path} cannot be written: {error.strerror}") from error
        return f"{len(self.messages)} messages are in {path}"

    def _load(self, path: Path) -> str:
        try:
            messages = json.loads(path.read_text(encoding="utf-8"))["messages"]
            turns = [{"role": str(message["role"]), "content": str(message["content"])} for message in messages]
        except OSError as error:
            raise CommandError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{path} is not a conversation that /save wrote") from error
        self.system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else None
        self.turns[:], self.first = turns, 0
        return f"{len(messages)} messages are loaded"


def _file(command: str, name: str) -> Path:
    if not name:
        raise CommandError(f"name a file: {command} chat.json")
    return Path(name).expanduser()


def _value(parameter: Parameter, text: str) -> float:
    try:
        value = parameter.type(text)
        if not math.isfinite(value):
            raise ValueError
        check_value(parameter.name, value, parameter)
    except InvalidRequest as error:
        raise CommandError(str(error)) from error
    except ValueError as error:
        raise CommandError(f"{parameter.name} is {text}; it must be {parameter.allowed}") from error
    return value
