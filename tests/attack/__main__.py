"""``python -m tests.attack --cases 2000 --seed 0``: attack what is read from disk, and count the ends."""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.attack.driver import Summary, run


def describe(answer: dict[str, Any]) -> str:
    """Say what happened in a case and how to see it again."""
    chosen = "".join(f" --kind '{name}'" for name in answer["kinds"])
    again = f"python -m tests.attack --seed {answer['seed']} --first {answer['case']} --cases 1{chosen}"
    lines = [
        f"FAILURE: seed {answer['seed']}, case {answer['case']}: "
        f"{answer['kind']}, {answer['action']}; {answer['how']}",
        f"    {answer['end']}: {answer['text'][:400]}",
        f"    again: {again}",
    ]
    return "\n".join([*lines, answer.get("trace", "")]).rstrip()


def main() -> int:
    """Run the cases; exit code 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.attack", description=__doc__)
    parser.add_argument("--cases", type=int, default=200, help="number of cases")
    parser.add_argument("--seed", type=int, default=0, help="decides everything")
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--kind", action="append", default=[], metavar="NAME", help="only this kind; repeatable")
    parser.add_argument("-v", "--verbose", action="store_true", help="also print the cases that held")
    args = parser.parse_args()
    summary = Summary()
    with tempfile.TemporaryDirectory(prefix="attack-") as home:
        for answer in run(Path(home), args.seed, range(args.first, args.first + args.cases), args.kind):
            summary.add(answer)
            if answer["verdict"] == "failure" or args.verbose:
                held = {**answer, "text": str(answer["text"])}
                sys.stdout.write((describe(held) if answer["verdict"] == "failure" else f"{held}") + "\n")
                sys.stdout.flush()
    ends = ", ".join(f"{n} {verdict}" for verdict, n in summary.verdicts.most_common())
    sys.stdout.write(f"{args.cases} cases of {len(summary.kinds)} kinds, seed {args.seed}: {ends}\n")
    return 1 if summary.failures else 0


if __name__ == "__main__":
    sys.exit(main())
