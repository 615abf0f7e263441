"""Stored bytes that are not those that were pushed (test_damage.py: any of them)."""

from pathlib import Path

import pytest

from adapter_store import (
    AdapterStore,
    DataLoss,
    ModelSpec,
    Version,
)
from tests.support.stores.media import Change, Medium, at


def flip_last_byte(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [
        flip_last_byte,
        lambda content: None,
        lambda content: b"",
        lambda content: content[:-8],
        lambda content: content.replace(b"4, 2.0", b"4, 4.0"),
    ],
)
@pytest.mark.parametrize("fresh", [True, False])
def test_damaged_weights_are_data_loss_until_pushed_again(
    store: AdapterStore,
    versions: list[Version],
    adapters: list[Path],
    spec: ModelSpec,
    medium: Medium,
    damage: Change,
    fresh: bool,
) -> None:
    store.open(versions[0].digest).close()
    medium.change_packed(versions[0].digest, damage)
    reader = medium.open() if fresh else store
    with pytest.raises(DataLoss):
        reader.open(versions[0].digest)
    with pytest.raises(DataLoss):
        reader.verify(at(versions[0]))
    reader.open(versions[1].digest).close()
    reader.put(adapters[0], "acme", "x", spec)
    reader.open(versions[0].digest).close()
    assert reader.verify(at(versions[0])).digest == versions[0].digest


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"rank": 4', b'"rank": 5'),
        (b'"scale": 2.0', b'"scale": 3.0'),
        (b'template": null', b'template": ""'),
    ],
)
def test_the_manifest_is_covered_by_the_digest(
    versions: list[Version], medium: Medium, old: bytes, new: bytes
) -> None:
    def change(manifest: bytes) -> bytes:
        assert old in manifest
        return manifest.replace(old, new)

    medium.change_manifest(versions[0].digest, change)
    with pytest.raises(DataLoss):
        medium.open().open(versions[0].digest)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_damaged_source_files_are_found(
    store: AdapterStore, versions: list[Version], medium: Medium, tmp_path: Path, name: str
) -> None:
    medium.change_pushed(versions[0], name, flip_last_byte)
    with pytest.raises(DataLoss, match=f"{name}|recipe"):
        store.verify(at(versions[0]))
    with pytest.raises(DataLoss, match=f"{name}|recipe"):
        store.export(at(versions[0]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
