"""The replicas of one store: signs of life, agreed time, and who sweeps first."""

from __future__ import annotations

import asyncio
import secrets
from importlib.metadata import version

import structlog

from kvplane.controlplane import keys, records
from kvplane.controlplane import model as m
from kvplane.controlplane.fleet_time import FleetTime
from kvplane.controlplane.ledger import Keep, Ledger, understood
from kvplane.controlplane.mirror import wait_for
from kvplane.controlplane.schema import SchemaError, ensure_schema
from kvplane.store.base import Compare, Event
from kvplane.store.errors import StoreClosedError, StoreError

log = structlog.get_logger(__name__)

_PULSES_PER_BOUND = 4
"""Pulses per time that a mirror may be stale, so that one or two may get lost."""
_AGREE_PULSES = 3
"""For how many of their intervals a starting replica waits for the pulse of another."""
_ALIVE_MS = 5_000
_FAR_MS = 10 * 366 * 86_400_000
"""A pulse that is further ahead than ten years is damaged."""
VERSION = version("kvplane")
"""Of this software."""
_OPTIONS = ("--claim-timeout", "--location-ttl", "--engine-lease")
"""By which the members of Terms are set."""


class TermsDifferError(SchemaError):
    """This replica would promise other durations than those that run. One line that says which.

    A claim's life has `claim_grace_s` in it, which is no option.
    """

    def __init__(self, ours: m.Terms, theirs: m.Terms, claim_grace_s: float) -> None:
        less = (claim_grace_s, 0.0, 0.0)
        differing = [
            (option, mine / 1000 - off, other / 1000 - off)
            for option, mine, other, off in zip(_OPTIONS, ours, theirs, less, strict=True)
            if mine != other
        ]
        given = ", ".join(f"{option} {mine:g}" for option, mine, _ in differing)
        running = ", ".join(f"{other:g}" for _, _, other in differing)
        super().__init__(
            f"{given}: the replicas that run have {running} (seconds), and what one promises a reader another"
            " would break; give all the same, stopping all of them to change it"
        )


class Replicas:
    """Writes this replica's pulse and follows those of the others. None of them is special.

    When a pulse comes back through the watch, all that was committed before it has come too: so the mirror's
    staleness is measured, not assumed. Each pulse tells the time as its replica has it. A replica that starts
    answers nothing before it has agreed on the time.
    """

    def __init__(self, ledger: Ledger, time: FleetTime, settings: m.Settings) -> None:
        self._ledger = ledger
        self._time = time
        self._every_s = settings.max_staleness_s / _PULSES_PER_BOUND
        self._claim_grace_s = settings.claim_grace_s
        self._seen: dict[str, int] = {}
        self._terms = m.Terms(
            round(settings.claim_life_s * 1000),
            round(settings.max_location_ttl_s * 1000),
            round(settings.engine_lease_s * 1000),
        )
        self._others_terms: m.Terms | None = None
        self._agreed = False
        self._heard = asyncio.Event()
        self.replica_id = secrets.token_hex(8)
        ledger.mirror.listen(keys.PULSES, self._on_pulse)

    def _on_pulse(self, event: Event) -> None:
        replica_id = event.key.removeprefix(keys.PULSES).decode()
        if event.current is None:
            self._seen.pop(replica_id, None)
            return
        pulse = records.load_pulse(event.current.value)
        if not 0 < pulse.time_ms < self._time.now_ms() + _FAR_MS:
            raise ValueError(f"a time of {pulse.time_ms} ms cannot be")
        if self._agreed:
            self._time.heard(pulse.time_ms)
        elif self._ledger.mirror.listed.is_set():
            # Not behind what others have said: a pulse may have been long on its way.
            self._time.adopt(max(pulse.time_ms, *self._seen.values(), 0))
            self._agreed = True
            self._others_terms = pulse.terms
            self._heard.set()
        self._seen[replica_id] = pulse.time_ms

    async def _agree(self) -> None:
        """Take the time of the replicas that run; without one, go on from where the last ones stopped."""
        if self._seen:
            await wait_for(self._heard, self._time, _AGREE_PULSES * self._every_s)
        if not self._agreed:
            self._agreed = True
            self._time.heard(max(self._seen.values(), default=0))
            if len(self._ledger.mirror):
                self._time.distrust()
        if self._others_terms is not None and self._others_terms != self._terms:
            raise TermsDifferError(self._terms, self._others_terms, self._claim_grace_s)
        self._ledger.mirror.trust()

    def pulses(self) -> dict[str, m.Pulse]:
        """Return the last sign of life of each replica that is known, by its id."""
        found = dict[str, m.Pulse]()
        for replica_id in self._seen:
            item = self._ledger.mirror.get(keys.pulse(replica_id))
            pulse = None if item is None else understood(item, records.load_pulse)
            if pulse is not None:
                found[replica_id] = pulse
        return found

    def rank(self) -> int:
        """Return this replica's place among the living ones: 0 for the first. O(replicas)."""
        since = self._time.now_ms() - _ALIVE_MS
        return sum(other < self.replica_id for other, time_ms in self._seen.items() if time_ms >= since)

    def living(self) -> int:
        """Return how many replicas live, this one included. O(replicas)."""
        since = self._time.now_ms() - _ALIVE_MS
        others = sum(
            replica_id != self.replica_id and time_ms >= since for replica_id, time_ms in self._seen.items()
        )
        return others + 1

    async def run(self) -> None:
        """Agree on the time, then pulse until the store is closed; its being away is a matter of course.

        Raises TermsDifferError, SchemaError.
        """
        await self._agree()
        pulse_key = keys.pulse(self.replica_id)
        while True:
            now = self._time.now_ms()
            try:
                schema = self._ledger.mirror.get(keys.schema())
                if schema is None:  # the store was emptied under us
                    await ensure_schema(self._ledger.store)
                value = records.dump_pulse(m.Pulse(now, VERSION, self._terms))
                # Nobody else writes or removes it: if it is not there, the store may be another one by now.
                last = self._ledger.mirror.get(pulse_key)
                compares = [] if last is None else [Compare(pulse_key, last.mod_revision)]
                written = await self._ledger.commit(compares, [Keep(pulse_key, value, now + _ALIVE_MS)])
                if not written and last is not None and self._ledger.mirror.get(pulse_key) is None:
                    self._ledger.mirror.doubted.set()
                self._note(None)
            except StoreClosedError:
                return
            except StoreError as error:
                self._note(error)
            await self._time.sleep(self._every_s)

    def _note(self, trouble: StoreError | None) -> None:
        """Log when it begins and when it ends, not at every pulse."""
        before, self._ledger.mirror.trouble = self._ledger.mirror.trouble, trouble
        if type(before) is not type(trouble):
            if trouble is not None:
                log.warning("pulse_not_written", cause=str(trouble))
            else:
                log.info("pulse_written_again")
