"""Which version of the records a store holds, and who may read and write them.

One record, two numbers. Every replica looks at it when it starts, and never again:

- `schema` is the highest version of the records that has started on this store. Each change of the records is
  a new version.
- `least_reader` is the lowest version whose software may still start on it.

**Additive changes** raise `schema` only: a new field or kind of record that older software can do without.
It carries fields it does not know along when it rewrites a record, and leaves kinds it does not know alone.
So a rolling upgrade goes replica by replica, in either direction, with both versions at work at the same
time; after a downgrade `schema` stays where it was. A new value of an enumeration is additive only if it is
written when no older replica is left: older software refuses records with numbers it does not know.

**Breaking changes** raise `least_reader` too: a field that gets another meaning, a key that moves, a record
that older software must not ignore. Replicas that run already do not notice, so the older ones have to be
stopped before the first new one starts; from then on they refuse to start. A breaking change is better made
in two releases: one that understands both and writes the old, then one that writes the new and names the
first in `least_reader`.
"""

from __future__ import annotations

from dataclasses import dataclass

import structlog

from kvplane.controlplane import keys, records
from kvplane.store.base import Compare, Put, Store
from kvplane.store.errors import StoreUnavailableError

log = structlog.get_logger(__name__)

_ATTEMPTS = 16


@dataclass(frozen=True, slots=True)
class Schema:
    """A version of the records, and the lowest one whose software may read and write them."""

    schema: int
    least_reader: int


CURRENT = Schema(schema=1, least_reader=1)
"""What this software reads and writes. History: 1, the first one."""


class SchemaError(ValueError):
    """The store cannot be used by this software. One line that says why and what to do."""


class SchemaTooNewError(SchemaError):
    """The store needs newer software. `needed` and `ours` are schema versions."""

    def __init__(self, needed: int, ours: int) -> None:
        super().__init__(
            f"the store is used by a newer kvplane: it takes one that knows schema {needed} or later, and"
            f" this one knows {ours}; upgrade this one, or empty the store with the newer one's"
            " 'kvplane store purge --all'"
        )
        self.needed = needed
        self.ours = ours


class SchemaUnreadableError(SchemaError):
    """What lies under the schema's key is no schema record."""

    def __init__(self) -> None:
        super().__init__(
            "the store's schema record cannot be read: something other than kvplane uses the same prefix, or"
            " the record is damaged; give kvplane a prefix of its own"
        )


def parse_schema(raw: bytes) -> Schema:
    """Return a stored schema record. Raises SchemaUnreadableError."""
    try:
        schema = Schema(*records.checked(records.load_schema, raw))
    except records.UnreadableRecordError:
        raise SchemaUnreadableError from None
    if not 1 <= schema.least_reader <= schema.schema:
        raise SchemaUnreadableError
    return schema


async def read_schema(store: Store) -> Schema | None:
    """Return the store's schema; None where no replica has ever started. Raises SchemaUnreadableError."""
    found = await store.get(keys.schema())
    return None if found is None else parse_schema(found.value)


def check_schema(found: Schema | None, ours: Schema = CURRENT) -> None:
    """Raise SchemaTooNewError if software of `ours` may not read and write records of a schema."""
    if found is not None and found.least_reader > ours.schema:
        raise SchemaTooNewError(found.least_reader, ours.schema)


async def ensure_schema(store: Store, ours: Schema = CURRENT) -> Schema:
    """Make sure that software of `ours` may use the store, and have the store say so; return what it says.

    Writes the record where there is none, raises its numbers where they are lower, never lowers one.
    Idempotent, and safe for any number of replicas that start at once. Raises SchemaError; and StoreError
    when the store does not answer: then nothing is known, and it is to be called again before anything else
    is read or written.
    """
    key = keys.schema()
    for attempt in range(_ATTEMPTS):
        found = await store.get(key)
        before, revision = (None, 0) if found is None else (parse_schema(found.value), found.mod_revision)
        check_schema(before, ours)
        now = ours
        if before is not None:
            now = Schema(max(before.schema, ours.schema), max(before.least_reader, ours.least_reader))
        if now == before:
            return now
        value = records.dump_schema(now.schema, now.least_reader, b"" if found is None else found.value)
        try:
            done = await store.transact([Compare(key, revision)], [Put(key, value)])
        except StoreUnavailableError:
            if attempt:
                raise
            continue  # perhaps it was written: look again, once
        if done.succeeded:
            log.info(
                "schema_written",
                schema=now.schema,
                least_reader=now.least_reader,
                before=before.schema if before else None,
            )
            return now
    raise StoreUnavailableError("the store's schema record never stands still")
