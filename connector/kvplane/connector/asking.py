"""Asks the control plane on behalf of a prefill request that no router of ours has asked for.

Two threads meet here. The scheduler's puts questions and looks for answers; the session's finds them
(`inquiry`). Neither ever waits for the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from kvplane.client.client import ControlPlaneClient
from kvplane.client.model import BegunTurn, Registration
from kvplane.client.slot import Slot
from kvplane.connector.groups import CacheLayout
from kvplane.connector.inquiry import Answer, Inquirer, Question, cold, finish_claim


class AskingSession(Protocol):
    """What is needed of EngineSessionThread. Every method returns at once."""

    @property
    def attached(self) -> bool:
        """Whether the control plane answers now."""

    @property
    def registration(self) -> Registration | None:
        """The current incarnation."""

    def submit(self, work: Callable[[ControlPlaneClient], Coroutine[Any, Any, None]]) -> bool:
        """Run `work` on the session's thread."""


@dataclass(slots=True)
class _Asked:
    """One request's question. `claim_id` is set while a claim is ours to finish."""

    asked_at: float
    slot: Slot[Answer]
    answer: Answer | None = None
    claim_id: str = ""


class Asker:
    """One question per request. Belongs to the scheduler thread; everything returns at once.

    Args:
        session: with the control plane.
        engine_id: of this engine, which is the reader.
        layout: how it keeps KV.
        chunk_tokens: of its fingerprints.
        timeout_s: an answer that takes longer is not waited for.
        monotonic: clock.
    """

    def __init__(
        self,
        session: AskingSession,
        *,
        engine_id: str,
        layout: CacheLayout,
        chunk_tokens: int,
        timeout_s: float,
        monotonic: Callable[[], float],
    ) -> None:
        self._session = session
        self._engine_id = engine_id
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._asked: dict[str, _Asked] = {}
        self._inquirer = Inquirer(engine_id, layout, chunk_tokens, timeout_s)
        self.counts: Counter[str] = Counter()
        """What happened how often: "asked", "answered", "timeout", "no_control_plane", "given_up"."""
        self.answered_s = 0.0
        """Seconds that those took that were answered, until the scheduler saw it."""

    def __len__(self) -> int:
        return len(self._asked)

    def knows(self, request_id: str) -> bool:
        """Whether it was asked for the request, which has not ended yet."""
        return request_id in self._asked

    def settle(self, request_id: str, make: Callable[[], Question | None]) -> Answer | None:
        """Return the answer for a request, None if it is still to come. Asks on the first call.

        Args:
            request_id: the engine's.
            make: makes the question; None if there is nothing to ask. Called once.
        """
        asked = self._asked.get(request_id)
        if asked is None:
            asked = self._asked[request_id] = self._ask(make)
        if asked.answer is None:
            answer = asked.slot.take()
            if answer is None and self._monotonic() - asked.asked_at >= self._timeout_s:
                answer = asked.slot.give_up()
                if answer is None:
                    self.counts["timeout"] += 1
                    answer = cold("ask_timeout")
            if answer is None:
                return None
            self._take(asked, answer)
        return asked.answer

    def asked_at(self, request_id: str) -> float:
        """When the question was put: no claim of it is older."""
        return self._asked[request_id].asked_at

    def begun(self, request_id: str) -> BegunTurn | None:
        """Return the turn that was begun for the request, if any."""
        asked = self._asked.get(request_id)
        return asked.answer.begun if asked is not None and asked.answer is not None else None

    def finish(self, request_id: str) -> None:
        """Say that the request's claim, if it has one, was read or will not be. Idempotent."""
        asked = self._asked.get(request_id)
        if asked is not None and asked.claim_id:
            claim_id, asked.claim_id = asked.claim_id, ""
            owner = asked.answer.claim.owner if asked.answer and asked.answer.claim else ""
            self._session.submit(lambda client: finish_claim(client, claim_id, owner))

    def end(self, request_id: str, *, reading: bool = False) -> None:
        """Forget a request that has ended; its claim is finished, unless it is still `reading`."""
        asked = self._asked.get(request_id)
        if asked is None:
            return
        if asked.answer is None:
            self.counts["given_up"] += 1
            late = asked.slot.give_up()
            if late is not None:
                self._take(asked, late)
        if reading and asked.claim_id:
            return
        self.finish(request_id)
        del self._asked[request_id]

    def _ask(self, make: Callable[[], Question | None]) -> _Asked:
        asked = _Asked(self._monotonic(), Slot())
        registration = self._session.registration
        if not self._session.attached or registration is None:
            self.counts["no_control_plane"] += 1
            asked.answer = cold("no_control_plane")
            return asked
        question = make()
        if question is None:
            asked.answer = cold("")
            return asked
        owner = f"{self._engine_id[:200]}@{registration.engine_epoch}"
        slot, inquirer = asked.slot, self._inquirer
        if self._session.submit(lambda client: inquirer.inquire(client, question, owner, slot)):
            self.counts["asked"] += 1
        else:
            self.counts["no_control_plane"] += 1
            asked.answer = cold("no_control_plane")
        return asked

    def _take(self, asked: _Asked, answer: Answer) -> None:
        if asked.slot.take() is answer:
            self.counts["answered"] += 1
            self.answered_s += self._monotonic() - asked.asked_at
        asked.answer = answer
        if answer.claim is not None:
            asked.claim_id = answer.claim.claim_id
