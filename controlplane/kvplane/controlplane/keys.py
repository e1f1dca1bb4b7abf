"""Where each record lies in the store. Parts are length-prefixed, never joined by a separator.

So tenant "a/b" with conversation "c" and tenant "a" with conversation "b/c" are different keys, and a
tenant's conversations share a prefix that no other tenant's key begins with.
"""

from __future__ import annotations

from functools import lru_cache

from kvplane.controlplane.model import ConversationKey, Holder

LOCATIONS = b"l/"
TURNS = b"t/"
CLAIMS = b"c/"
HOLDINGS = b"x/"
ORDERS = b"o/"
ENGINES = b"e/"
EPOCHS = b"n/"
SCHEMA = b"s/"
LOADS = b"w/"
PULSES = b"h/"
BEGUN = b"b/"


def _part(text: str) -> bytes:
    raw = text.encode()
    return len(raw).to_bytes(2, "big") + raw


def _take(raw: bytes) -> tuple[str, bytes]:
    end = 2 + int.from_bytes(raw[:2], "big")
    return raw[2:end].decode(), raw[end:]


@lru_cache(maxsize=1024)
def _scope(tenant_id: str, model: str, adapter: str) -> bytes:
    return _part(tenant_id) + _part(model) + _part(adapter)


def _conversation(key: ConversationKey) -> bytes:
    return _scope(key.tenant_id, key.model, key.adapter) + _part(key.conversation_id)


def schema() -> bytes:
    """Return where the store's schema version lies."""
    return SCHEMA + b"schema"


def location(key: ConversationKey) -> bytes:
    """Return where a conversation's retained location lies."""
    return LOCATIONS + _conversation(key)


def location_and_turns(key: ConversationKey) -> tuple[bytes, bytes]:
    """Return where a conversation's retained location and its turn numbers lie."""
    path = _conversation(key)
    return LOCATIONS + path, TURNS + path


def turns_of(location_key: bytes) -> bytes:
    """Return where the turn numbers lie of the conversation whose location lies at a key."""
    return TURNS + location_key[len(LOCATIONS) :]


def location_of(turns_key: bytes) -> bytes:
    """Return where the location lies of the conversation whose turn numbers lie at a key."""
    return LOCATIONS + turns_key[len(TURNS) :]


def conversation_of(key: bytes) -> ConversationKey:
    """Return the conversation named by the key of a location or of turns. Raises ValueError for others."""
    parts, rest = list[str](), key[2:]
    for _ in range(4):
        part, rest = _take(rest)
        parts.append(part)
    named = ConversationKey(*parts)
    if key[2:] != _conversation(named):
        raise ValueError("the key names no conversation")
    return named


def tenant_locations(tenant_id: str) -> bytes:
    """Return the prefix of all of a tenant's retained locations."""
    return LOCATIONS + _part(tenant_id)


def tenant_of(key: bytes) -> bytes:
    """Return the part that stands for the tenant in the key of a location, of turns, or of what was begun."""
    return key[2 : 4 + (key[2] << 8 | key[3])]


def tenant_id_of(key: bytes) -> str:
    """Return the tenant of such a key."""
    return tenant_of(key)[2:].decode()


def turns(key: ConversationKey) -> bytes:
    """Return where a conversation's turn numbers lie."""
    return TURNS + _conversation(key)


def scope(key: ConversationKey) -> bytes:
    """Return what the store keys of all locations of the same tenant, model and adapter begin with."""
    return LOCATIONS + _scope(key.tenant_id, key.model, key.adapter)


def scope_of(location_key: bytes) -> bytes:
    """Return the scope of the location that lies at a store key."""
    at = location_key
    end = 4 + (at[2] << 8 | at[3])
    end += 2 + (at[end] << 8 | at[end + 1])
    return at[: end + 2 + (at[end] << 8 | at[end + 1])]


def begun(key: ConversationKey, request_id: str) -> bytes:
    """Return where it lies which conversation of a key's scope a turn is of that was begun by fingerprint."""
    return BEGUN + _scope(key.tenant_id, key.model, key.adapter) + _part(request_id)


def claim(claim_id: str) -> bytes:
    """Return where a claim lies."""
    return CLAIMS + claim_id.encode()


def claim_id_of(key: bytes) -> str:
    """Return the claim id of a claim's key. Raises ValueError for what is none."""
    return key.removeprefix(CLAIMS).decode()


def engine(engine_id: str) -> bytes:
    """Return where an engine's live incarnation lies."""
    return ENGINES + engine_id.encode()


def engine_id_of(key: bytes) -> str:
    """Return the engine id of an engine's key."""
    return key.removeprefix(ENGINES).decode()


def epoch(engine_id: str) -> bytes:
    """Return where the last epoch given to an engine id lies; it outlives incarnations."""
    return EPOCHS + engine_id.encode()


def engine_id_of_epoch(key: bytes) -> str:
    """Return the engine id of the key of an epoch."""
    return key.removeprefix(EPOCHS).decode()


def load(engine_id: str) -> bytes:
    """Return where an engine's last reported load lies."""
    return LOADS + engine_id.encode()


def pulse(replica_id: str) -> bytes:
    """Return where a replica of the control plane leaves its sign of life."""
    return PULSES + replica_id.encode()


@lru_cache(maxsize=1024)
def _incarnation(engine_id: str, engine_epoch: int) -> bytes:
    return _part(engine_id) + engine_epoch.to_bytes(8, "big")


def holding(holder: Holder) -> bytes:
    """Return where it is noted what became of a holder's blocks."""
    return HOLDINGS + _incarnation(holder.engine_id, holder.engine_epoch) + holder.request_id.encode()


def incarnation_holdings(engine_id: str, engine_epoch: int) -> bytes:
    """Return the prefix of all holdings of one incarnation."""
    return HOLDINGS + _incarnation(engine_id, engine_epoch)


def engine_holdings(engine_id: str) -> bytes:
    """Return the prefix of all holdings of an engine, of every incarnation."""
    return HOLDINGS + _part(engine_id)


def order(holder: Holder) -> bytes:
    """Return where the order to free a holder's blocks lies."""
    return ORDERS + _incarnation(holder.engine_id, holder.engine_epoch) + holder.request_id.encode()


def incarnation_orders(engine_id: str, engine_epoch: int) -> bytes:
    """Return the prefix of all orders to one incarnation."""
    return ORDERS + _incarnation(engine_id, engine_epoch)


def engine_orders(engine_id: str) -> bytes:
    """Return the prefix of all orders to an engine, of every incarnation."""
    return ORDERS + _part(engine_id)


def holder_of(key: bytes) -> Holder:
    """Return the holder named by the key of a holding or an order."""
    engine_id, rest = _take(key[2:])
    return Holder(engine_id, int.from_bytes(rest[:8], "big"), rest[8:].decode())


def epoch_of(key: bytes) -> int:
    """Return the epoch in the key of a holding or an order, whatever else is in it."""
    start = 4 + int.from_bytes(key[2:4], "big")
    return int.from_bytes(key[start : start + 8], "big")
