"""What is sent: messages as routers and engines send them, made before anything is measured."""

from __future__ import annotations

import json
import random
import time
from dataclasses import dataclass

from google.protobuf import duration_pb2

from kvplane.v1 import common_pb2, engine_pb2, location_pb2

ENGINE_ID = "decode-7f9c4b6d5-x2lkq"
OWNER = "router-0123456789abcdef"
TOKENS_PER_BLOCK = 16
TOKENS_PER_HASH = 64
_POOL_BLOCKS = 60_000
_TTL_S = 3600.0


@dataclass(frozen=True, slots=True)
class Conversations:
    """Some conversations, each retained with `blocks` KV blocks at turn `turn`. Numbers start at 0."""

    name: str
    blocks: int
    turn: int

    def next_turn(self) -> Conversations:
        """Return the same conversations one turn later: later than any that the control plane has given."""
        return conversations(self.name, self.blocks)

    def key(self, number: int) -> common_pb2.ConversationKey:
        """Return a conversation's key."""
        return common_pb2.ConversationKey(
            tenant_id="default", model="Qwen/Qwen3-32B", conversation_id=f"{self.name}-{number:08d}"
        )

    def request_id(self, number: int) -> str:
        """Return the engine's id of the request whose blocks a conversation retains."""
        return f"chatcmpl-{self.name}-{number:08d}-{self.turn}"

    def announcement(self, number: int, ttl_s: float = _TTL_S) -> common_pb2.Announcement:
        """Return the engine's announcement of a conversation."""
        request_id = self.request_id(number)
        start = random.randrange(_POOL_BLOCKS)
        # A pool in use hands out blocks in short runs, from anywhere.
        blocks = [(start + 7919 * (index // 4) + index % 4) % _POOL_BLOCKS for index in range(self.blocks)]
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [blocks],
            "remote_engine_id": ENGINE_ID,
            "remote_request_id": request_id,
            "remote_host": "10.0.0.7",
            "remote_port": 5600,
            "tp_size": 4,
            "remote_blocks_expiry_time": 1234567.891011,
        }
        tokens = self.blocks * TOKENS_PER_BLOCK
        hashes = -(-tokens // TOKENS_PER_HASH)
        return common_pb2.Announcement(
            key=self.key(number),
            request_id=request_id,
            turn=self.turn,
            token_count=tokens,
            block_count=self.blocks,
            kv_transfer_params=json.dumps(params, separators=(",", ":")).encode(),
            fingerprint=common_pb2.Fingerprint(
                chunk_tokens=TOKENS_PER_HASH, chain=random.randbytes(8 * hashes)
            ),
            ttl=duration(ttl_s),
        )

    def lookup(self, number: int) -> location_pb2.LookupLocationRequest:
        """Return a lookup of a conversation."""
        return location_pb2.LookupLocationRequest(key=self.key(number))

    def begin(self, number: int) -> location_pb2.BeginTurnRequest:
        """Return the beginning of a conversation's next turn."""
        return location_pb2.BeginTurnRequest(
            key=self.key(number), request_id=f"turn-{self.name}-{number:08d}-{self.turn}"
        )

    def claim_id(self, number: int) -> str:
        """Return the name of the claim of a conversation."""
        return f"claim-{self.name}-{number:08d}-{self.turn}"

    def claim(self, number: int) -> location_pb2.ClaimLocationRequest:
        """Return the claim of the turn that a conversation retains."""
        return location_pb2.ClaimLocationRequest(
            key=self.key(number), request_id=self.claim_id(number), owner=OWNER, turn=self.turn
        )


def conversations(name: str, blocks: int) -> Conversations:
    """Return conversations whose turn is numbered as the control plane would number it now."""
    return Conversations(name, blocks, int(time.time() * 1000))


def duration(seconds: float) -> duration_pb2.Duration:
    """Return a time span."""
    whole = int(seconds)
    return duration_pb2.Duration(seconds=whole, nanos=int((seconds - whole) * 1e9))


def spec() -> engine_pb2.EngineSpec:
    """Return the engine that retains everything."""
    profile = engine_pb2.EngineProfile(
        model="Qwen3-32B", kv_dtype="bfloat16", block_size=TOKENS_PER_BLOCK, tensor_parallel_size=4
    )
    return engine_pb2.EngineSpec(
        engine_id=ENGINE_ID,
        role=engine_pb2.ENGINE_ROLE_DECODE,
        profile=profile,
        endpoint="http://10.0.0.7:8200",
        total_blocks=_POOL_BLOCKS,
    )
