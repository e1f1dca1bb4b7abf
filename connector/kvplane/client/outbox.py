"""What an engine has to tell the control plane: bounded, and safe to fill from another thread.

The outbox also keeps every announcement whose blocks are still held, so that all of them can be announced
again after a reconnect. That is bounded by the blocks themselves.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from enum import Enum, auto

from kvplane.client.model import Announcement, EngineLoad, ReleaseOutcome, RequestId

MAX_BATCH = 1024
"""Largest number of each kind in one message, as the API has it."""
_MAX_BATCH_BYTES = 3 << 19
"""Of announcements in one message, before the last: with that, and ids of all else, it stays below 4 MiB."""
_LOAD_EVERY_S = 1.0
"""A control plane passes over loads that come faster."""


class _Phase(Enum):
    ON_RECORD = auto()  # announced, or waiting to be
    WITHDRAWING = auto()
    CLAIMED = auto()  # a reader holds it; not to be announced again
    ENDED = auto()  # to be freed; nothing left to say but that it was


@dataclass(slots=True)
class _Holding:
    announcement: Announcement
    expires_at: float
    phase: _Phase = _Phase.ON_RECORD
    sent: bool = False


@dataclass(slots=True)
class Batch:
    """What goes into one message."""

    announcements: list[Announcement] = field(default_factory=list)
    withdrawals: list[RequestId] = field(default_factory=list)
    renewals: dict[RequestId, float] = field(default_factory=dict)
    freed: list[RequestId] = field(default_factory=list)
    load: EngineLoad | None = None


class Outbox:
    """Holds what is to be sent. Every method returns at once and may be called from any thread.

    `margin_s` is taken off each announced life, for the way of the message. `limit` bounds the
    announcements that wait to be sent for the first time; the oldest go first.
    """

    def __init__(self, *, monotonic: Callable[[], float], margin_s: float = 5.0, limit: int = 1024) -> None:
        self._monotonic = monotonic
        self._margin_s = margin_s
        self._limit = limit
        self._lock = threading.Lock()
        self._holdings: dict[RequestId, _Holding] = {}
        self._announce: OrderedDict[RequestId, None] = OrderedDict()
        self._withdraw: OrderedDict[RequestId, None] = OrderedDict()
        self._renew: OrderedDict[RequestId, None] = OrderedDict()
        self._freed: OrderedDict[RequestId, None] = OrderedDict()
        self._load: EngineLoad | None = None
        self._load_changed = False
        self._load_sent_at = float("-inf")
        self.dropped = 0
        """Announcements dropped unsent so far."""

    def __len__(self) -> int:
        """Number of requests whose blocks are held."""
        return len(self._holdings)

    def announce(self, announcement: Announcement, *, expires_at: float) -> list[RequestId]:
        """Queue an announcement of blocks that live until `expires_at`; its own ttl is filled in when sent.

        Returns the requests whose announcements had to go for it, never sent.
        """
        request_id = announcement.request_id
        with self._lock:
            self._holdings[request_id] = _Holding(announcement, expires_at)
            self._announce[request_id] = None
            out = list[RequestId]()
            if len(self._announce) > self._limit:  # those that were sent before do not count
                unsent = [waiting for waiting in self._announce if not self._holdings[waiting].sent]
                out = unsent[: max(0, len(unsent) - self._limit)]
            for waiting in out:
                self._drop(waiting)
            return out

    def withdraw(self, request_id: RequestId) -> bool:
        """Ask for a request's blocks back. False: it was never sent, nobody knows of it, free it at once."""
        with self._lock:
            holding = self._holdings.get(request_id)
            if holding is None:
                return False
            self._announce.pop(request_id, None)
            if holding.phase is _Phase.ENDED:
                return False
            if not holding.sent:
                del self._holdings[request_id]
                return False
            holding.phase = _Phase.WITHDRAWING
            self._withdraw[request_id] = None
            return True

    def renew(self, request_id: RequestId, *, expires_at: float | None = None) -> bool:
        """Queue a correction of the recorded life of a request on record, to `expires_at` if it is given.

        The blocks must live that long already. False: it is not to stay, nothing is said.
        """
        with self._lock:
            holding = self._holdings.get(request_id)
            if holding is None or holding.phase is not _Phase.ON_RECORD:
                return False
            if expires_at is not None:
                holding.expires_at = expires_at
            if holding.sent:
                self._renew[request_id] = None
            return True

    def freed(self, request_id: RequestId) -> None:
        """Note that a request's blocks are free; said to the control plane if it may know of them."""
        with self._lock:
            holding = self._holdings.pop(request_id, None)
            for queue in (self._announce, self._withdraw, self._renew):
                queue.pop(request_id, None)
            if holding is not None and holding.sent:
                self._say_freed(request_id)

    def ordered(self, request_id: RequestId) -> bool:
        """Note a release order; True if the engine is yet to be told, False if it was or holds nothing."""
        with self._lock:
            holding = self._holdings.get(request_id)
            if holding is None:
                self._say_freed(request_id)
                return False
            self._announce.pop(request_id, None)
            self._withdraw.pop(request_id, None)
            first = holding.phase is not _Phase.ENDED
            holding.phase = _Phase.ENDED
            return first

    def withdrawn(self, request_id: RequestId, outcome: ReleaseOutcome) -> bool:
        """Note the answer to a withdrawal; False if none was waited for."""
        with self._lock:
            holding = self._holdings.get(request_id)
            if holding is None or holding.phase is not _Phase.WITHDRAWING:
                return False
            holding.phase = _Phase.CLAIMED if outcome is ReleaseOutcome.CLAIMED else _Phase.ENDED
            return True

    def set_load(self, load: EngineLoad) -> None:
        """Set the load to report; only the latest is kept."""
        with self._lock:
            if load != self._load:
                self._load, self._load_changed = load, True

    @property
    def urgent(self) -> bool:
        """Whether something waits that should not wait for the next heartbeat."""
        return bool(self._announce or self._withdraw or self._renew or self._freed)

    @property
    def waiting(self) -> dict[str, int]:
        """How much of each kind waits to be sent."""
        return {
            "announcements": len(self._announce),
            "withdrawals": len(self._withdraw),
            "renewals": len(self._renew),
            "freed": len(self._freed),
        }

    @property
    def load_due(self) -> bool:
        """Whether the load changed since it was last sent, and that is long enough ago."""
        return self._load_changed and self._monotonic() - self._load_sent_at >= _LOAD_EVERY_S

    @property
    def withdrawing(self) -> bool:
        """Whether a withdrawal is without an answer."""
        with self._lock:
            return any(holding.phase is _Phase.WITHDRAWING for holding in self._holdings.values())

    def restart(self) -> None:
        """Begin a new stream: everything held is announced again, or its withdrawal asked for again."""
        with self._lock:
            self._renew.clear()
            self._load_changed, self._load_sent_at = self._load is not None, float("-inf")
            for request_id, holding in self._holdings.items():
                if holding.phase is _Phase.ON_RECORD:
                    self._announce[request_id] = None
                elif holding.phase is not _Phase.ENDED:
                    holding.phase = _Phase.WITHDRAWING
                    self._withdraw[request_id] = None

    def condemn(self) -> list[RequestId]:
        """Announce nothing again of what is held now: its content is void. What is on record is asked back.

        Returns the requests that were never sent and are forgotten.
        """
        with self._lock:
            unsent = [request_id for request_id, holding in self._holdings.items() if not holding.sent]
            for request_id in unsent:
                self._drop(request_id)
            for request_id, holding in self._holdings.items():
                if holding.phase is _Phase.ON_RECORD:
                    holding.phase = _Phase.WITHDRAWING
                    self._withdraw[request_id] = None
            self._announce.clear()
            self._renew.clear()
            return unsent

    def lost(self, batches: Iterable[Batch]) -> None:
        """Take back what was sent without an answer and is not said again by `restart`."""
        with self._lock:
            for batch in batches:
                for request_id in batch.freed:
                    self._say_freed(request_id)

    def take(self) -> tuple[Batch, list[RequestId]]:
        """Return the next message's content, and the requests dropped because their life ran out unsent."""
        with self._lock:
            batch, now = Batch(), self._monotonic()
            expired = self._take_announcements(batch, now)
            batch.withdrawals = _pop(self._withdraw)
            batch.freed = _pop(self._freed)
            for request_id in _pop(self._renew):
                left = self._holdings[request_id].expires_at - now - self._margin_s
                if left > 0:
                    batch.renewals[request_id] = left
            if self.load_due:
                batch.load, self._load_changed, self._load_sent_at = self._load, False, now
            return batch, expired

    def _take_announcements(self, batch: Batch, now: float) -> list[RequestId]:
        size, expired = 0, list[RequestId]()
        while self._announce and len(batch.announcements) < MAX_BATCH and size < _MAX_BATCH_BYTES:
            request_id, _ = self._announce.popitem(last=False)
            holding = self._holdings[request_id]
            left = holding.expires_at - now - self._margin_s
            if left <= 0:
                if not holding.sent:
                    expired.append(request_id)
                    self._drop(request_id)
                continue
            announcement = replace(holding.announcement, ttl_s=left, reannounced=holding.sent)
            holding.sent = True
            batch.announcements.append(announcement)
            size += _size(announcement)
        return expired

    def _drop(self, request_id: RequestId) -> None:
        self._announce.pop(request_id, None)
        del self._holdings[request_id]
        self.dropped += 1

    def _say_freed(self, request_id: RequestId) -> None:
        self._freed[request_id] = None
        while len(self._freed) > 8 * self._limit:  # an order for it is repeated, so it can be said then
            self._freed.popitem(last=False)


def _size(announcement: Announcement) -> int:
    """Return about how many bytes an announcement has in a message."""
    key = announcement.key
    texts = (key.tenant_id, key.model, key.adapter, key.conversation_id, announcement.request_id)
    large = len(announcement.kv_transfer_params) + len(announcement.fingerprint.chain)
    return large + sum(len(text.encode()) for text in (*texts, announcement.endpoint)) + 64


def _pop(queue: OrderedDict[RequestId, None]) -> list[RequestId]:
    taken = list[RequestId]()
    while queue and len(taken) < MAX_BATCH:
        taken.append(queue.popitem(last=False)[0])
    return taken
