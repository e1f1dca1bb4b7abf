"""The unit files for engines (deploy/engines): what they start fits together, and the connector takes it.

vLLM's own parser reads them in tests/vllm.
"""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from unittest.mock import patch

import pytest

from deploy.engines.units import HERE, Start, UnitError, read, starts
from kvplane.client.credentials import is_loopback
from kvplane.connector.config import ConnectorConfig, read_config

STARTS = tuple(starts())
LAYOUTS = {"1p1d", "2p3d", "dp8", "multi-node-tp", "efa", "infiniband"}
each = pytest.mark.parametrize("start", STARTS, ids=str)


def config(start: Start) -> ConnectorConfig:
    with patch("kvplane.connector.config.open_credentials"):  # its files are nobody's
        return read_config(start.extra, start.environment)


def is_worker(start: Start) -> bool:
    return "--headless" in start.words


def ranks(start: Start) -> int:
    return int(start.option("--data-parallel-size") or 1)


def test_all_layouts_are_there() -> None:
    assert {start.layout for start in STARTS} == LAYOUTS
    counted = {
        layout: [
            sum(s.transfer["kv_role"] == role and not is_worker(s) for s in STARTS if s.layout == layout)
            for role in ("kv_producer", "kv_consumer")
        ]
        for layout in LAYOUTS
    }
    assert counted.pop("2p3d") == [2, 3]
    assert all(count == [1, 1] for count in counted.values()), counted


@each
def test_the_connector_takes_its_settings(start: Start) -> None:
    made = config(start)
    assert made.address == start.environment["KVPLANE_ADDRESS"]
    host, port = start.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"], start.environment.get("HTTP_PORT")
    assert made.endpoint == ("" if is_worker(start) else f"http://{host}:{port}")
    assert start.extra["bidirectional_kv_xfer"] is True
    assert start.transfer["kv_load_failure_policy"] == "recompute"
    assert start.transfer["engine_id"]
    if start.transfer["kv_role"] == "kv_consumer":
        assert made.max_ttl_s == start.extra["decoder_kv_blocks_ttl"] == 480
        assert "--enable-prefix-caching" in start.words


@each
def test_a_control_plane_elsewhere_is_reached_by_tls_with_a_name_of_ones_own(start: Start) -> None:
    made = config(start)
    assert bool(made.ca) == bool(made.token_file or made.cert) == (start.layout != "1p1d")
    for file in (made.token_file, made.cert, made.key):
        assert not file or Path(file).stem == start.name


@each
def test_other_engines_can_reach_its_side_channel(start: Start) -> None:
    host = start.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"]
    assert re.fullmatch(r"[\d.]+", host)
    assert not is_loopback(f"{host}:1")
    assert start.option("--host") == (None if is_worker(start) else host)


@each
def test_it_has_time_to_end(start: Start) -> None:
    assert 0 < int(start.option("--shutdown-timeout") or 0) < int(start.settings["TimeoutStopSec"])
    assert start.settings["KillMode"] == "mixed"


@each
def test_it_can_write_its_caches(start: Start) -> None:
    """Homes are out of reach, all else is read-only: vLLM and its compilers write to the state's folder."""
    assert start.settings["ProtectSystem"] == "strict"
    assert start.settings["ProtectHome"] == "yes"
    assert start.environment["HOME"] == f"/var/lib/{start.settings['StateDirectory']}"


@each
def test_it_comes_back_however_it_ended(start: Start) -> None:
    """vLLM's server ends with exit code 0 when its engine's process dies: on-failure takes it for success."""
    assert start.settings["Restart"] == "always"


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_engines_of_a_layout_go_together(layout: str) -> None:
    engines = [start for start in STARTS if start.layout == layout and not is_worker(start)]
    ports = defaultdict[str, list[int]](list)
    for engine in engines:
        host, first = engine.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"], engine.environment
        side = int(first["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        ports[host] += [*range(side, side + ranks(engine)), int(first["HTTP_PORT"])]
        gpus = first.get("CUDA_VISIBLE_DEVICES")
        assert gpus is None or len(gpus.split(",")) == int(engine.option("--tensor-parallel-size") or 1)
    assert all(len(set(used)) == len(used) for used in ports.values()), ports
    assert len({engine.transfer["engine_id"] for engine in engines}) == len(engines)
    alike = ("--tensor-parallel-size", "--data-parallel-size", "--nnodes")
    assert len({tuple(engine.option(name) for name in alike) for engine in engines}) == 1
    assert len({engine.environment["MODEL"] for engine in engines}) == 1


def test_hosts_of_one_engine_differ_in_their_rank_alone() -> None:
    for role in ("prefill", "decode"):
        head, worker = (
            next(s for s in STARTS if s.layout == "multi-node-tp" and s.name == f"vllm-{role}-{part}")
            for part in ("head", "worker")
        )
        assert head.transfer["engine_id"] == worker.transfer["engine_id"]
        for name in ("--tensor-parallel-size", "--nnodes", "--master-addr", "--master-port"):
            assert head.option(name) == worker.option(name)
        assert (head.option("--node-rank"), worker.option("--node-rank")) == ("0", "1")
        assert head.option("--master-addr") == head.environment["VLLM_HOST_IP"]


def test_fabrics_are_named() -> None:
    backends = {start.layout: start.extra.get("backends") for start in STARTS}
    assert backends["efa"] == ["LIBFABRIC"]
    assert backends["infiniband"] == ["UCX"]
    efa = next(start for start in STARTS if start.layout == "efa").environment
    assert efa["FI_PROVIDER"] == "efa"
    infiniband = next(start for start in STARTS if start.layout == "infiniband").environment
    assert "rc" in infiniband["UCX_TLS"].split(",")
    assert "UCX_NET_DEVICES" in infiniband


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("${MODEL}", "${MODLE}"), r"\$\{MODLE\} is set nowhere"),
        (("%N.env", "%q.env"), "%q is not known"),
        (("RestartSec=5", "RestartSec"), "'RestartSec' is no setting"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, change: tuple[str, str], said: str) -> None:
    unit, host = (HERE / "1p1d" / f"vllm-decode.{kind}" for kind in ("service", "env"))
    broken = tmp_path / unit.name
    broken.write_text(unit.read_text().replace(*change))
    with pytest.raises(UnitError, match=said):
        read(broken, host)
