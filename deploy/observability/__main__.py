"""Writes the dashboards and rules: python -m deploy.observability. With other objectives than ours:

python -m deploy.observability --ttft 1 --tpot 0.1 --share 0.999 --runbook https://wiki.example/runbook.md --out DIR
"""

import argparse
import json
from pathlib import Path

from deploy.observability import rules
from deploy.observability.dashboards import dashboards

HERE = Path(__file__).parent
RUNBOOK = "docs/runbook.md"


def files(goal: rules.Objectives, runbook: str = RUNBOOK) -> dict[str, str]:
    """Contents by path."""
    made = {"prometheus/pagewire.rules.yml": rules.text(goal, runbook)}
    for dashboard in dashboards(goal):
        made[f"grafana/dashboards/{dashboard.uid}.json"] = json.dumps(dashboard.json(), indent=1) + "\n"
    return made


def main() -> None:
    goal = rules.Objectives()
    parser = argparse.ArgumentParser(prog="python -m deploy.observability", description="Writes dashboards and rules.")
    parser.add_argument("--ttft", type=float, default=goal.ttft_s, help="seconds to the first token")
    parser.add_argument("--tpot", type=float, default=goal.tpot_s, help="seconds per token behind it")
    parser.add_argument("--share", type=float, default=goal.share, help="of requests that are to be good, 0 to 1")
    parser.add_argument("--runbook", default=RUNBOOK, help="address of docs/runbook.md, for links of alerts")
    parser.add_argument("--out", type=Path, default=HERE, help="directory to write to")
    args = parser.parse_args()
    try:
        goal = rules.Objectives(args.ttft, args.tpot, args.share)
    except ValueError as error:
        parser.error(str(error))
    for path, content in files(goal, args.runbook).items():
        target = args.out / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(content)


if __name__ == "__main__":
    main()
