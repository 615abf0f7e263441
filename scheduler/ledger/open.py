"""The ledger that a scheduler's settings ask for."""

from functools import partial

from adapter_store.store import folder_of
from lorafleet.doors.settings import ConfigError
from scheduler.config import Config
from scheduler.ledger.files import LedgerFile
from scheduler.ledger.ledger import Ledger
from scheduler.ledger.metrics import LedgerMetrics
from scheduler.ledger.shipper import Keeping, Shipper, Streams


def open_ledger(config: Config, metrics: LedgerMetrics) -> Ledger:
    """Raises ConfigError for a folder that cannot be used."""
    if config.ledger_dir is None:
        return Ledger(metrics)
    try:
        file = LedgerFile(config.ledger_dir)
    except OSError as error:
        raise ConfigError(f"ledger_dir: {config.ledger_dir}: {error.strerror}") from error
    if folder_of(config.store) is not None:
        return Ledger(metrics, file)
    keeping = Keeping(config.ledger_keep, config.ledger_stream_days)
    opening = partial(_open_streams, config.store, config.allow_volatile)
    return Ledger(metrics, file, Shipper(file, opening, keeping))


def _open_streams(url: str, allow_volatile: bool) -> Streams:
    """Raises AdapterStoreError."""
    from adapter_store.redis_store.usage_streams import UsageStreams

    return UsageStreams.open(url, allow_volatile=allow_volatile)
