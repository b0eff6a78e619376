"""Prefill-decode disaggregated LLM serving on Ray, with a radix KV cache on both sides."""

__version__ = "0.1.0"
