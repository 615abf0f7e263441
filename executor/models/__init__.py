from executor.models.decoder import CausalLM

__all__ = ["CausalLM"]
