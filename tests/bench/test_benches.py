"""Each bench runs, briefly, and gives plausible figures. How large they are is not for a test."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Sequence

import pytest
import uvloop

from deploy.rig.etcd import EtcdServer
from kvplane.bench import rpc, scale, stall, stored
from kvplane.bench.figures import Row
from kvplane.bench.process import ServerDiedError, ServerSpec, running
from kvplane.bench.rig import BenchError, Options

SHORT = Options(seconds=0.03, rounds=2, blocks=8)


def check_plausible(rows: Sequence[Row], rounds: int = SHORT.rounds) -> None:
    for row in rows:
        assert len(row.rounds) == rounds, row
        assert all(value > 0 for value in row.rounds), row
        assert len(row.against) in (0, rounds), row
        if row.cpu is not None:
            assert 0 < row.cpu.server < 4, row
            assert 0 < row.cpu.client < 4, row
        if row.unit == "ms":
            assert max(row.rounds) < 60_000, row
        if row.unit == "/s":
            assert max(row.rounds) < 1e8, row


@pytest.mark.parametrize(("name", "count"), [("unary", 12), ("turns", 7), ("attach", 1)])
def test_benches_of_the_api(name: str, count: int) -> None:
    said: list[str] = []
    before = os.sched_getaffinity(0)
    rows = rpc.run([name], dataclasses.replace(SHORT, progress=said.append))
    assert os.sched_getaffinity(0) == before
    assert len(rows) == count
    assert {row.bench for row in rows} == {name}
    check_plausible(rows)
    assert all(row.cpu is not None for row in rows)
    assert said


def test_pairs_are_half_of_the_operations() -> None:
    rows = {row.case: row for row in rpc.run(["turns"], SHORT)}
    for over in ("1 stream", "2 streams"):
        operations = rows[f"operations, 512 in flight over {over}"]
        pairs = rows[f"pairs of begin-turn and claim, 512 in flight over {over}"]
        assert operations.rounds == tuple(2 * value for value in pairs.rounds)


def test_scale_compares_sizes() -> None:
    rows = uvloop.run(scale.run(SHORT, None, sizes=(64, 256), memory_size=64, operations=128))
    costs = [row for row in rows if row.unit == "us CPU"]
    check_plausible(costs)
    assert [row.case for row in costs if row.against] == [
        f"{name} at 256 conversations" for name in ("lookup", "begin-turn", "claim", "announce")
    ]
    assert [row.case for row in rows if row.unit == "bytes"] == [
        "memory, 64 conversations of 500 blocks: each",
        "memory, 256 conversations of 8 blocks: each",
    ]


def test_stall_sees_everything_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    for quiet_s in (3.0, 12.0, 48.0):  # in which a busy machine starts what looks
        monkeypatch.setattr(stall, "_QUIET_S", quiet_s)
        with contextlib.suppress(BenchError):
            rows = uvloop.run(stall.run(SHORT, None, count=256))
            break
    else:
        pytest.fail("it saw nothing")
    assert [row.case.rsplit(": ")[-1] for row in rows] == ["longest", "p99.9"]
    check_plausible(rows, rounds=1)


def test_the_contract_over_memory() -> None:
    rows = stored.run("memory://", stored.names("memory://"), SHORT)
    assert len(rows) == 8
    check_plausible(rows)


def test_contract_and_claims_over_etcd(etcd_server: EtcdServer) -> None:
    url = f"etcd://{etcd_server.endpoints}"
    rows = stored.run(url, stored.names(url), SHORT)
    check_plausible(rows)
    assert len([row for row in rows if row.bench == "store"]) == 8
    claims = [row for row in rows if row.bench == "claims"]
    assert [row.case for row in claims] == [
        "the store's transaction: p50, 1 in flight",
        "through a control plane: p50, 1 in flight",
        "bare transactions: 64 in flight",
        "the store's transactions: 64 in flight",
        "through a control plane: 64 in flight",
    ]
    assert [bool(row.against and row.target) for row in claims] == [True, True, False, True, True]
    left = etcd_server.call(
        "/v3/kv/range", {"key": "L2t2cGxhbmUtYmVuY2g=", "range_end": "L2t2cGxhbmUtYmVuY2k="}
    )
    assert "kvs" not in left  # from /kvplane-bench to /kvplane-benci


def test_an_etcd_that_is_not_there_is_an_error_not_a_wait() -> None:
    with pytest.raises(BenchError):
        stored.run("etcd://127.0.0.1:1?timeout=0.2", [stored.CONTRACT], SHORT)


async def test_a_server_that_cannot_start_is_an_error() -> None:
    with pytest.raises(ServerDiedError):
        async with running(ServerSpec(store="redis://x")):
            pass
