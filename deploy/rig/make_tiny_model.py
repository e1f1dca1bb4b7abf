"""Write a small random Qwen3 model with a tokenizer of its own: no model hub, no download.

usage: python make_tiny_model.py OUT [--hidden 512] [--layers 8]

Run it with an interpreter that has torch, transformers and tokenizers (the rig's vLLM environment). A second
call with the same settings finds the model there and returns at once.

The weights are drawn with a standard deviation of 0.12. With the usual 0.02 a random model repeats one token
whatever it has read, and comparing its answers would prove nothing about the KV cache behind them. With 0.12
every context has another continuation, and greedy decoding stays repeatable.
"""

import argparse
import json
import shutil
import sysconfig
import tempfile
from pathlib import Path

STAMP = "kvplane-tiny-model.json"
VERSION = 1  # raise it when what this script writes changes
VOCABULARY = 4096
TRAINING_FILES = 80
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- elif message['content'] -%}"
    "{%- for part in message['content'] -%}{{ part['text'] }}{%- endfor -%}"
    "{%- endif -%}"
    "{{ '<|im_end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}"
)


def write_model(out: Path, hidden: int, layers: int) -> float:
    """Write tokenizer and weights to the folder `out`; returns the number of parameters in millions."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()

    # Any text will do for the merges; the standard library is on every machine.
    corpus = sorted(str(path) for path in Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:TRAINING_FILES]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        show_progress=False,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    bpe.train(corpus, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(out)

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=32768,
        eos_token_id=tokenizer.eos_token_id,
        tie_word_embeddings=False,
        initializer_range=0.12,
    )
    model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(out)
    return float(sum(parameter.numel() for parameter in model.parameters())) / 1e6


def main() -> None:
    """Make the model in a folder beside the target and rename it, so that a half-written one never counts."""
    parser = argparse.ArgumentParser(description="write a small random model for tests and the demo")
    parser.add_argument("out", type=Path)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    out: Path = options.out
    stamp = json.dumps({"version": VERSION, "hidden": options.hidden, "layers": options.layers})
    if (out / STAMP).is_file() and (out / STAMP).read_text() == stamp:
        print(f"tiny model: {out} is there")
        return
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=out.name + ".", dir=out.parent))
    try:
        millions = write_model(work, options.hidden, options.layers)
        (work / STAMP).write_text(stamp)
        work.chmod(0o755)
        shutil.rmtree(out, ignore_errors=True)
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    print(f"tiny model: {out}, {millions:.0f} M parameters")


if __name__ == "__main__":
    main()
