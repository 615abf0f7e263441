"""A package `vllm` of a few lines, with what the plugin reads and changes, written into a folder."""

from pathlib import Path
from textwrap import dedent

STOCK = "vllm.lora.punica_wrapper.punica_gpu.PunicaWrapperGPU"

# Its platform is found when it is first asked for, as vLLM's is.
_FILES = {
    "__init__.py": "__version__ = '9.9'",
    "platforms/__init__.py": """
        import os

        class Platform:
            @classmethod
            def is_cuda(cls):
                return os.environ.get("FAKE_PLATFORM", "cuda") == "cuda"

            @classmethod
            def get_punica_wrapper(cls):
                return os.environ.get("FAKE_WRAPPER", "{stock}")

        _current = None

        def __getattr__(name):
            global _current
            if name != "current_platform":
                raise AttributeError(name)
            _current = _current or Platform()
            return _current
        """,
    "envs.py": "VLLM_BATCH_INVARIANT = False",
    "config/__init__.py": "",
    "config/lora.py": """
        from vllm.platforms import current_platform

        class LoRAConfig:
            def __init__(self, rank=16):
                self.rank = rank

            def compute_hash(self):
                return f"stock {self.rank}"
        """,
    "lora/punica_wrapper/punica_base.py": """
        class PunicaWrapperBase:
            def __init__(self, max_num_batched_tokens, max_batches, device, **kwargs):
                self._sampler_indices = torch.empty(max_num_batched_tokens, dtype=torch.long, device=device)
                self._embeddings_indices = torch.empty(
                    2, max_num_batched_tokens, dtype=torch.long, device=device
                )
            @property
            def token_lora_indices(self): ...
            def add_shrink(self, y, x, lora_a_stacked, scale, **kwargs): ...
            def _private(self, anything): ...
        """,
    "lora/punica_wrapper/punica_gpu.py": """
        from vllm.nowhere import nothing

        class PunicaWrapperGPU:
            def __init__(self, max_num_batched_tokens, max_batches, device, **kwargs): ...
            def add_expand(
                self, y, x, lora_b_stacked, output_slices, offset_start=0, add_inputs=True, **kwargs
            ): ...
        """,
    "lora/ops/triton_ops/lora_kernel_metadata.py": """
        class LoRAKernelMeta:
            token_lora_mapping: int
            @staticmethod
            def make(max_loras, max_num_tokens, device, captured_lora_counts=None): ...
        """,
    "lora/layers/base_linear.py": """
        def apply(self, x, y):
            self.punica_wrapper.add_expand(y, x, (), (), add_input=True)
            return self.punica_wrapper._embeddings_indices[1]
        """,
    "lora/model_manager.py": "",
}


def write_vllm(folder: Path, changes: dict[str, tuple[str, str]] | None = None) -> Path:
    """Write the package into `folder`, with a text replaced in some of its files."""
    for name, text in _FILES.items():
        text = dedent(text).lstrip().replace("{stock}", STOCK)
        old, new = (changes or {}).get(name, ("", ""))
        assert old in text
        file = folder / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace(old, new, 1) if old else text)
    return folder / "vllm"
