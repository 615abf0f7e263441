"""Twenty minutes of everything: `make soak`. Whatever a fleet holds must stay flat, and no error be its own.

Guests ask for answers that are known, in every way there is; operators push versions, move aliases, pin,
drain, delete and collect; executors are killed, drained and scaled, Redis restarts and stands still, a
scheduler restarts. Meanwhile memory, threads, descriptors, metrics, the spool and Redis are watched.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from lorafleet.bench.results import head, write
from tests.support.adapters.peft import make_base
from tests.support.adapters.tokenizers import CHAT_TEMPLATE, byte_level, write_folder
from tests.support.services.cluster import Cluster
from tests.support.soak.fleet import Fleet, Size
from tests.support.soak.run import report, soak


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.soak", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--minutes", type=float, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quotas", action="store_true", help="tenants have some, and one asks for more")
    parser.add_argument("--ledger", action="store_true", help="schedulers keep one")
    args = parser.parse_args()
    said, size = head("python -m tests.support.soak"), Size(quotas=args.quotas, ledger=args.ledger)
    with tempfile.TemporaryDirectory() as folder:
        model = make_base(Path(folder) / "model", vocab_size=448, std=0.15, max_position_embeddings=4096)
        write_folder(model, byte_level(), chat_template=CHAT_TEMPLATE)
        with Cluster(model, Path(folder)) as cluster, Fleet(cluster, size) as fleet:
            soaked = soak(fleet, args.minutes * 60, args.seed)
            result = {**said, **report(fleet, soaked)}
    write(args.json, result)
    for fault in result["faults"]:
        sys.stdout.write(f"{fault}\n")
    sys.exit(bool(result["faults"]))


if __name__ == "__main__":
    main()
