"""The files of one push, read and checked: what a name brought beside the content that all share."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from adapter_store.packed.form import Weights
from adapter_store.packed.recipe import rebuild
from adapter_store.peft.folder import WEIGHTS_FILE


@dataclass(frozen=True, slots=True)
class PushedFiles:
    """`recipe` makes the pushed weights file from the packed one; `files` are all others, by name."""

    recipe: memoryview
    files: Mapping[str, memoryview]

    def check(self, weights: Weights) -> None:
        """Raises DataLoss when the pushed weights file cannot be made again."""
        rebuild(self.recipe, weights)

    def write(self, weights: Weights, target: Path) -> None:
        """Into the folder `target`, made if need be. Raises DataLoss before anything is written, and
        FileExistsError when the folder is not empty."""
        self.check(weights)
        target.mkdir(parents=True, exist_ok=True)
        if any(target.iterdir()):
            raise FileExistsError(f"{target} is not empty")
        for name, content in self.files.items():
            (target / name).write_bytes(content)
        with (target / WEIGHTS_FILE).open("wb") as file:
            rebuild(self.recipe, weights, file)
