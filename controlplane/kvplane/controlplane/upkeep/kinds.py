"""The kinds of records in a store: where they lie, how they are read, what they are called."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from kvplane.controlplane import keys, records
from kvplane.controlplane.schema import parse_schema
from kvplane.store.base import MAX_KEY_BYTES, Compare, KeyValue, Page, Store
from kvplane.store.errors import StoreFullError, StoreUnavailableError

_ATTEMPTS = 8


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of record. `leased` ones end with a lease; `brief` ones are written anew all the time.

    `load` is None for kinds that nobody needs to look into here.
    """

    name: str
    prefix: bytes
    load: Callable[[bytes, bytes], Any] | None = None
    leased: bool = True
    brief: bool = False

    def read(self, key: bytes, raw: bytes) -> Any:
        """Return a record's value; None where there is no `load`.

        Raises UnreadableRecordError for bytes that are no such record, or that are another key's.
        """
        if self.load is None:
            return None
        try:
            return self.load(key, raw)
        except (ValueError, OverflowError) as error:
            raise records.UnreadableRecordError(str(error)) from None


def _load_location(key: bytes, raw: bytes) -> Any:
    value = records.checked(records.load_location, raw)
    _require(keys.location(value.key) == key and len(keys.holding(value.holder)) <= MAX_KEY_BYTES)
    return value


def _load_claim(key: bytes, raw: bytes) -> Any:
    value = records.checked(records.load_claim, raw)
    _require(keys.claim(value.claim_id) == key and len(keys.holding(value.location.holder)) <= MAX_KEY_BYTES)
    return value


def _load_engine(key: bytes, raw: bytes) -> Any:
    value = records.checked(records.load_engine, raw)
    _require(keys.engine(value.spec.engine_id) == key)
    return value


def _load_turns(key: bytes, raw: bytes) -> Any:
    keys.conversation_of(key)
    return records.checked(records.load_turns, raw)


def _load_epoch(key: bytes, raw: bytes) -> Any:
    key.decode()
    return records.checked(records.load_epoch, raw)


def _load_holding(key: bytes, raw: bytes) -> Any:
    _require(keys.holding(keys.holder_of(key)) == key)
    location_key, claim_id = records.checked(records.load_holding, raw)
    target = location_key or keys.claim(claim_id)
    _require(
        bool(location_key) != bool(claim_id)
        and len(target) <= MAX_KEY_BYTES
        and kind_of(target) in (LOCATIONS, CLAIMS)
    )
    return target


def _load_begun(key: bytes, raw: bytes) -> Any:
    keys.conversation_of(key)
    return keys.conversation_of(records.checked(records.load_begun, raw))


def _load_order(key: bytes, raw: bytes) -> Any:
    holder = keys.holder_of(key)
    _require(keys.order(holder) == key)
    return records.checked(lambda raw: records.load_order(holder, raw), raw)


def _load_schema(key: bytes, raw: bytes) -> Any:
    _require(key == keys.schema())
    return parse_schema(raw)


def _require(holds: bool) -> None:
    if not holds:
        raise ValueError("key and value do not belong together")


SCHEMA = Kind("schema", keys.SCHEMA, _load_schema, leased=False)
LOCATIONS = Kind("locations", keys.LOCATIONS, _load_location)
TURNS = Kind("turns", keys.TURNS, _load_turns)
CLAIMS = Kind("claims", keys.CLAIMS, _load_claim)
HOLDINGS = Kind("holdings", keys.HOLDINGS, _load_holding)
"""Their value here is the key of the location or claim that they point to."""
ORDERS = Kind("orders", keys.ORDERS, _load_order)
ENGINES = Kind("engines", keys.ENGINES, _load_engine)
LOADS = Kind("loads", keys.LOADS)
EPOCHS = Kind("epochs", keys.EPOCHS, _load_epoch)
PULSES = Kind("pulses", keys.PULSES, brief=True)
BEGUN = Kind("begun", keys.BEGUN, _load_begun, brief=True)
"""Their value here is the conversation that they name."""
FOREIGN = Kind("foreign", b"", leased=False)
"""What lies under no known prefix: a newer version's, or not kvplane's."""

ALL = (SCHEMA, LOCATIONS, TURNS, CLAIMS, HOLDINGS, ORDERS, ENGINES, LOADS, EPOCHS, PULSES, BEGUN)
_BY_PREFIX = {kind.prefix: kind for kind in ALL}


def kind_of(key: bytes) -> Kind:
    """Return the kind of record that lies under a key; FOREIGN if none is known."""
    return _BY_PREFIX.get(key[:2], FOREIGN)


def readable(key: bytes) -> str:
    """Return a key for people: its kind, and the names in it as far as they can be read."""
    kind = kind_of(key)
    try:
        if kind in (LOCATIONS, TURNS):
            named = keys.conversation_of(key)
            return (
                f"{kind.name} {named.tenant_id!r} {named.model!r} {named.adapter!r} {named.conversation_id!r}"
            )
        if kind in (HOLDINGS, ORDERS):
            holder = keys.holder_of(key)
            return f"{kind.name} {holder.engine_id!r} epoch {holder.engine_epoch} {holder.request_id!r}"
        if kind is not FOREIGN:
            return f"{kind.name} {key[2:].decode()!r}"
    except ValueError:
        pass
    return f"{kind.name} {key!r}"


async def pages(store: Store, prefix: bytes = b"") -> AsyncIterator[Page]:
    """Iterate over all records below a prefix, page by page, in the order of their keys. O(records).

    Each page is of its own revision, so what moves meanwhile may be seen twice or not at all.
    """
    after, more = b"", True
    while more:
        page = await store.scan(prefix, after=after)
        yield page
        more = page.more
        after = page.items[-1].key if page.items else after


async def together(store: Store, *wanted: bytes) -> dict[bytes, KeyValue | None]:
    """Return what lies under some keys at one and the same revision; at most MAX_TXN_OPERATIONS of them."""
    try:
        outcome = await store.transact([Compare(key, 0) for key in wanted], [])
    except StoreFullError:  # etcd refuses transactions that write nothing, too, once it is above its quota
        return await _standing_still(store, wanted)
    found = outcome.found if not outcome.succeeded else (None,) * len(wanted)
    return dict(zip(wanted, found, strict=True))


async def _standing_still(store: Store, wanted: tuple[bytes, ...]) -> dict[bytes, KeyValue | None]:
    """Return what lies under some keys, read one by one until nothing changes from the first to the last."""
    before: dict[bytes, KeyValue | None] = {}
    for _ in range(_ATTEMPTS):
        now = {key: await store.get(key) for key in wanted}
        if now == before:
            return now
        before = now
    raise StoreUnavailableError("the records change too fast to be read together")
