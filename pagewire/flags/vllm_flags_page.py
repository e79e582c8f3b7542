"""Makes docs/from-vllm.md: `python -m pagewire.flags.vllm_flags_page > docs/from-vllm.md`."""

from collections.abc import Iterable, Iterator, Sequence

from pagewire.config import vllm_flags
from pagewire.flags.names import flag_name

_HEAD = """\
# Coming from vLLM

<!-- Made by `python -m pagewire.flags.vllm_flags_page`. -->

Pagewire takes a command line or a YAML file of `vllm serve` as it is: write `pagewire serve` instead of `vllm serve` or
`python -m vllm.entrypoints.openai.api_server`, and `pagewire.LLM(...)` instead of `vllm.LLM(...)`. Flags with the same
meaning have the same names, in every spelling of vLLM: `--max-num-seqs 64`, `--max-num-seqs=64`, `--max_num_seqs 64`,
`--enable-prefix-caching True`, `--no-enable-prefix-caching`, `-tp 2`, `--served-model-name a b`,
`--speculative-config.method ngram`. `pagewire serve ... --show-config` prints the resulting configuration and starts
nothing. One default differs: on CPUs, tokens are drafted, which changes no answer; `--spec-method none` turns that
off.

Pagewire answers every other flag of vLLM with one line, also flags of tutorials that vLLM has dropped. A flag with
another name here is renamed. A flag that changes no answer is ignored. A flag that asks for something that is not
served ends the command with exit code 2.

```
$ pagewire serve --swap-space 4 --task embed --worker-cls custom
pagewire serve: error: --worker-cls is not supported: code from outside is not loaded
```
"""


def page() -> str:
    """Returns the page in Markdown."""
    return "\n".join([_HEAD, *_renamed(), *_answered("Ignored", vllm_flags.IGNORED), *_refused(), *_values()])


def _renamed() -> Iterator[str]:
    yield from ("## Renamed", "", "| vLLM | Pagewire |", "|---|---|")
    for entry in _entries(vllm_flags.BECOMES):
        why = f" ({entry.why})" if entry.why else ""
        if not entry.values:
            yield f"| `--{entry.name}` | `{flag_name(entry.to)}`{why} |"
        for value, means in entry.values.items():
            spelled = f"--{entry.name} {value}" if entry.takes != "switch" else f"--{_no(value)}{entry.name}"
            meant = " ".join(f"{flag_name(name)} {text}" for name, text in means.items())
            yield f"| `{spelled}` | {f'`{meant}`' if meant else 'the case anyway'}{why} |"
        for value, reason in entry.refused.items():
            yield f"| `--{entry.name} {value}` | refused: {_cell(reason)} |"
    yield ""


def _no(value: str) -> str:
    return "" if value == "True" else "no-"


def _answered(title: str, verdict: str) -> Iterator[str]:
    yield from (f"## {title}", "", "| flags | because |", "|---|---|")
    by_answer: dict[str, list[str]] = {}
    for entry in _entries(verdict):
        harmless = f" (not {_listed(entry.harmless)})" if any(entry.harmless) else ""
        by_answer.setdefault(entry.why, []).append(f"`--{entry.name}`{harmless}")
    for why, flags in by_answer.items():
        yield f"| {', '.join(flags)} | {_cell(why)} |"
    yield ""


def _listed(values: Sequence[str]) -> str:
    """Lists values; numbers from 0 on become a range."""
    if len(values) > 2 and values == tuple(str(number) for number in range(len(values))):
        return f"`{values[0]}` to `{values[-1]}`"
    return ", ".join(f"`{value}`" for value in values if value)


def _refused() -> Iterator[str]:
    yield from _answered("Refused", vllm_flags.REFUSED)


def _values() -> Iterator[str]:
    yield from ("## Values", "", "Values of flags that both have.", "", "| vLLM | Pagewire |", "|---|---|")
    for name, values in vllm_flags.VALUES.items():
        by_meaning: dict[str, list[str]] = {}
        for spelled, value in values.items():
            by_meaning.setdefault(_meaning(value), []).append(f"`{spelled}`")
        for meaning, spellings in by_meaning.items():
            yield f"| `{flag_name(name)}` {', '.join(spellings)} | {_cell(meaning)} |"


def _meaning(value: vllm_flags.Value) -> str:
    if value.refused:
        return f"refused: {value.why}"
    means = f"`{value.means}`" if value.means else "as if the flag were not given"
    return f"{means}: {value.why}" if value.why else means


def _entries(verdict: str) -> Iterable[vllm_flags.VllmFlag]:
    return (entry for entry in vllm_flags.FLAGS.values() if entry.verdict == verdict)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    print(page())
