"""Pushed folders enter the store in a process of their own, so that a big one stalls no stream.

The process is spawned, never forked: a fork would copy gRPC's locks without the threads that hold them.
"""

import asyncio
import dataclasses
import functools
import logging
import multiprocessing
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar

from adapter_store import (
    ModelSpec,
    Publisher,
    PushOptions,
    PushWarning,
    TenantFull,
    Version,
    VersionState,
    open_store,
)
from adapter_store.manifest import AS_IT_COMES
from adapter_store.peft.text_rules import read_text_rules
from adapter_store.peft.tokenizer import PushedTemplate, read_chat_template
from scheduler.adapters.template_trial import try_template
from scheduler.errors import StoreUnavailable
from scheduler.text.chat import ChatTemplates

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Push:
    """Where a folder goes, and how. The trial of its template may add to the warnings."""

    tenant: str
    name: str
    options: PushOptions = AS_IT_COMES

    def with_warnings(self, warnings: Iterable[PushWarning]) -> "Push":
        """The same push with these behind its own."""
        told = (*self.options.warnings, *warnings)
        return dataclasses.replace(self, options=dataclasses.replace(self.options, warnings=told))


@dataclasses.dataclass(frozen=True, slots=True)
class Pushed:
    """`created`: whether this content was new under this name."""

    version: Version
    created: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PushLimits:
    """None: as it comes. Several schedulers that push at once may each go beyond `max_versions` by one."""

    max_rank: int | None = None
    max_versions: int | None = None  # of a tenant


class Ingest:
    """Runs Publisher.put for one store, one push at a time; and first each push's chat template."""

    def __init__(
        self,
        store_url: str,
        templates: ChatTemplates,
        *,
        allow_volatile: bool = False,
        limits: PushLimits | None = None,
    ) -> None:
        self._store = store_url, allow_volatile
        self._templates = templates
        self._limits = limits or PushLimits()
        self._lock = threading.Lock()
        self._pool: ProcessPoolExecutor | None = None

    async def put(self, folder: Path, push: Push, spec: ModelSpec) -> Pushed:
        """Takes `folder` over: it is removed when the process is done with it.

        A push that runs when its caller is cancelled runs on: it must not lose its files half-way. Raises
        what Publisher.put raises, TenantFull, and InvalidAdapter for a chat template that cannot run.
        """
        future = None
        try:
            push = push.with_warnings(await self._try_template(folder, spec, push.tenant))
            future = self._submit(_put, *self._store, self._limits, spec, folder, push)
            future.add_done_callback(lambda _: _remove(folder))
            return await asyncio.wrap_future(future)
        except BrokenProcessPool as error:
            logger.error("the ingest process died while it checked %s/%s", push.tenant, push.name)
            self._forget_pool()
            raise StoreUnavailable("the process that checks adapters died; try again") from error
        finally:
            if future is None:
                _remove(folder)

    def close(self) -> None:
        """Waits for the running push."""
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)

    async def _try_template(self, folder: Path, spec: ModelSpec, tenant: str) -> list[PushWarning]:
        """Before anything is stored. Read in the process, as a tokenizer's config may be large."""
        template, tokens = await asyncio.wrap_future(self._submit(_read_template, folder, spec))
        if template is None:
            return []
        return await try_template(self._templates, template, tokens, tenant=tenant)

    def _submit(self, call: Callable[..., T], *arguments: object) -> "Future[T]":
        with self._lock:
            if self._pool is None:
                spawn = multiprocessing.get_context("spawn")
                self._pool = ProcessPoolExecutor(1, spawn, initializer=_begin)
            return self._pool.submit(call, *arguments)

    def _forget_pool(self) -> None:
        with self._lock:
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(wait=False)


def _begin() -> None:
    """First in the process."""
    # A Ctrl-C reaches all processes of a terminal; this one ends with the scheduler, in order.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with_scheduler, name="scheduler-watch", daemon=True).start()


def _end_with_scheduler() -> None:
    """A scheduler that is killed closes no pool. What a push leaves half-made, the store sweeps out."""
    scheduler = multiprocessing.parent_process()
    if scheduler is not None:
        scheduler.join()
        os._exit(1)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _store(url: str, allow_volatile: bool) -> Publisher:
    """Opened once a process: opening reads every record, to sweep out what crashes left."""
    return open_store(url, allow_volatile=allow_volatile)


def _read_template(folder: Path, spec: ModelSpec) -> tuple[PushedTemplate | None, Mapping[str, str]]:
    """The template with the special tokens of its own that it will have. Raises InvalidAdapter."""
    template, _ = read_chat_template(folder)
    if template is None:
        return None, {}
    rules, _ = read_text_rules(folder, spec)
    return template, dict(rules.special_tokens)


def _put(
    store_url: str, allow_volatile: bool, limits: PushLimits, spec: ModelSpec, folder: Path, push: Push
) -> Pushed:
    store = _store(store_url, allow_volatile)
    record = store.record(push.tenant, push.name)
    before = {d for d, entry in record.versions.items() if entry.state is not VersionState.DELETED}
    put = functools.partial(store.put, folder, push.tenant, push.name, spec)
    options = dataclasses.replace(push.options, max_rank=limits.max_rank)
    is_full = limits.max_versions is not None and store.count(push.tenant) >= limits.max_versions
    if is_full and put(dataclasses.replace(options, dry_run=True)).digest not in record.versions:
        raise TenantFull(
            f"tenant {push.tenant} has {limits.max_versions} versions and may have no more: remove some, and "
            "let `gc` take them"
        )
    version = put(options)
    return Pushed(version, created=version.digest not in before)
