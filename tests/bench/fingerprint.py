"""What fingerprints cost on an engine's scheduler thread: CPU time, medians.

python tests/bench/fingerprint.py [--tokens 32000] [--chunk-tokens 64] [--rounds 30]

`made` is what a decode engine does when a turn ends, `verified` what a prefill engine does once per request;
`next` is the conversation's next turn, 500 tokens longer. As in an engine, the tokens are lists, and vLLM has
hashed their blocks already; `unnamed` is the next turn where it has not (no prefix cache).
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvplane.connector.chains import ChainCache
from kvplane.connector.fingerprint import Context, NamedTokens, make_chain, matching_tokens

TOKENS = (2_000, 8_000, 32_000, 64_000, 128_000)
NEW_TOKENS = 500
BLOCK_TOKENS = 16
COLUMNS = ("made", "next", "verified", "next", "unnamed")
CONTEXT = Context("model", "main", "bfloat16", settings="0" * 32)


def cpu_ms(function: Callable[[], object]) -> float:
    """Return the CPU time of one call."""
    before = time.process_time_ns()
    function()
    return (time.process_time_ns() - before) / 1e6


def measure(tokens: int, chunk_tokens: int, rounds: int) -> list[float]:
    """Return the medians, in ms, of COLUMNS."""
    figures = [one_round(random.Random(seed), tokens, chunk_tokens) for seed in range(rounds)]
    return [statistics.median(column) for column in zip(*figures, strict=True)]


def one_round(rng: random.Random, tokens: int, chunk_tokens: int) -> tuple[float, ...]:
    """Return one measurement of each of COLUMNS, in ms."""
    following = rng.choices(range(150_000), k=tokens + NEW_TOKENS)
    prompt, decode, prefill, unnamed = [*following, *range(50)], ChainCache(), ChainCache(), ChainCache()
    names = [rng.randbytes(32) for _ in range(len(prompt) // BLOCK_TOKENS)]
    made, verified, last = list[float](), list[float](), 0.0
    for held in (following[:tokens], following):
        chain = make_chain(CONTEXT, held, chunk_tokens)
        mine = NamedTokens(held, len(held), names[: len(held) // BLOCK_TOKENS], BLOCK_TOKENS)
        theirs = NamedTokens(prompt, len(prompt), names, BLOCK_TOKENS)
        made.append(cpu_ms(partial(make_chain, CONTEXT, mine, chunk_tokens, hasher=decode)))
        verify = partial(matching_tokens, chain, len(held), chunk_tokens, CONTEXT, theirs)
        verified.append(cpu_ms(partial(verify, hasher=prefill)))
        last = cpu_ms(partial(make_chain, CONTEXT, held, chunk_tokens, hasher=unnamed))
        if verify() != len(held):
            raise RuntimeError("what is equal did not match")
    return *made, *verified, last


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description="CPU time of fingerprints")
    options.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    options.add_argument("--chunk-tokens", type=int, default=64)
    options.add_argument("--rounds", type=int, default=30)
    given = options.parse_args(arguments)
    print(f"CPU time in ms, median of {given.rounds}; {given.chunk_tokens} tokens per chunk")
    print("".join(f"{name:>16}" for name in ("tokens", *COLUMNS)))
    for tokens in given.tokens:
        figures = measure(tokens, given.chunk_tokens, given.rounds)
        print(f"{tokens:>16,}" + "".join(f"{figure:>16.3f}" for figure in figures))


if __name__ == "__main__":
    main()
