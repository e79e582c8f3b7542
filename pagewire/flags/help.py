"""What `--help` prints: flags in groups, or one group of them."""

import argparse
import dataclasses
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pagewire.config.profiles import PROFILES
from pagewire.flags.names import ENVIRONMENT_PREFIX, base_type, flag_name, is_list

# Group -> what it decides, in the order in which they are shown.
GROUPS = {
    "batch": "",
    "generation": "",
    "model": "Which model, and how its checkpoint, templates and marks are read",
    "images": "Images in prompts",
    "network": "Where clients and neighbours find it, and who may",
    "scheduling": "Which requests run when, and which are refused",
    "memory": "What the KV cache and its neighbours take",
    "executor": "What computes, on which devices",
    "speculation": "Drafting several tokens that one step checks",
    "tokenizer": "Workers that turn text to tokens and back",
    "storage": "What is kept on disk, and for how long",
    "recovery": "What happens when a process ends, dies or hangs",
    "observability": "Logs, metrics and traces",
}


class _HelpFormatter(argparse.HelpFormatter):
    """`--[no-]flag` in one word, and each flag's help on a column wide enough for the longest name."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)

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
    """topic: a group, or all of them."""
    groups: dict[str, list[dataclasses.Field[Any]]] = {field.metadata["group"]: [] for field in fields.values()}
    for field in fields.values():
        groups[field.metadata["group"]].append(field)
    names = sorted(groups, key=lambda name: list(GROUPS).index(name) if name in GROUPS else -1)
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=" ".join([prog, *(f"[{name.upper()}]" for name in positionals), "[flags]"]),
        description=description,
        epilog=_epilog(names, flags_only),
        add_help=False,
        formatter_class=_HelpFormatter,
    )
    if topic not in groups:
        _add_common(parser, flags_only)
    for name in [topic] if topic in groups else names:
        group = parser.add_argument_group(name, GROUPS.get(name) or None)
        for field in groups[name]:
            _add_flag(group, field)
    return parser.format_help()


def _epilog(groups: Sequence[str], flags_only: bool) -> str:
    sizes = "Sizes take k, m, g (powers of 1000) and K, M, G or Ki, Mi, Gi, KiB, MiB, GiB (powers of 1024)."
    if flags_only:
        return sizes
    return (
        f"{sizes} Every flag is also a key of the YAML file given by --config (max-num-seqs: 64) and an environment"
        f" variable ({ENVIRONMENT_PREFIX}MAX_NUM_SEQS=64). A flag wins over the environment, the environment over the"
        " file, the file over the profile. Flags of vLLM that mean nothing here are answered by a line each."
        f" `--help GROUP` shows one group of: {', '.join(groups)}."
    )


def _add_common(parser: argparse.ArgumentParser, flags_only: bool) -> None:
    parser.add_argument("-h", "--help", metavar="GROUP", nargs="?", help="show this, or one group of flags")
    if flags_only:
        return
    parser.add_argument("--config", metavar="FILE", help="YAML file with any of these flags")
    parser.add_argument(
        "--profile",
        metavar="{" + ",".join(PROFILES) + "}",
        help="values for one purpose, where no other source has any: "
        + "; ".join(f"{profile.name} = {profile.purpose}" for profile in PROFILES.values()),
    )
    parser.add_argument(
        "--show-config",
        metavar="FORMAT",
        nargs="?",
        help="print every value, where it comes from and what it costs or saves, and exit; --show-config=json for"
        " programs",
    )


def _add_flag(group: Any, field: dataclasses.Field[Any]) -> None:
    text = field.metadata["help"].replace("%", "%%")
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
