"""The text of `--help`: flags in groups, or one group, or one flag."""

import argparse
import dataclasses
import re
import shutil
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pagewire.config import ServeConfig, vllm_flags
from pagewire.config.profiles import PROFILES
from pagewire.flags.costs import phrase, size_text
from pagewire.flags.names import ENVIRONMENT_PREFIX, base_type, did_you_mean, fields_of, flag_name, is_list

# Group -> its topic, in the order in which groups are shown.
GROUPS = {
    "batch": "",
    "generation": "",
    "model": "The model, its tokenizer, and its formats of chats, tool calls and reasoning",
    "models": "Several models behind one address",
    "images": "Images in prompts",
    "network": "Addresses, certificates and keys",
    "scheduling": "When requests run, and when they are refused",
    "memory": "The KV cache and other memory",
    "executor": "Processes and devices that compute",
    "speculation": "Drafts of several tokens that one step checks",
    "adapters": "Adapters (LoRA) that requests may name",
    "tokenizer": "Workers that convert text to tokens and back",
    "storage": "Files, responses and generations that are kept, and for how long",
    "recovery": "Processes that end, die or hang",
    "observability": "Logs, metrics and traces",
}
# From this many flags on, `--help` shows only those that most users need, with the first clause of each.
_MANY = 30
_COMMON = frozenset(
    (
        "model",
        "dtype",
        "quantization",
        "max_model_len",
        "served_model_name",
        "models",
        "chat_template",
        "seed",
        "host",
        "port",
        "grpc_port",
        "api_key",
        "api_key_file",
        "ssl_certfile",
        "ssl_keyfile",
        "listen",
        "tokenizer_address",
        "scheduler_address",
        "executor_address",
        "max_num_seqs",
        "max_num_batched_tokens",
        "max_queue_time",
        "enable_prefix_caching",
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "kv_cache_dtype",
        "device",
        "tensor_parallel_size",
        "data_parallel_size",
        "num_threads",
        "spec_method",
        "spec_model",
        "data_dir",
        "shutdown_timeout",
        "log_level",
    )
)
_CLAUSE = re.compile(r"(?:`[^`]*`|(?!; |: |, for instance| \().)+")
_OF_SERVE = frozenset(field.name for field in fields_of(ServeConfig))
_LONG_DEFAULT = 40
# Sizes in bytes; other sizes are tokens or numbers of things.
IN_BYTES = ("_bytes", "_store_size")
_DEFAULT = re.compile(r"\((default: .*)\)$")


def place_of(group: str) -> int:
    """Returns the position of a group; groups of a single command come first."""
    return list(GROUPS).index(group) if group in GROUPS else -1


class _HelpFormatter(argparse.HelpFormatter):
    """Writes `--[no-]flag` in one word, and aligns help texts in one column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=max(80, shutil.get_terminal_size((100, 0)).columns - 2))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if isinstance(action, argparse.BooleanOptionalAction):
            return "--[no-]" + action.option_strings[0][2:]
        return super()._format_action_invocation(action)


def text(
    fields: Mapping[str, dataclasses.Field[Any]],
    prog: str,
    description: str,
    positionals: Sequence[str],
    *,
    flags_only: bool,
    topic: str = "",
) -> str:
    """Returns the text of `--help` for a topic: all, a group, or a flag, also one of vLLM.

    Without a topic: all flags, or if there are many, the common ones with their first clauses. A command that takes the
    flags of `pagewire serve` besides its own shows its own.
    """
    name = topic.lstrip("-").replace("-", "_")
    if name in fields:
        parser = _parser(prog, [], "", "")
        _add_flag(parser, fields[name])
        effect = phrase(name, None, None)
        return parser.format_help().partition("options:\n")[2] + (f"\n  {effect}\n" if effect else "")
    if not flags_only and (entry := vllm_flags.FLAGS.get(name.replace("_", "-"))) is not None:
        return f"--{entry.name} (vLLM's): {entry.verdict} {flag_name(entry.to) if entry.to else ''}".rstrip() + (
            f": {entry.why}\n" if entry.why else "\n"
        )
    every = _by_group(fields.values())
    is_overview = len(fields) > _MANY and topic not in ("all", *every)
    own = [field for name, field in fields.items() if name not in _OF_SERVE]
    shown = own or [field for name, field in fields.items() if name in _COMMON]
    groups = _by_group(shown) if is_overview else every
    names = sorted(groups, key=place_of)
    takes_several = list(positionals) == ["model"] and "other_models" in fields
    words = ["MODEL ..."] if takes_several else [name.upper() for name in positionals]
    parser = _parser(
        prog, words, description, _epilog(prog, sorted(every, key=place_of), flags_only, is_overview, bool(own))
    )
    if topic not in groups:
        _add_common(parser, flags_only, in_full=not is_overview)
    for group_name in [topic] if topic in groups else names:
        group = parser.add_argument_group(group_name, None if is_overview else GROUPS.get(group_name) or None)
        for field in groups[group_name]:
            _add_line(group, field) if is_overview and not own else _add_flag(group, field)
    is_known = topic in ("", "all", *every)
    unknown = "" if is_known else f"No flag or group is named {topic}{did_you_mean(topic, [*every, *fields])}\n\n"
    return unknown + parser.format_help()


def _by_group(fields: Iterable[dataclasses.Field[Any]]) -> dict[str, list[dataclasses.Field[Any]]]:
    groups: dict[str, list[dataclasses.Field[Any]]] = {}
    for field in fields:
        groups.setdefault(field.metadata["group"], []).append(field)
    return groups


def _parser(prog: str, positionals: Sequence[str], description: str, epilog: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=prog,
        usage=" ".join([prog, *(f"[{name}]" for name in positionals), "[flags]"]),
        description=description,
        epilog=epilog,
        add_help=False,
        formatter_class=_HelpFormatter,
    )


def _epilog(prog: str, groups: Sequence[str], flags_only: bool, is_overview: bool, has_own: bool) -> str:
    sizes = "Sizes take k, m, g (powers of 1000) and K, M, G or Ki, Mi, Gi, KiB, MiB, GiB (powers of 1024)."
    others = (
        f"{prog} also takes the flags of `pagewire serve` about the model and how it runs: `pagewire serve --help` "
        "shows the common ones. "
        if has_own
        else "These are the common flags. "
    )
    more = (
        f"{others}`{prog} --help=all` shows every flag in full, `--help=FLAG` one flag (also one of vLLM), "
        f"`--help=GROUP` one group: {', '.join(groups)}. "
    )
    if flags_only:
        return sizes
    return (
        f"{more if is_overview else ''}{sizes} Every flag is also a key of the YAML file given by --config"
        f" (max-num-seqs: 64) and an environment variable ({ENVIRONMENT_PREFIX}MAX_NUM_SEQS=64). A flag wins over the"
        " environment, the environment over the file, the file over the profile."
    )


def _add_common(parser: argparse.ArgumentParser, flags_only: bool, *, in_full: bool) -> None:
    parser.add_argument("-h", "--help", metavar="WHAT", nargs="?", help="show this, or one flag or group in full")
    if flags_only:
        return
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these flags")
    purposes = {profile.name: f": {profile.purpose}" if in_full else "" for profile in PROFILES.values()}
    listed = ("; " if in_full else ", ").join(name + purpose for name, purpose in purposes.items())
    parser.add_argument(
        "--profile", metavar="NAME", help=f"values for one purpose, which other sources override; {listed}"
    )
    parser.add_argument(
        "--show-config",
        metavar="FORMAT",
        nargs="?",
        help="print every value with its source and its costs, and exit; FORMAT: text or json",
    )


def _add_line(group: Any, field: dataclasses.Field[Any]) -> None:
    """Adds the first clause of a help text, and the default."""
    clause = _CLAUSE.match(field.metadata["help"])
    stated = _DEFAULT.search(field.metadata["help"])
    value: Any = field.default
    in_bytes = isinstance(value, int) and field.metadata["kind"] == "size" and field.name.endswith(IN_BYTES)
    default = size_text(value) if in_bytes else "on" if value is True else str(value)
    default = (
        f" ({stated[1]})"
        if stated and len(stated[1]) < _LONG_DEFAULT
        else ""
        if stated
        else ""
        if value in (None, "", False)
        else f" ({default})"
    )
    text = ((clause[0] if clause else "") + default).replace("%", "%%")
    if field.type is bool:
        group.add_argument(flag_name(field.name), action=argparse.BooleanOptionalAction, help=text)
    else:
        group.add_argument(flag_name(field.name), metavar=_metavar(field), help=text)


def _add_flag(group: Any, field: dataclasses.Field[Any]) -> None:
    text: str = field.metadata["help"].replace("%", "%%")
    if field.type is bool:
        text += f" (default: {'on' if field.default else 'off'})"
        group.add_argument(flag_name(field.name), action=argparse.BooleanOptionalAction, help=text)
        return
    if field.default not in (None, "") and "default:" not in text:
        text += f" (default: {field.default})"
    choices = field.metadata["choices"]
    metavar = "{" + ",".join(choices) + "}" if choices else _metavar(field)
    names = [flag_name(field.name), *(f"-{short}" for short in field.metadata["short"])]
    group.add_argument(*names, metavar=metavar, help=text)


def _metavar(field: dataclasses.Field[Any]) -> str:
    if field.metadata["kind"] == "size":
        return "SIZE"
    if is_list(field):
        return "N,N,..."
    base = base_type(field)
    if typing.get_origin(base) is tuple:
        return "N,N,..."
    return "N" if base is int else "X" if base is float else field.name.rpartition("_")[2].upper()
