"""Async and threaded clients of the control plane. Usable without vLLM."""
