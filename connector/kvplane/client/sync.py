"""An engine's session on a thread of its own, for callers that must never wait."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

from kvplane.client import events as ev
from kvplane.client import model as m
from kvplane.client.client import ControlPlaneClient
from kvplane.client.credentials import SecuritySettings, open_credentials
from kvplane.client.event_queue import EventQueue
from kvplane.client.outbox import Outbox
from kvplane.client.session import EngineSession

_MAX_WORKS = 1024
_LAST_WORKS_S = 0.5


class EngineSessionThread:
    """Runs an EngineSession on a daemon thread. Every method but `close` returns at once.

    Nothing of gRPC exists before `start`, so a process may fork until then. What comes back is collected
    and handed over by `drain_events`: nothing is ever called on the engine's objects from the thread.

    Args:
        address: of the control plane, see open_channel.
        spec: the engine, as it registers.
        monotonic: clock of all deadlines given.
        margin_s: taken off each announced life.
        security: what to show the control plane, and whom to trust. Its files are read at once; raises
            FileError.
    """

    def __init__(
        self,
        address: str,
        spec: m.EngineSpec,
        *,
        monotonic: Callable[[], float] = time.monotonic,
        margin_s: float = 5.0,
        security: SecuritySettings | None = None,
    ) -> None:
        self._address = address
        self._credentials = open_credentials(security)
        self._spec = spec
        self._monotonic = monotonic
        self._margin_s = margin_s
        self._outbox = Outbox(monotonic=monotonic, margin_s=margin_s)
        self._events = EventQueue()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._session: EngineSession | None = None
        self._stop: asyncio.Event | None = None
        self._client: ControlPlaneClient | None = None
        self._works: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def attached(self) -> bool:
        """Whether the control plane answers now."""
        return self._session is not None and self._session.attached

    @property
    def last_contact(self) -> float | None:
        """Latest time at which the control plane can have heard of this engine; None: never."""
        return self._session.last_contact if self._session is not None else None

    @property
    def registration(self) -> m.Registration | None:
        """The current incarnation, if any."""
        return self._session.registration if self._session is not None else None

    @property
    def dropped(self) -> int:
        """Announcements dropped unsent so far."""
        return self._outbox.dropped

    @property
    def queues(self) -> dict[str, int]:
        """How much waits, by kind: to be sent, and events to be looked at."""
        return {**self._outbox.waiting, "events": len(self._events)}

    def start(self) -> None:
        """Start the thread. Idempotent; does nothing once closed."""
        if self._thread is None and not self._closed:
            self._thread = threading.Thread(target=self._main, name="kvplane-session", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # an engine inside a program may end with it, without a word

    def announce(self, announcement: m.Announcement, *, expires_at: float) -> None:
        """Queue an announcement of blocks that live until `expires_at`; its ttl is filled in when sent."""
        for request_id in self._outbox.announce(announcement, expires_at=expires_at):
            self._events.push(ev.Dropped(request_id, "queue_full"))
        self._wake()

    def withdraw(self, request_id: m.RequestId) -> bool:
        """Ask for a request's blocks back. False: nobody knows of them, free them at once."""
        asked = self._outbox.withdraw(request_id)
        self._wake()
        return asked

    def renew(self, request_id: m.RequestId, *, expires_at: float) -> bool:
        """Say that blocks live until `expires_at`, which they must already. False: they are not on record."""
        noted = self._outbox.renew(request_id, expires_at=expires_at)
        self._wake()
        return noted

    def freed(self, request_id: m.RequestId) -> None:
        """Note that a request's blocks are free."""
        self._outbox.freed(request_id)
        self._wake()

    def set_load(self, load: m.EngineLoad) -> None:
        """Set the load to report; sent within a second, only if it changed."""
        self._outbox.set_load(load)

    def submit(self, work: Callable[[ControlPlaneClient], Coroutine[Any, Any, None]]) -> bool:
        """Have `work` run on the session's thread, with the client. It hands results back by a Slot.

        It must not raise, nor block. False: it is not run, since the session is not there or has too much to
        do. At the end of the session what still runs is given half a second, and is then cancelled.
        """
        if self._session is None or self._closed or len(self._works) >= _MAX_WORKS:
            return False
        return self._call(lambda: self._begin(work))

    def start_incarnation(self) -> None:
        """Take all locations off the record by beginning a new incarnation, which announces none of them."""
        for request_id in self._outbox.condemn():
            self._events.push(ev.Dropped(request_id, "reset"))
        session = self._session
        if session is not None:
            self._call(session.start_incarnation)

    def drain_events(self) -> list[ev.Event]:
        """Return what came since the last call, in order; of what was said repeatedly, the latest."""
        return self._events.drain()

    def close(self, timeout_s: float = 2.0) -> None:
        """Take the engine off the record, if that is possible in time, and end the thread. Idempotent."""
        self._closed = True
        if self._thread is None:
            return
        if self._stop is not None:
            self._call(self._stop.set)
        self._thread.join(timeout_s)
        atexit.unregister(self.close)

    def _main(self) -> None:
        with contextlib.suppress(RuntimeError):  # the interpreter is on its way out
            asyncio.run(self._run())

    async def _run(self) -> None:
        stop = asyncio.Event()
        self._client = ControlPlaneClient(self._address, credentials=self._credentials)
        session = EngineSession(
            self._client,
            self._spec,
            self._outbox,
            self._events.push,
            monotonic=self._monotonic,
            margin_s=self._margin_s,
            address=self._address,
        )
        self._loop, self._stop, self._session = asyncio.get_running_loop(), stop, session
        if self._closed:
            stop.set()
        async with asyncio.TaskGroup() as tasks:
            run = tasks.create_task(session.run())
            await stop.wait()
            if self._works:
                await asyncio.wait(self._works, timeout=_LAST_WORKS_S)
            for work in self._works:
                work.cancel()
            await session.aclose()
            run.cancel()

    def _begin(self, work: Callable[[ControlPlaneClient], Coroutine[Any, Any, None]]) -> None:
        if self._client is not None:
            task = asyncio.get_running_loop().create_task(work(self._client))
            self._works.add(task)
            task.add_done_callback(self._works.discard)

    def _wake(self) -> None:
        session = self._session
        if session is not None:
            self._call(session.wake)

    def _call(self, function: Callable[[], object]) -> bool:
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(function)
                return True
        return False
