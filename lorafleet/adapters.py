"""What operators do with adapters: `client.adapters`, with plain calls and for asyncio.

A ref is "[tenant/]name[@alias | @sha256:<64 hex>]": without a tenant it is the caller's own, without an alias
its "latest".
"""

import asyncio
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from contextlib import ExitStack, aclosing, closing
from functools import partial
from pathlib import Path

from lorafleet import adapter_operations as operations
from lorafleet import results
from lorafleet.archive import adapter_folder
from lorafleet.calls import AsyncCalls, Calls
from lorafleet.transfer import Download, Progress, push_messages


class Adapters:
    """The adapters of the scheduler that a Client is connected to."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def push(
        self,
        folder: str | Path,
        name: str,
        *,
        alias: str = "latest",
        strict: bool = False,
        strict_base: bool = False,
        dry_run: bool = False,
        expected_generation: int | None = None,
        on_progress: Progress | None = None,
    ) -> results.PushResult:
        """Upload a PEFT folder to "[tenant/]name" and move `alias` to it ("" moves none).

        `folder` may be a zip or tar of one, too: lorafleet/archive.py says which. strict refuses what would
        be taken with warnings, too; strict_base a base_model_name_or_path that differs from the served
        model's name. dry_run checks everything and keeps nothing. Raises Aborted unless the alias is at
        `expected_generation` (0: it does not exist); InvalidRequest or IncompatibleAdapter name the file,
        field or tensor, and the violations of InvalidRequest have the reasons of refused warnings.
        """
        operation = operations.push(name, alias, strict, strict_base, dry_run, expected_generation)
        with adapter_folder(Path(folder)) as ready:
            return self._calls.upload(operation, push_messages(ready, operation.request, on_progress))

    def pull(self, ref: str, folder: str | Path, *, on_progress: Progress | None = None) -> Path:
        """Download what this name pushed last of the version, byte for byte, into a new folder; returns it.

        Raises FileExistsError when the folder exists and is not empty; a failure leaves nothing behind.
        """
        messages = self._calls.stream(operations.pull(ref), self._calls.timeout)
        with Download(Path(folder), on_progress) as download, closing(messages):
            for message in messages:
                download.write(message)
            download.finish()
        return Path(folder)

    def get(self, ref: str) -> results.AdapterVersion:
        """One version."""
        return self._calls.unary(operations.get_adapter(ref))

    def list(self, name: str = "", *, tenant: str = "") -> tuple[results.AdapterVersion, ...]:
        """Versions by name, then digest: all of the tenant's, or those of one adapter."""
        return tuple(self._calls.pages(partial(operations.list_adapters, name, tenant)))

    def summaries(
        self, name: str = "", *, tenant: str = "", deleted: bool = False, after: str = ""
    ) -> Generator[results.AdapterSummary, None, None]:
        """The same as list, one after the other and without modules: for any number of versions, in little
        memory.

        deleted: those whose bytes are still to be collected, too. after: only names behind this text.
        """
        return self._calls.each(partial(operations.list_summaries, name, tenant, deleted, after))

    def delete(self, ref: str, *, force: bool = False, now: bool = False) -> str:
        """Take a version, or an alias with the version behind it, from all new requests; returns the digest.

        Requests that were accepted go on, or end with IncompatibleAdapter (ADAPTER_REMOVED) when `now` says
        so. `collect` frees the bytes; pushing the content again brings it back. Raises IncompatibleAdapter
        (IN_USE) while (another) alias or a protection points at it, unless `force` lifts them.
        """
        return self._calls.unary(operations.delete_adapter(ref, force, now))

    def set_alias(
        self, ref: str, target: str | Mapping[str, int], *, expected_generation: int | None = None
    ) -> results.AdapterAlias:
        """Point "[tenant/]name@alias" to `target`, a digest or another alias of that adapter; or split its
        traffic by weight, as {"v1": 90, "v2": 10}. All requests of one session_id get the same version."""
        return self._calls.unary(operations.set_alias(ref, target, expected_generation))

    def delete_alias(self, ref: str) -> None:
        """Remove "[tenant/]name@alias"; the version stays."""
        self._calls.unary(operations.delete_alias(ref))

    def aliases(self, name: str = "", *, tenant: str = "") -> tuple[results.AdapterAlias, ...]:
        """All aliases of the tenant, or those of one adapter."""
        return self._calls.unary(operations.list_aliases(name, tenant))

    def protect(self, ref: str) -> results.AdapterVersion:
        """Forbid the deletion of a version."""
        return self._calls.unary(operations.protect(ref))

    def unprotect(self, ref: str) -> results.AdapterVersion:
        """Allow it again."""
        return self._calls.unary(operations.unprotect(ref))

    def verify(self, ref: str = "") -> results.Verification:
        """Re-hash what is stored: one version, or all of the caller's. Damaged ones go into quarantine."""
        return self._calls.unary(operations.verify(ref))

    def residency(self, ref: str = "") -> tuple[results.Residency, ...]:
        """The copies on executors: of one version, or all."""
        return self._calls.unary(operations.residency(ref))

    def pin(self, ref: str, tier: str = "slot", *, executors: Sequence[str] = ()) -> results.Pinned:
        """Load a version on executors (all, when none is named) and keep it there, in a "slot" or in "host"
        memory, after their restart, too. Waits up to 30 s for them."""
        return self._calls.unary(operations.pin(ref, tier, executors))

    def unpin(self, ref: str, *, executors: Sequence[str] = ()) -> str:
        """End that; returns the digest."""
        return self._calls.unary(operations.unpin(ref, executors))

    def drop(self, ref: str, *, executors: Sequence[str] = ()) -> results.Freed:
        """Free the copies on executors, pinned ones too, as soon as nothing uses them; waits up to 30 s."""
        return self._calls.unary(operations.drop(ref, executors))

    def drain(self, ref: str) -> results.Freed:
        """Refuse new requests of a version, wait for the accepted ones, free every copy."""
        return self._calls.unary(operations.drain(ref))

    def activate(self, ref: str) -> results.AdapterVersion:
        """Take new requests of a draining version again. Pushing its content again does the same."""
        return self._calls.unary(operations.activate(ref))

    def delete_damaged(self, name: str, *, dry_run: bool = False) -> results.Collection:
        """Give up a name whose record is damaged, as `verify` tells: its versions are deleted, its aliases
        gone. `collect` frees the bytes. AdapterNotFound when nothing is damaged there."""
        return self._calls.unary(operations.delete_damaged(name, dry_run))

    def collect(self, *, dry_run: bool = False) -> results.Collection:
        """Free the bytes of deleted versions that nobody uses and whose grace has passed."""
        return self._calls.unary(operations.collect(dry_run))


class AsyncAdapters:
    """The same for asyncio; what methods do and raise is told in Adapters."""

    def __init__(self, calls: AsyncCalls) -> None:
        self._calls = calls

    async def push(
        self,
        folder: str | Path,
        name: str,
        *,
        alias: str = "latest",
        strict: bool = False,
        strict_base: bool = False,
        dry_run: bool = False,
        expected_generation: int | None = None,
        on_progress: Progress | None = None,
    ) -> results.PushResult:
        """on_progress is called on another thread."""
        operation = operations.push(name, alias, strict, strict_base, dry_run, expected_generation)
        with ExitStack() as stack:
            ready = await asyncio.to_thread(stack.enter_context, adapter_folder(Path(folder)))
            messages = push_messages(ready, operation.request, on_progress)
            return await self._calls.upload(operation, messages)

    async def pull(self, ref: str, folder: str | Path, *, on_progress: Progress | None = None) -> Path:
        messages = self._calls.stream(operations.pull(ref), self._calls.timeout)
        with Download(Path(folder), on_progress) as download:
            async with aclosing(messages):
                async for message in messages:
                    download.write(message)
            download.finish()
        return Path(folder)

    async def get(self, ref: str) -> results.AdapterVersion:
        return await self._calls.unary(operations.get_adapter(ref))

    async def list(self, name: str = "", *, tenant: str = "") -> tuple[results.AdapterVersion, ...]:
        return tuple(await self._calls.pages(partial(operations.list_adapters, name, tenant)))

    def summaries(
        self, name: str = "", *, tenant: str = "", deleted: bool = False, after: str = ""
    ) -> AsyncGenerator[results.AdapterSummary, None]:
        return self._calls.each(partial(operations.list_summaries, name, tenant, deleted, after))

    async def delete(self, ref: str, *, force: bool = False, now: bool = False) -> str:
        return await self._calls.unary(operations.delete_adapter(ref, force, now))

    async def set_alias(
        self, ref: str, target: str | Mapping[str, int], *, expected_generation: int | None = None
    ) -> results.AdapterAlias:
        return await self._calls.unary(operations.set_alias(ref, target, expected_generation))

    async def delete_alias(self, ref: str) -> None:
        await self._calls.unary(operations.delete_alias(ref))

    async def aliases(self, name: str = "", *, tenant: str = "") -> tuple[results.AdapterAlias, ...]:
        return await self._calls.unary(operations.list_aliases(name, tenant))

    async def protect(self, ref: str) -> results.AdapterVersion:
        return await self._calls.unary(operations.protect(ref))

    async def unprotect(self, ref: str) -> results.AdapterVersion:
        return await self._calls.unary(operations.unprotect(ref))

    async def verify(self, ref: str = "") -> results.Verification:
        return await self._calls.unary(operations.verify(ref))

    async def residency(self, ref: str = "") -> tuple[results.Residency, ...]:
        return await self._calls.unary(operations.residency(ref))

    async def pin(self, ref: str, tier: str = "slot", *, executors: Sequence[str] = ()) -> results.Pinned:
        return await self._calls.unary(operations.pin(ref, tier, executors))

    async def unpin(self, ref: str, *, executors: Sequence[str] = ()) -> str:
        return await self._calls.unary(operations.unpin(ref, executors))

    async def drop(self, ref: str, *, executors: Sequence[str] = ()) -> results.Freed:
        return await self._calls.unary(operations.drop(ref, executors))

    async def drain(self, ref: str) -> results.Freed:
        return await self._calls.unary(operations.drain(ref))

    async def activate(self, ref: str) -> results.AdapterVersion:
        return await self._calls.unary(operations.activate(ref))

    async def delete_damaged(self, name: str, *, dry_run: bool = False) -> results.Collection:
        return await self._calls.unary(operations.delete_damaged(name, dry_run))

    async def collect(self, *, dry_run: bool = False) -> results.Collection:
        return await self._calls.unary(operations.collect(dry_run))
