"""Write a small random LoRA adapter for the tiny model, in PEFT's format: no torch, no download.

usage: python -m deploy.rig.make_tiny_adapter MODEL OUT [--seed 1]

The weights are large enough that the adapter's answers differ from the model's own everywhere.
"""

from __future__ import annotations

import argparse
import json
import random
import struct
from array import array
from pathlib import Path

RANK = 4
SCALE = 0.1
_ATTENTION = ("q_proj", "v_proj", "o_proj")


def write_adapter(model: Path, out: Path, seed: int = 1) -> None:
    """Write the adapter for the model in the folder `model` to the folder `out`; the same seed, the same one.

    Raises OSError or KeyError when the model's configuration cannot be read.
    """
    config = json.loads((model / "config.json").read_text())
    hidden, head = config["hidden_size"], config["head_dim"]
    queries, values = head * config["num_attention_heads"], head * config["num_key_value_heads"]
    sizes = {"q_proj": (hidden, queries), "v_proj": (hidden, values), "o_proj": (queries, hidden)}
    source = random.Random(seed)
    tensors = dict[str, tuple[tuple[int, int], bytes]]()
    for layer in range(config["num_hidden_layers"]):
        for module in _ATTENTION:
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            wide, high = sizes[module]
            tensors[f"{name}.lora_A.weight"] = (RANK, wide), _floats(source, RANK * wide)
            tensors[f"{name}.lora_B.weight"] = (high, RANK), _floats(source, high * RANK)
    out.mkdir(parents=True, exist_ok=True)
    (out / "adapter_model.safetensors").write_bytes(_safetensors(tensors))
    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.name,
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(_ATTENTION),
        "bias": "none",
    }
    (out / "adapter_config.json").write_text(json.dumps(adapter, indent=1))


def _floats(source: random.Random, count: int) -> bytes:
    return array("f", (source.gauss(0.0, SCALE) for _ in range(count))).tobytes()


def _safetensors(tensors: dict[str, tuple[tuple[int, int], bytes]]) -> bytes:
    """Return the file: the header's length, the header (shapes and places), and all data in a row."""
    header, data = dict[str, object](), b""
    for name, (shape, raw) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def main() -> None:
    """Parse the command line and write the adapter."""
    parser = argparse.ArgumentParser(description="write a small random LoRA adapter for the tiny model")
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    write_adapter(options.model, options.out, options.seed)


if __name__ == "__main__":
    main()
