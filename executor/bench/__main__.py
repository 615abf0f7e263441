"""`python -m executor.bench --json FILE [PART ...]`: times of the engine's parts on a GPU."""

import argparse
from pathlib import Path

from executor.bench import guided, host_step, marked_steps, page_in, sampling, traffic
from lorafleet.bench.results import Results, head

PARTS = {
    "page_in": page_in.run, "sampling": sampling.run, "host_step": host_step.run, "traffic": traffic.run,
    "marked_steps": marked_steps.run, "guided": guided.run,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m executor.bench", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--revision", help="what is measured, where the folder is no git checkout")
    args = parser.parse_args()
    results = Results(args.json, head("python -m executor.bench", args.revision))
    for part in args.parts or PARTS:
        for row in PARTS[part]():
            results.add(row)


if __name__ == "__main__":
    main()
