"""An engine without a model for the tests of `python -m benchmarks.peers`: its settings say how it behaves."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.engines.worker import Times, Unfinished, Work, main


@dataclass(frozen=True)
class Fake:
    """Every token of a load comes token_s after the one before. diary: a file that gets a line per load.

    fails_at: the output_len that it fails at. is_short: its answers lack a token.
    """

    name: str
    diary: str
    token_s: float = 0.01
    fails_at: int = -1
    is_short: bool = False

    def run(self, work: Work) -> list[Times]:
        print("libraries print what they like")
        with Path(self.diary).open("a") as file:
            print(self.name, len(work.prompts), work.output_len, file=file)
        if work.output_len == self.fails_at:
            raise ValueError("no such length")
        total = work.output_len * self.token_s
        if work.limit_s is not None and total > work.limit_s:
            raise Unfinished
        return [Times(5.0, 5.0 + self.token_s, 5.0 + total, work.output_len - self.is_short)] * len(work.prompts)


def load(settings: Mapping[str, Any]) -> Fake:
    if "refuses" in settings:
        raise ValueError(settings["refuses"])
    return Fake(**settings)


if __name__ == "__main__":
    sys.exit(main(load))
