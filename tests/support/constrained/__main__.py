"""A thousand random schemas, and those of a folder, asked of real services: `make constraints`.

SmolLM2 with the demo's adapters through two slots. Each answer that ends by itself must fit its schema, each
that is cut must be the beginning of one that does.
"""

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from scheduler.bench.about import about

from adapter_store import ModelSpec
from adapter_store.base.end_tokens import read_end_tokens
from lorafleet import AsyncClient, Client
from lorafleet.constraints.tokens import guide_tokenizer
from lorafleet.demo.model import default_cache, prepare_model
from lorafleet.demo.run import ADAPTERS
from lorafleet.terminal import ProgressBar
from tests.support.constrained.asking import ANSWER_S, Asker
from tests.support.constrained.schemas import Schema, drawn, of_suite
from tests.support.services.fleet import running_fleet

SLOTS = ("--max-loras", "2", "--max-seats", "16")


async def ask(target: str, model: Path, sources: dict[str, list[Schema]], tokens: int) -> dict[str, Any]:
    guide = guide_tokenizer(model, ModelSpec.from_folder(model).vocab_size, read_end_tokens(model))
    names = [None, *sorted(path.name for path in ADAPTERS.iterdir() if path.is_dir())]
    async with AsyncClient(target, timeout=ANSWER_S) as client:
        asker = Asker(client, guide, names, tokens)
        return {source: (await asker.ask(schemas)).report() for source, schemas in sources.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.support.constrained", description=__doc__)
    parser.add_argument("--json", type=Path, required=True, help="where results go")
    parser.add_argument("--count", type=int, default=1000, help="of random schemas")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--suite", type=Path, help="a checkout of the JSON Schema test suite")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer at most")
    args = parser.parse_args()
    said, sources = about("tests.support.constrained"), dict[str, list[Schema]]()
    if args.count:
        sources["random"] = drawn(args.count, args.seed)
    if args.suite:
        sources["suite"] = list(of_suite(args.suite))
    model = prepare_model(default_cache(), ProgressBar().update)
    with tempfile.TemporaryDirectory() as name, running_fleet(model, Path(name) / "store", *SLOTS) as fleet:
        with Client(fleet.target) as client:
            for folder in sorted(path for path in ADAPTERS.iterdir() if path.is_dir()):
                client.adapters.push(folder, folder.name)
        results = asyncio.run(ask(fleet.target, model, sources, args.tokens))
    args.json.write_text(json.dumps({**said, **results}, indent=1) + "\n")
    wrong = sum(len(result["wrong"]) + sum(result["failed"].values()) for result in results.values())
    sys.stdout.write(f"{wrong} wrong or failed\n")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
