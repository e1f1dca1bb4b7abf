"""Claims over etcd, in the store and through a control plane: against bare transactions, and with group
commit against without.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import grpc

from kvplane.bench import payload
from kvplane.bench.engine import Engine
from kvplane.bench.figures import Of, Row, Target
from kvplane.bench.operations import METHOD, at_once, check, one_by_one, work
from kvplane.bench.process import Server
from kvplane.bench.raw_etcd import RawEtcd
from kvplane.bench.rig import Options, measured, served
from kvplane.bench.stores import IN_FLIGHT, Claims, Measure, Timed, fitting, mean_share, once, row
from kvplane.bench.ungrouped import UngroupedEtcdStore
from kvplane.store.clock import Clock
from kvplane.store.etcd import EtcdSettings, EtcdStore

_GROUPED = Target(3.0, at_most=False, of=Of.RATIO)
_IDLE = Target(0.6, at_most=True, of=Of.DIFFERENCE)

_IDLE_WAYS = ("raw", "store, grouped", "plane, grouped")


class _Plane:
    """Claims through a control plane's Turns stream."""

    def __init__(self, server: Server, engine: Engine, channel: grpc.aio.Channel, options: Options) -> None:
        self._server = server
        self._engine = engine
        self._channel = channel
        self._options = options

    async def once(self, count: int, in_flight: int) -> Timed:
        """Retain `count` conversations, claim each, check, forget them."""
        made = payload.conversations(f"etcd-{secrets.token_hex(4)}", self._options.blocks)
        await self._engine.retain(made, range(count))
        todo = work([(made, number) for number in range(count)], "claim")
        call: Any = self._channel.stream_stream(METHOD)()
        async with measured(self._server) as stretch:
            if in_flight == 1:
                await one_by_one(call, todo)
            else:
                await at_once([call], todo, in_flight)
        check(todo)
        await call.done_writing()
        await self._engine.free(made.request_id(number) for number in range(count))
        return Timed(stretch.elapsed_s, todo.latencies_s, stretch.cpu.server)


def own_prefix(settings: EtcdSettings) -> EtcdSettings:
    """Return the settings with a prefix that nobody else uses."""
    return replace(settings, prefix=b"/kvplane-bench-%s/" % secrets.token_hex(8).encode())


async def run(settings: EtcdSettings, clock: Clock, options: Options, core: int | None) -> list[Row]:
    """Measure claims; all keys lie below the settings' prefix, and are removed in the end."""
    async with AsyncExitStack() as stack:
        raw = await stack.enter_async_context(RawEtcd.connected(settings))
        stack.push_async_callback(raw.remove_all)
        ways: dict[str, Measure] = {"raw": partial(once, raw)}
        for grouped in (True, False):
            name = "grouped" if grouped else "single"
            kind = EtcdStore if grouped else UngroupedEtcdStore
            # Not below the control plane's prefix: it would follow what is written here.
            apart = replace(settings, prefix=settings.prefix + name.encode() + b"-store/")
            store = await stack.enter_async_context(kind(apart, clock))
            ways[f"store, {name}"] = partial(once, Claims(store))
            own = replace(settings, prefix=settings.prefix + name.encode() + b"/")
            serving = served(replace(options, store=own), "plane", core, grouped=grouped)
            server, channel = await stack.enter_async_context(serving)
            engine = await Engine.attached(channel)
            stack.push_async_callback(engine.aclose)
            ways[f"plane, {name}"] = _Plane(server, engine, channel, options).once
        idle = await _measured({name: ways[name] for name in _IDLE_WAYS}, 1, options)
        busy = await _measured(ways, IN_FLIGHT, options)
    return [*_idle_rows(idle), *_busy_rows(busy)]


async def _measured(ways: Mapping[str, Measure], in_flight: int, options: Options) -> dict[str, list[Timed]]:
    """Claim one way after the other, in turn."""
    counts = {name: await fitting(way, in_flight, options) for name, way in ways.items()}
    done: dict[str, list[Timed]] = {name: [] for name in ways}
    for number in range(options.rounds):
        options.progress(f"claims: {in_flight} in flight, round {number + 1} of {options.rounds}")
        for name, way in ways.items():
            done[name].append(await way(counts[name], in_flight))
    return done


def _idle_rows(done: Mapping[str, Sequence[Timed]]) -> list[Row]:
    raw, store, plane = (done[name] for name in _IDLE_WAYS)
    note = "against one bare transaction"
    return [
        row("claims", "the store's transaction", 1, store, raw, _IDLE, note),
        row("claims", "through a control plane", 1, plane, raw, _IDLE, note),
    ]


def _busy_rows(done: Mapping[str, Sequence[Timed]]) -> list[Row]:
    store, plane = done["store, grouped"], done["plane, grouped"]
    note = "against the same without group commit"
    served_note = f"{note}; {mean_share(plane):.0%} of the control plane's core"
    return [
        row("claims", "bare transactions", IN_FLIGHT, done["raw"]),
        row("claims", "the store's transactions", IN_FLIGHT, store, done["store, single"], _GROUPED, note),
        row(
            "claims",
            "through a control plane",
            IN_FLIGHT,
            plane,
            done["plane, single"],
            _GROUPED,
            served_note,
        ),
    ]
