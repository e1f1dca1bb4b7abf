"""Engines of the rig that are started by hand (deploy/rig/run_engine.py)."""

from __future__ import annotations

from pathlib import Path

from deploy.rig.run_engine import parsed, settings_of


def test_routers_find_an_engine_through_its_control_plane() -> None:
    options = parsed(["decode", "--http-port", "8200", "--kvplane", "127.0.0.1:50052"])
    settings = settings_of(options, Path("venv"), Path("model"))
    extra = settings.kv_transfer_config()["kv_connector_extra_config"]
    assert extra["kvplane_address"] == "127.0.0.1:50052"
    assert extra["kvplane_endpoint"] == "http://127.0.0.1:8200"
