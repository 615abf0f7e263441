"""The command that makes PEFT folders of adapters in other forms: `python -m adapter_store.convert`."""
