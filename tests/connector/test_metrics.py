from __future__ import annotations

import re
import ssl
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.request import urlopen

import pytest

from kvplane.client.model import ConversationKey
from kvplane.connector.config import ConfigError, ConnectorConfig, read_config
from kvplane.connector.envelope import Envelope, Outcome
from kvplane.connector.exposition import MetricsServer
from kvplane.connector.instruments import Instruments
from kvplane.connector.keeper import FinishedTurn
from kvplane.connector.metrics import (
    METRICS,
    Increments,
    Meter,
    Snapshot,
    expand,
    merged,
    take_snapshot,
)
from kvplane.connector.retention import Retention
from tests.security.authority import Authority, replace


class Engine:
    """Everything metrics are read from, with time that stands still."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.meter = Meter(block_size=32, bytes_per_block=1000)
        self.keeper = SimpleNamespace(counts=Counter[str](), retention=Retention(100, monotonic=lambda: 0.0))
        self.session = SimpleNamespace(attached=False, last_contact=None, dropped=0, queues={"events": 0})
        self.outcomes: Counter[str] = Counter()
        self.questions: Counter[str] = Counter()
        self.reads: Counter[str] = Counter()
        self.question_s = 0.0

    def snapshot(self) -> Snapshot:
        return take_snapshot(
            self.meter,
            self.keeper,
            self.session,
            self.outcomes,
            monotonic=lambda: self.now,
            others={"questions": self.questions, "reads": self.reads},
            question_s=self.question_s,
        )

    def values(self) -> dict[tuple[str, ...], float]:
        return {(metric.name, *labels): value for metric, labels, value in expand(self.snapshot())}

    def live(self) -> None:
        """Let everything happen that is counted."""
        self.keeper.retention.retain("a", "a", [1, 2, 3])
        self.keeper.retention.retain("b", "b", [3, 4])
        self.keeper.retention.claimed("b")
        self.keeper.counts.update(
            {
                "retained": 2,
                "freed": 1,
                "not_retained:over_budget": 3,
                "announced:accepted": 2,
                "ordered:superseded": 4,
                "dropped:expired": 5,
                "withdrawn": 6,
                "learned": 7,
            }
        )
        self.session = SimpleNamespace(
            attached=True, last_contact=990.0, dropped=8, queues={"events": 9, "announcements": 10}
        )
        self.outcomes.update({"pulled": 2, "failed:read_failed": 1, "cold:host_buffer": 1})
        self.question_s += 1.5
        self.meter.compared(100, 64, None)
        self.meter.compared(50, 0, Outcome.MISMATCH)
        self.meter.pulled(65)
        self.meter.faults["step"] += 1
        self.questions["asked"] += 1
        self.reads["read_failed"] += 1
        self.meter.resets["reload_weights"] += 1


def test_every_metric_moves() -> None:
    engine = Engine()
    before = engine.values()
    engine.live()
    engine.keeper.retention.budget = 60
    after = engine.values()
    moved = {key[0] for key in after if after[key] != before.get(key, 0.0)}
    assert moved == {metric.name for metric in METRICS}


def test_what_the_values_are() -> None:
    engine = Engine()
    engine.live()
    values = engine.values()
    assert values["retained_blocks",] == 3
    assert values["retained_bytes",] == 3000
    assert values["question_seconds",] == 1.5
    assert values["held_blocks",] == 4
    assert values["budget_blocks",] == 50
    assert values["retained_conversations",] == 2
    assert values["not_retained_turns", "over_budget"] == 3
    assert values["announcements", "accepted"] == 2
    assert [values["early_frees", why] for why in ("superseded", "expired", "withdrawn")] == [4, 5, 6]
    assert values["prefills", "cold", "host_buffer"] == 1
    assert (values["pulls",], values["read_failures",]) == (2, 1)
    assert (values["verified_tokens",], values["mismatched_tokens",]) == (64, 86)
    assert (values["pulled_tokens",], values["pulled_bytes",]) == (65, 3000)
    assert values["control_plane_silence_seconds",] == 10
    assert values["queue_entries", "announcements"] == 10
    assert values["events", "learned"] == 7


def test_nothing_is_compared_where_the_outcome_says_so() -> None:
    engine = Engine()
    engine.meter.compared(100, 0, Outcome.COLD)
    engine.meter.compared(None, 0, Outcome.MISMATCH)
    assert not engine.meter.tokens


def test_a_control_plane_never_met_has_no_silence() -> None:
    assert ("control_plane_silence_seconds",) not in Engine().values()


def test_names_are_plain() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"[a-z][a-z_]+", metric.name)


def test_increments_of_all_readers_together_are_the_totals() -> None:
    engine, increments = Engine(), Increments()
    engine.live()
    first = increments.of(engine.snapshot())
    engine.live()
    engine.session.attached = False
    second = increments.of(engine.snapshot())
    assert increments.of(engine.snapshot())["retained_turns"] == [([], 0)]
    total, both = engine.values(), {(m.name, *labels): v for m, labels, v in expand(merged(first, second))}
    assert both == total
    assert both["control_plane_attached",] == 0
    assert both["pulls",] == 4


def test_samples_of_another_version_are_left_out() -> None:
    snapshot: Any = {"nonsense": [([], 1)], "pulls": [(["extra"], 1), ([], 2)]}
    assert [(metric.name, value) for metric, _, value in expand(snapshot)] == [("pulls", 2)]


def scrape(server: MetricsServer) -> str:
    with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def test_an_own_endpoint_shows_all_of_it_and_none_of_others() -> None:
    engine = Engine()
    engine.live()
    threads = threading.active_count()
    server = MetricsServer(engine.snapshot, engine_id="d0", host="127.0.0.1", port=0)
    try:
        text = scrape(server)
        assert 'kvplane_connector_early_frees_total{engine_id="d0",reason="superseded"} 4.0' in text
        assert 'kvplane_connector_budget_blocks{engine_id="d0"} 50.0' in text
        for metric in METRICS:
            assert f"# TYPE {metric.full_name.removesuffix('_total')}" in text
        names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if line[0] != "#"}
        assert all(name.startswith("kvplane_connector_") for name in names)
        engine.keeper.counts["retained"] += 1
        assert 'kvplane_connector_retained_turns_total{engine_id="d0"} 3.0' in scrape(server)
        with pytest.raises(ConfigError, match="kvplane_metrics_port: cannot listen"):
            MetricsServer(engine.snapshot, engine_id="d1", host="127.0.0.1", port=server.port)
    finally:
        server.close()
    assert threading.active_count() == threads


def test_an_own_endpoint_by_tls_asks_for_certificates_and_follows_its_own(tmp_path: Path) -> None:
    before, after = Authority(tmp_path, "before"), Authority(tmp_path, "after")
    own, known = before.server(), before.client("prometheus")
    server = MetricsServer(
        Engine().snapshot, engine_id="d0", host="127.0.0.1", port=0, tls=(own.cert, own.key, before.ca)
    )

    def answers(authority: Authority, *, shown: bool = True) -> bool:
        context = ssl.create_default_context(cafile=authority.ca)
        if shown:
            context.load_cert_chain(known.cert, known.key)
        try:
            with urlopen(f"https://127.0.0.1:{server.port}/metrics", timeout=10, context=context) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    try:
        assert (answers(before), answers(before, shown=False), answers(after)) == (True, False, False)
        with pytest.raises(OSError, match=r"."):
            scrape(server)
        after.server()
        assert [answers(after) for _ in range(3)][-1]
        replace(own.key, b"nothing")
        assert [answers(after) for _ in range(3)] == [True] * 3
    finally:
        server.close()
    with pytest.raises(ConfigError, match=r"kvplane_metrics_tls_cert.*: no such file"):
        MetricsServer(
            Engine().snapshot, engine_id="d", host="127.0.0.1", port=0, tls=("/absent", "/absent", "")
        )


@pytest.mark.parametrize("half", ["kvplane_metrics_tls_cert", "kvplane_metrics_tls_key"])
def test_half_of_a_pair_is_refused(half: str) -> None:
    with pytest.raises(ConfigError, match="missing; a certificate and its key belong together"):
        read_config({"kvplane_address": "a:1", half: "/x"}, {})


def instruments(engine: Engine, **config: Any) -> Instruments:
    made = Instruments(
        ConnectorConfig("127.0.0.1:1", **config),
        engine_id="d0",
        rank=0,
        meter=engine.meter,
        monotonic=lambda: engine.now,
    )
    made.start(engine.keeper, engine.session, engine.outcomes)
    return made


REPORT = {
    "outcome": "pulled",
    "reused_tokens": 64,
    "matched_tokens": 64,
    "local_tokens": 0,
    "prompt_tokens": 9,
}


def test_statistics_are_due_once_a_second_and_soon_after_a_turn() -> None:
    engine = Engine()
    seen = instruments(engine)
    assert seen.stats(idle=False) is not None
    engine.now += 0.5
    assert seen.stats(idle=True) is None
    seen.handed_over(REPORT, "r", block_size=32)
    assert seen.stats(idle=False) is not None
    engine.now += 0.05
    seen.handed_over(REPORT, "r", block_size=32)
    assert seen.stats(idle=False) is None  # too soon
    assert seen.stats(idle=True) is not None  # but there may be no step for long
    engine.now += 1.0
    assert seen.stats(idle=False) is not None
    seen.close()


def test_lines_at_debug_name_turns_and_tell_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = Engine()
    turn = FinishedTurn(
        request_id="req-1",
        envelope=Envelope(ConversationKey("acme", "m", "secret-conversation"), 3),
        context=None,
        tokens=[4711] * 129,
        items=[],
        blocks=[1, 2, 3, 4, 5],
        params={},
    )
    for wanted in (False, True):
        monkeypatch.setattr("kvplane.connector.instruments.debugging", lambda _, wanted=wanted: wanted)
        seen = instruments(engine)
        seen.retained(turn, ttl_s=60.0, kept=True)
        seen.handed_over(REPORT, "req-2", block_size=32)
        out = capsys.readouterr()
        text = out.out + out.err
        assert ("turn_retained" in text) is wanted
        assert ("turn_pulled" in text) is wanted
        assert "secret-conversation" not in text
        assert "4711" not in text
        for name in ("req-1", "req-2", "tokens", "blocks", "ttl_s", "outcome") if wanted else ():
            assert name in text
