"""Write the table of limits, deploy/LIMITS.md, from the constants themselves, or check that it is fresh.

usage: python -m deploy.reference.limits [--check]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kvplane.cli import tenant_limits
from kvplane.cli.config import Config
from kvplane.client import files as client_files
from kvplane.client import link, outbox, turns
from kvplane.connector import envelope, recall
from kvplane.controlplane import (
    access,
    attachments,
    callers,
    decoding,
    location_service,
    server,
    turn_streams,
    validate,
)
from kvplane.controlplane import connections as connections_of_plane
from kvplane.controlplane import model as m
from kvplane.controlplane import turns as plane_turns
from kvplane.controlplane.upkeep import dump
from kvplane.router import (
    connections,
    conversations,
    forms,
    identity,
    keys,
    kubernetes,
    openai,
    places,
    reloading,
    replies,
)
from kvplane.router import settings as router_settings
from kvplane.store import base, files, memory

TARGET = Path(__file__).resolve().parents[1] / "LIMITS.md"
INTRODUCTION = """# Limits

What arrives is bounded before it is worked on. Made from the constants by `python -m
deploy.reference.limits`; `make lint` checks that it is fresh. Limits with a flag are in
[OPTIONS.md](OPTIONS.md), those of tenants in [QUOTAS.md](QUOTAS.md) and [TENANTS.md](TENANTS.md).
"""
UNLIMITED = """
## What is not limited by kvplane

- Connections of one peer to the control plane, as against all: gRPC has no such limit. The port is for
  routers and engines only; `--grpc-client-ca` keeps out who has no certificate.
- Messages on their way to the control plane, all together. With an access file of tokens, what strangers send
  is not read (40 messages of 16 MiB at once by nobody took 490 MiB before, 5 MiB now), but for those of
  `grpc.health.v1`, which is for everyone: gRPC reads such a message, up to the size above, before it can be
  refused, so many at a time take about their size in memory. The same goes for everyone where there is
  neither an access file nor `--grpc-client-ca`, as on loopback. `--grpc-client-ca` is the remedy for both.
- Connections to the router: one without a request ends after a while (above); requests are bounded in all.
  In front of the open internet, a proxy bounds connections per address.
- Live engines: each costs a lease that ends within seconds, and some kilobytes.
- The etcd behind a control plane: what lies there was written by its owners. Records are read as if not.
"""
_DEFAULTS = router_settings.RouterSettings(plane_address="h:1")

Row = tuple[str, str, str]


def _bytes(count: float) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size and count % size == 0:
            return f"{count / size:g} {unit}"
    return f"{count:,} bytes"


def _connections() -> str:
    others = connections_of_plane._OTHER_FILES
    return f"{connections_of_plane.MAX_CONNECTIONS:,}, or `ulimit -n` less {others}"


def _option(name: str) -> str:
    return f"{Config.model_fields[name].default:,} (`--{name.replace('_', '-')}`)"


def control_plane() -> list[Row]:
    """Return what it takes from engines and routers."""
    refused, full = "`INVALID_ARGUMENT`", "`RESOURCE_EXHAUSTED`"
    return [
        ("connections", _connections(), "closed at once"),
        ("time until a connection is made, TLS included", f"{server.HANDSHAKE_S} s", "closed"),
        ("a message", _bytes(decoding.MAX_REQUEST_BYTES), full),
        ("what is received before it is read", f"{_bytes(server.UNREAD_BYTES)} a connection", "it waits"),
        ("a registration", _bytes(decoding.MAX_SPEC_BYTES), refused),
        ("elements and fields of a message", f"{decoding._MOST_FIELDS:,}", refused),
        (
            "elements of a list: announcements, withdrawals, renewals, freed, operations",
            f"{validate.MAX_BATCH:,}",
            refused,
        ),
        ("served models of an engine", "64", refused),
        (
            "an id: tenant, model, adapter, conversation, request, engine, owner, claim",
            _bytes(validate.MAX_ID_BYTES),
            refused,
        ),
        ("an endpoint's URL", "2 KiB", refused),
        ("`kv_transfer_params`", _bytes(validate.MAX_PARAMS_BYTES), refused),
        ("a fingerprint's chain", _bytes(validate.MAX_CHAIN_BYTES), refused),
        ("the two together", _bytes(validate.MAX_RECORD_BYTES), refused),
        ("tokens for one entry of a fingerprint", f"{validate.MAX_CHUNK_TOKENS:,}", refused),
        ("lease class", f"{validate.MAX_LEASE_CLASS:,}", refused),
        ("a wait", f"{validate.MAX_WAIT_S:g} s", refused),
        ("a duration of an engine's settings", f"{validate.MAX_SPAN_S // 86_400:,} days", refused),
        ("a page", "1,000 entries", refused),
        ("an answer", _bytes(server.MAX_ANSWER_BYTES), "pages and parts are far smaller"),
        ("an answer of a `Turns` stream", _bytes(turn_streams.MAX_ANSWER_BYTES), "goes in parts"),
        ("calls and streams on one connection", f"{server.MAX_CALLS:,}", "callers wait"),
        ("streams of an engine", "1", "the newer one takes the place of the older"),
        ("`Turns` streams", f"{location_service.MAX_TURNS_STREAMS:,} a replica", full),
        ("`WatchLocations` streams", f"{location_service.MAX_WATCHES:,} a replica", full),
        ("of either, for one caller of the access file", "four times what is then free", full),
        ("begin-turns and claims that wait for one conversation", f"{plane_turns._MAX_WAITS}", "not waited"),
        (
            "operations of a `Turns` stream under way",
            f"{turn_streams.MAX_OUTSTANDING:,}",
            "it is not read from",
        ),
        (
            "acknowledgements that an engine has not read",
            f"{attachments._MAX_UNREAD:,}",
            "it is not read from",
        ),
        ("orders in a message to an engine", f"{attachments._MAX_ORDERS:,}", "the rest follows"),
        ("a bearer token", f"{callers._MAX_TOKEN_LENGTH:,} characters", "`UNAUTHENTICATED`"),
        ("conversations on record", _option("max_conversations"), "the oldest go"),
        ("engine ids whose last epoch is remembered", f"{m.Settings().max_epochs:,}", "the oldest go"),
        (
            "life of a location",
            f"{Config.model_fields['location_ttl'].default:g} s (`--location-ttl`)",
            "shortened",
        ),
    ]


def router() -> list[Row]:
    """Return what it takes from clients."""
    seconds = f"{_DEFAULTS.body_timeout_s:g} s"
    return [
        ("a request line, a header", "8 KiB each, of aiohttp's server", "400"),
        ("a body, unpacked", _bytes(_DEFAULTS.max_body_bytes), "413"),
        ("all bodies under way, small ones left aside", _bytes(_DEFAULTS.body_budget_bytes), "503"),
        ("time until a body is there", seconds, "408"),
        ("time until a request's headers are there", f"{_DEFAULTS.keepalive_timeout_s:g} s", "closed"),
        ("time that a client takes nothing of its stream", f"{_DEFAULTS.send_timeout_s:g} s", "closed"),
        ("values in a body's JSON", f"{openai._MOST_VALUES:,}", "400"),
        ("lists and objects in each other", f"{openai._MOST_DEPTH:,}", "400"),
        ("fields of a form", f"{forms._MOST_PARTS:,}", "400"),
        ("a conversation's id, a model's name", _bytes(identity.MAX_ID_BYTES), "400"),
        ("`x-request-id`", "128 printable characters", "replaced"),
        ("`ttl_s` of a touch", f"{conversations._MOST_S:,} s", "400"),
        ("requests under way", _option("max_requests"), "429"),
        ("requests on one engine", _option("max_engine_requests"), "they wait"),
        ("requests that wait", _option("max_queued"), "429"),
        (
            "time that a request waits",
            f"{Config.model_fields['queue_timeout'].default:g} s (`--queue-timeout`)",
            "503",
        ),
        ("requests whose decisions are kept", _option("explained_turns"), "the oldest go"),
    ]


def engines() -> list[Row]:
    """Return what the router takes from engines, and from what tells it of engines."""
    return [
        (
            "an answer that is not streamed",
            _bytes(connections.MAX_ANSWER_BYTES),
            "as an engine that breaks off: tried elsewhere, 502",
        ),
        (
            "an event of a stream",
            _bytes(replies._LONGEST_EVENT),
            "passes in pieces; ends the stream if it holds what is not for clients",
        ),
        ("an error's message", f"{openai._LONGEST_MESSAGE:,} characters", "cut"),
        (
            "time without a byte of a stream",
            f"{_DEFAULTS.idle_timeout_s:g} s",
            "the stream ends, without its last chunk",
        ),
        ("time until an answer begins", f"{_DEFAULTS.first_byte_timeout_s:g} s", "504"),
        (
            "a list of models, a version",
            _bytes(connections.MAX_LIST_BYTES),
            "as an engine that does not answer",
        ),
        (
            "a page of pods",
            _bytes(kubernetes._LONGEST_LIST),
            "asked for again later; engines stay as they were",
        ),
        ("pods of a selector", f"{kubernetes._MOST_PAGES * kubernetes._PAGE:,}", "the same"),
        ("a change of a pod", _bytes(kubernetes._LONGEST_EVENT), "the same"),
        ("engines asked for a request that say they are busy", f"{places.MOST_ASKED}", "429"),
    ]


def connector() -> list[Row]:
    """Return what an engine's connector takes and keeps."""
    return [
        ("a message of the control plane's", _bytes(link.MAX_MESSAGE_BYTES), "the call fails"),
        ("ids in a request's envelope", _bytes(envelope._MAX_ID_BYTES), "there is no envelope"),
        ("a promised fingerprint's chain", _bytes(envelope._MAX_CHAIN_BYTES), "nothing is pulled"),
        ("prompts remembered of conversations without ids", f"{recall._MAX_PROMPTS:,}", "the oldest go"),
        (
            "announcements in a message",
            f"{outbox.MAX_BATCH:,}, {_bytes(outbox._MAX_BATCH_BYTES)}",
            "the rest follows",
        ),
        (
            "operations of a router's client in a message",
            f"{turns._MAX_OPERATIONS:,}, {_bytes(turns._MAX_BYTES)}",
            "the rest follows",
        ),
    ]


def kept() -> list[Row]:
    """Return what stores and files may hold."""
    return [
        ("a key of a store", _bytes(base.MAX_KEY_BYTES), "refused"),
        ("a value", _bytes(base.MAX_VALUE_BYTES), "refused"),
        ("a transaction", f"{base.MAX_TXN_OPERATIONS} operations, {_bytes(base.MAX_TXN_BYTES)}", "refused"),
        (
            "what watches of the memory store can replay",
            f"{memory.HISTORY_REVISIONS:,} revisions, {_bytes(memory.HISTORY_BYTES)}",
            "`OUT_OF_RANGE`: list again",
        ),
        ("a line of a dump", _bytes(dump.MAX_LINE_BYTES), "the line is named"),
        (
            "`--config`, certificates, keys, tokens, the access file",
            _bytes(files.MAX_FILE_BYTES),
            "the file is named",
        ),
        ("the same of clients", _bytes(client_files.MAX_FILE_BYTES), "the file is named"),
        ("identities in the access file", f"{access._MAX_IDENTITIES:,}", "the file is named"),
        ("`--tenant-limits`", _bytes(tenant_limits._MAX_BYTES), "the file is named"),
        ("`--engine-api-key-file`", _bytes(keys._MOST_BYTES), "the file is named"),
        (
            "other files that the router reads again when they change",
            _bytes(reloading._MOST_BYTES),
            "the file is named",
        ),
    ]


def _table(title: str, rows: list[Row]) -> str:
    lines = "".join(f"| {what} | {most} | {then} |\n" for what, most, then in rows)
    return f"\n## {title}\n\n| what | at most | then |\n|---|---|---|\n{lines}"


def page() -> str:
    """Return the page."""
    return INTRODUCTION + "".join(
        (
            _table("Control plane, from engines and routers", control_plane()),
            _table("Router, from clients", router()),
            _table("Router, from engines", engines()),
            _table("Connector and clients of the control plane", connector()),
            _table("Stores and files", kept()),
            UNLIMITED,
        )
    )


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if the page is stale")
    if parser.parse_args().check:
        if not TARGET.exists() or TARGET.read_text() != page():
            print("stale: deploy/LIMITS.md; run 'make generate'", file=sys.stderr)
            return 1
        return 0
    TARGET.write_text(page())
    print("wrote deploy/LIMITS.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
