"""What lets people see into the connector: counters, statistics for vLLM, an own /metrics, lines at debug."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from kvplane.client.logs import debugging, get_logger, hashed
from kvplane.connector.asking import Asker
from kvplane.connector.config import ConnectorConfig
from kvplane.connector.exposition import MetricsServer
from kvplane.connector.keeper import FinishedTurn
from kvplane.connector.metrics import Increments, Meter, Snapshot, take_snapshot

_EVERY_S = 1.0
_SOONEST_S = 0.1

_LOGGER = "kvplane.connector"
_log = get_logger(_LOGGER)


class Instruments:
    """Belongs to the scheduler thread; only snapshots are taken on others.

    Args:
        config: with the port of the own /metrics.
        engine_id: for its label.
        rank: within data parallelism; added to the port.
        meter: what the scheduler counts.
        monotonic: clock.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        *,
        engine_id: str,
        rank: int,
        meter: Meter,
        monotonic: Callable[[], float],
    ) -> None:
        self.meter = meter
        """What the scheduler counts."""
        self._config = config
        self._engine_id = engine_id
        self._rank = rank
        self._monotonic = monotonic
        self._snapshot: Callable[[], Snapshot] | None = None
        self._server: MetricsServer | None = None
        self._increments = Increments()
        self._taken_at = 0.0
        self._changed = True
        self._debugging = debugging(_LOGGER)

    def start(
        self,
        keeper: Any,
        session: Any,
        outcomes: Mapping[str, int],
        asker: Asker | None = None,
        **others: Counter[str],
    ) -> None:
        """Begin to read from the keeper, the session, the prefills' outcomes, and other counts by metric.

        `asker` is who asks the control plane, if anybody does.

        Raises:
            ConfigError: the port of the own /metrics cannot be had.
        """

        def snapshot() -> Snapshot:
            return take_snapshot(
                self.meter,
                keeper,
                session,
                outcomes,
                monotonic=self._monotonic,
                others=others,
                question_s=0.0 if asker is None else asker.answered_s,
            )

        if asker is not None:
            others["questions"] = asker.counts

        self._snapshot = snapshot
        if self._config.metrics_port and self._server is None:
            host, port = self._config.metrics_host, self._config.metrics_port + self._rank
            self._server = MetricsServer(
                snapshot, engine_id=self._engine_id, host=host, port=port, tls=self._config.metrics_tls
            )
            _log.info("metrics_listening", host=host, port=port, tls=self._config.metrics_tls is not None)

    def close(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def stats(self, *, idle: bool) -> Snapshot | None:
        """Return what is new for vLLM's statistics, None if it is too soon.

        Called at every step. Once a second, and soon after a turn ended: at once where the engine has
        nothing more to do, since there may be no step for long.
        """
        now = self._monotonic()
        since = now - self._taken_at
        due = since >= _EVERY_S or (self._changed and (idle or since >= _SOONEST_S))
        if self._snapshot is None or not due:
            return None
        self._taken_at, self._changed = now, False
        return self._increments.of(self._snapshot())

    def retained(self, turn: FinishedTurn, *, ttl_s: float, kept: bool) -> None:
        """Note a finished turn that could be retained, and whether it was."""
        self._changed = True
        if self._debugging:
            key = turn.envelope.key
            _log.debug(
                "turn_retained" if kept else "turn_not_retained",
                request_id=turn.request_id,
                conversation=hashed(key.tenant_id, key.conversation_id),
                turn=turn.envelope.turn,
                tokens=len(turn.tokens),
                blocks=len(set(turn.blocks)),
                ttl_s=round(ttl_s, 3),
                outcome="retained" if kept else "not_retained",
            )

    def handed_over(self, report: Mapping[str, Any], request_id: str, *, block_size: int) -> None:
        """Note a prefill turn handed over, with what became of its pull."""
        self._changed = True
        pulled = report["reused_tokens"]
        if pulled:
            self.meter.pulled(pulled)
        if self._debugging:
            _log.debug(
                "turn_pulled" if pulled else "turn_not_pulled",
                request_id=request_id,
                outcome=report["outcome"],
                tokens=pulled,
                blocks=-(-pulled // block_size),
                matched_tokens=report["matched_tokens"],
                local_tokens=report["local_tokens"],
                prompt_tokens=report["prompt_tokens"],
            )
