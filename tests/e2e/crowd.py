"""A decode engine with room for few conversations."""

from __future__ import annotations

from typing import Any

WORDS, BLOCKS = 60, 8
"""Of a first prompt, and blocks that the first turn takes with its reply."""
FIT = 8
"""Conversations that fit."""
CROWDED: dict[str, Any] = {"num_gpu_blocks_override": FIT * BLOCKS + 1, "max_model_len": 1024}
"""Settings of such an engine; one block of vLLM's is never used."""
