"""Real services for tests: the one-machine launcher, and what its executors count."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lorafleet.bench.metrics import samples, scrape
from lorafleet.local import LocalConfig, LocalFleet

# One thread: the threads of an operation wait for each other, which is slow where tests share few cores.
QUICK = ("--torch-threads", "1", "--log-level", "debug")
# On a GPU kernels may have to be compiled first.
_READY_S = 400


@contextmanager
def running_fleet(
    model: Path,
    store: Path,
    *executor_args: str,
    scheduler_args: tuple[str, ...] = (),
    executors: int = 1,
) -> Iterator[LocalFleet]:
    """A ready fleet on free ports; its log goes to <store>/../fleet.log, for a look after a failure."""
    with (store.parent / "fleet.log").open("a") as file:

        def log(service: str, line: str) -> None:
            file.write(f"{service}: {line}\n")
            file.flush()

        config = LocalConfig(
            model,
            store,
            port=0,
            metrics_port=0,
            executors=executors,
            scheduler_args=scheduler_args,
            executor_args=(*QUICK, *executor_args),
        )
        with LocalFleet(config, log) as fleet:
            fleet.wait_ready(_READY_S)
            yield fleet


def read_metrics(url: str) -> dict[str, float]:
    """Samples by name; those with labels as name{label=value,...}, labels sorted."""
    return {sample.name + _labels(sample.labels): sample.value for sample in samples(scrape(url))}


def _labels(labels: dict[str, str]) -> str:
    return "{" + ",".join(f"{k}={v}" for k, v in sorted(labels.items())) + "}" if labels else ""
