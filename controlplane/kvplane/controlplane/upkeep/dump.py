"""Copies of a store as JSON lines: a header, one line for each record, and a last line that says it is whole.

    {"kvplane_dump": 1, "schema": 1, "least_reader": 1, "revision": 815, "time_ms": 1790000000000}
    {"kind": "turns", "key": "dC8A...", "value": "CAUS...", "ttl_s": 931.2}
    {"records": 1, "revision": 815}

Keys and values are base64, so that what this version does not know is copied as it is. `ttl_s` is how much
life a record had left by its own deadline, where it has one. Records come in the order of their keys.

A dump is read page by page, and each page is of its own revision. If the last line's revision is the
header's, nothing was written meanwhile, and the dump is what the store was at that revision. Otherwise what
changed between the two may be in it as it was before or after, and records that moved (a location that was
claimed) may be in it twice or not at all.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

from kvplane.controlplane import model as m
from kvplane.controlplane.records import UnreadableRecordError
from kvplane.controlplane.schema import Schema, check_schema, read_schema
from kvplane.controlplane.upkeep import kinds
from kvplane.store.base import MAX_KEY_BYTES, MAX_VALUE_BYTES, KeyValue, Store
from kvplane.store.clock import Clock

FORMAT = 1
MAX_LINE_BYTES = 2 * (MAX_KEY_BYTES + MAX_VALUE_BYTES)
"""A record's key and value in base64, and its other members."""
_MAX_SCHEMA = 2**31 - 1


class DumpError(ValueError):
    """What was given is no dump, or not a whole one. One line that says where and why."""


@dataclass(frozen=True, slots=True)
class Dump:
    """A dump that was read to its end and found whole. `records` are those whose kinds were asked for."""

    schema: Schema | None
    revision: int
    time_ms: int
    records: tuple[tuple[bytes, bytes], ...]
    counts: dict[str, int]


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a dump: whole lines, how many records are in them, and the store's revision when read."""

    text: str
    records: int
    revision: int


async def write_dump(store: Store, clock: Clock) -> AsyncIterator[Part]:
    """Give a dump of a whole store in parts.

    The last line's revision and the header's tell whether the store stood still. O(records), a page of them
    in memory. Raises StoreError, SchemaError.
    """
    schema = await read_schema(store)
    first = last = count = 0
    async for page in kinds.pages(store):
        lines = [_record_line(item, clock.now_ms()) for item in page.items]
        if not first:
            first = page.revision
            lines.insert(0, _header_line(schema, first, clock.now_ms()))
        last, count = page.revision, count + len(page.items)
        yield Part("".join(lines), len(page.items), page.revision)
        await asyncio.sleep(0)  # a store in memory never waits, and others have to run
    yield Part(json.dumps({"records": count, "revision": last}) + "\n", 0, last)


def _header_line(schema: Schema | None, revision: int, time_ms: int) -> str:
    header = {
        "kvplane_dump": FORMAT,
        "schema": schema.schema if schema else None,
        "least_reader": schema.least_reader if schema else None,
        "revision": revision,
        "time_ms": time_ms,
    }
    return json.dumps(header) + "\n"


def _record_line(item: KeyValue, now_ms: int) -> str:
    kind = kinds.kind_of(item.key)
    line: dict[str, Any] = {
        "kind": kind.name,
        "key": base64.b64encode(item.key).decode(),
        "value": base64.b64encode(item.value).decode(),
    }
    try:
        value = kind.read(item.key, item.value)
    except UnreadableRecordError:
        value = None
    if isinstance(value, m.Location | m.Claim | m.Order):
        line["ttl_s"] = (value.deadline_ms - now_ms) / 1000
    return json.dumps(line) + "\n"


def read_dump(
    lines: Iterable[bytes], keep: Iterable[kinds.Kind], progress: Callable[[int], None] = lambda count: None
) -> Dump:
    """Read a dump to its end and check every line of it; the records of the kinds `keep` are in the result.

    Raises DumpError, which names the line, and SchemaTooNewError for records that this software would
    misread. O(bytes); memory for what is kept.
    """
    reader = _DumpReader(frozenset(keep))
    for number, line in enumerate(lines, 1):
        reader.read(number, line)
        progress(1)
    return reader.finish()


def lines_of(stream: BinaryIO) -> Iterator[bytes]:
    """Return a dump's lines; of one that is too long no more than shows it."""
    return iter(partial(stream.readline, MAX_LINE_BYTES + 1), b"")


class _DumpReader:
    def __init__(self, keep: frozenset[kinds.Kind]) -> None:
        self._keep = keep
        self._header: dict[str, Any] | None = None
        self._schema: Schema | None = None
        self._last_key = b""
        self._count = 0
        self._ended = False
        self._counts: dict[str, int] = {}
        self._records: list[tuple[bytes, bytes]] = []

    def read(self, number: int, line: bytes) -> None:
        if len(line) > MAX_LINE_BYTES:
            raise DumpError(f"line {number}: longer than any record's")
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            value = None
        if self._header is None:
            self._read_header(value)
        elif not isinstance(value, dict):
            raise DumpError(f"line {number}: not a line of a dump")
        elif self._ended:
            raise DumpError(f"line {number}: the dump ended before it")
        elif "records" in value:
            if value["records"] != self._count:
                raise DumpError(
                    f"line {number}: the dump had {value['records']!r} records, but {self._count} are here"
                )
            self._ended = True
        else:
            self._read_record(number, value)

    def _read_header(self, value: Any) -> None:
        if not isinstance(value, dict) or not _is_count(value.get("kvplane_dump")):
            raise DumpError("not a dump of 'kvplane store dump'")
        if value["kvplane_dump"] != FORMAT:
            raise DumpError(
                f"a dump of format {value['kvplane_dump']}, of another version of kvplane; this one reads"
                f" format {FORMAT}"
            )
        schema, least = value.get("schema", 0), value.get("least_reader", 0)
        if schema is not None or least is not None:
            if not (_is_count(schema) and _is_count(least) and 1 <= least <= schema <= _MAX_SCHEMA):
                raise DumpError("line 1: schema and least_reader are no versions")
            self._schema = Schema(schema, least)
        check_schema(self._schema)
        if not (_is_count(value.get("revision")) and _is_count(value.get("time_ms"))):
            raise DumpError("line 1: revision and time_ms are no numbers")
        self._header = value

    def _read_record(self, number: int, value: dict[str, Any]) -> None:
        try:
            key = base64.b64decode(value["key"], validate=True)
            raw = base64.b64decode(value["value"], validate=True)
        except (KeyError, TypeError, ValueError, binascii.Error):
            raise DumpError(f"line {number}: key or value is missing or not base64") from None
        if not 0 < len(key) <= MAX_KEY_BYTES or len(raw) > MAX_VALUE_BYTES:
            raise DumpError(f"line {number}: key or value is longer than a store takes, or the key is empty")
        if key <= self._last_key:
            raise DumpError(
                f"line {number}: out of order: its key comes before or is that of the line before"
            )
        kind = kinds.kind_of(key)
        if value.get("kind") != kind.name and kind is not kinds.FOREIGN:
            raise DumpError(f"line {number}: its key is one of {kind.name}, not of {value.get('kind')!r}")
        if kind in self._keep:
            try:
                kind.read(key, raw)
            except UnreadableRecordError as error:
                raise DumpError(f"line {number}: no record of {kind.name}: {error}") from None
            self._records.append((key, raw))
        self._last_key = key
        self._count += 1
        self._counts[kind.name] = self._counts.get(kind.name, 0) + 1

    def finish(self) -> Dump:
        if self._header is None:
            raise DumpError("not a dump of 'kvplane store dump': it is empty")
        if not self._ended:
            raise DumpError(f"the dump is cut short: its last line is missing after {self._count} records")
        return Dump(
            self._schema,
            self._header["revision"],
            self._header["time_ms"],
            tuple(self._records),
            self._counts,
        )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
