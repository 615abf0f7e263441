"""One process of those that compile ahead: it compiles its share of the kernels, and ends."""

import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from adapter_store.base.config import CONFIG_FILE, BaseConfig
from executor.config import ExecutorConfig
from executor.gpu.attention.flashinfer import FORMS
from executor.gpu.build import compile_attention, compile_part, compile_sampler
from executor.lifeline import end_with_executor
from executor.step.shard import with_fused_modules

# A few blocks: what is read and written there means nothing.
_KV_BLOCKS = 64


def main() -> None:
    what, which, watched = sys.argv[1:]
    # Or it would keep memory from the executor that is started next, and nvcc write where that one's does.
    end_with_executor(int(watched), with_group=True)
    settings = json.load(sys.stdin)
    config = ExecutorConfig(**settings | {"lora_modules": tuple(settings["lora_modules"])})
    if what == "attention":
        compile_attention(config, next(form for form in FORMS if form == which))
    elif what == "sampler":
        compile_sampler(config)
    else:
        _compile_part(config, int(what), int(which))


def _compile_part(config: ExecutorConfig, part: int, parts: int) -> None:
    with tempfile.TemporaryDirectory(prefix="lorafleet-compile-") as folder:
        written = BaseConfig.from_folder(Path(config.model)).written
        (Path(folder) / CONFIG_FILE).write_text(json.dumps(cut_to_one_layer(written)))
        heads = min(1, config.max_full_heads)  # each of these processes has its own, as large as the base's
        one_layer = replace(
            with_fused_modules(config),
            model=folder,
            load_format="dummy",
            num_kv_blocks=_KV_BLOCKS,
            max_full_heads=heads,
        )
        compile_part(one_layer, part, parts)


def cut_to_one_layer(written: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json of one layer in the same shapes: its first one, with experts if the model has any."""
    cut: dict[str, Any] = {"num_hidden_layers": 1, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if written.get("layer_types") is not None:
        cut["layer_types"] = written["layer_types"][:1]
    return {**written, **cut}


if __name__ == "__main__":
    main()
