"""Engines that reads fail from are left alone for a while."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

FAILURES_TO_OPEN = 3
WINDOW_S = 60.0
MIN_HOLD_S, MAX_HOLD_S = 10.0, 300.0
_PROBE_S = 60.0
_MAX_PEERS = 1024


@dataclass(slots=True)
class _Peer:
    failed_at: deque[float] = field(default_factory=lambda: deque(maxlen=FAILURES_TO_OPEN))
    hold_s: float = 0.0
    """0: closed."""
    held_until: float = 0.0
    probed_at: float | None = None


class PeerBreaker:
    """Counts failed reads per peer, and says whether to read from it at all.

    Three failures within a minute, with no success between, open it for 10 s. Then one read is let through as
    a probe: if it fails, the time doubles, up to five minutes; if it succeeds, all is forgotten. Belongs to
    the scheduler thread; O(1), and memory for 1024 peers at most, of which the longest without failure go.
    """

    def __init__(self, monotonic: Callable[[], float]) -> None:
        self._monotonic = monotonic
        self._peers: OrderedDict[str, _Peer] = OrderedDict()
        self.opened = 0
        """How often it opened for any peer, probes that failed included."""

    def __len__(self) -> int:
        return len(self._peers)

    def held(self) -> frozenset[str]:
        """Return the peers that would not be admitted now. O(peers)."""
        if not self._peers:
            return frozenset()
        return frozenset(name for name, peer in self._peers.items() if not self._free(peer))

    def admits(self, peer: str) -> bool:
        """Whether a read from `peer` may begin. If so, say what became of it: succeeded, failed or unused."""
        known = self._peers.get(peer)
        if known is None or known.hold_s == 0:
            return True
        if not self._free(known):
            return False
        known.probed_at = self._monotonic()
        return True

    def succeeded(self, peer: str) -> None:
        """Note a read that ended well."""
        self._peers.pop(peer, None)

    def unused(self, peer: str) -> None:
        """Note that an admitted read never began."""
        known = self._peers.get(peer)
        if known is not None:
            known.probed_at = None

    def failed(self, peer: str) -> bool:
        """Note a read that failed; returns whether the breaker opened by it."""
        now = self._monotonic()
        known = self._peers.setdefault(peer, _Peer())
        self._peers.move_to_end(peer)
        while len(self._peers) > _MAX_PEERS:
            self._peers.popitem(last=False)
        if known.hold_s:
            if known.probed_at is None:
                return False  # begun before it opened
            known.hold_s = min(2 * known.hold_s, MAX_HOLD_S)
        else:
            known.failed_at.append(now)
            if len(known.failed_at) < FAILURES_TO_OPEN or now - known.failed_at[0] > WINDOW_S:
                return False
            known.hold_s = MIN_HOLD_S
        known.held_until, known.probed_at = now + known.hold_s, None
        self.opened += 1
        return True

    def _free(self, peer: _Peer) -> bool:
        now = self._monotonic()
        if peer.hold_s == 0:
            return True
        # A probe of which nothing was ever heard must not close the way for good.
        probing = peer.probed_at is not None and now - peer.probed_at < _PROBE_S
        return now >= peer.held_until and not probing
