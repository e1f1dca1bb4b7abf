"""The unit files for control plane and router (deploy/systemd): kvplane takes what they start."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from kvplane.cli.config import Config, load_config
from kvplane.cli.entry import load
from kvplane.cli.front import check_hops
from kvplane.cli.security import check_grpc_reach, client_security, server_security
from tests.deploy.charts import ROOT

FOLDER = ROOT / "deploy" / "systemd"
NAMES = ("control-plane", "router")


def settings_of(name: str) -> dict[str, str]:
    lines = (FOLDER / f"kvplane-{name}.service").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def config_of(name: str) -> Config:
    program, command, *words = shlex.split(settings_of(name)["ExecStart"])
    assert program == "/opt/kvplane/bin/kvplane"
    given = load(command).make_context(command, words).params
    file = Path(given.pop("config"))
    assert file == Path(f"/etc/kvplane/{name}.toml")
    return load_config(given, FOLDER / file.name, {})


def test_the_control_plane_knows_its_callers() -> None:
    config = config_of("control-plane")
    assert server_security(config).tls is not None
    check_grpc_reach(config)
    assert config.access
    assert not config.allow_remote
    assert config.store.startswith("etcd://")


def test_the_router_knows_its_clients_and_the_control_plane() -> None:
    config = config_of("router")
    check_hops(config)
    assert config.tls_cert
    assert config.tenants
    assert config.plane
    security = client_security(config, config.plane)
    assert (security.ca, security.token_file) == ("/etc/kvplane/ca.pem", "/etc/kvplane/router.token")


@pytest.mark.parametrize("name", NAMES)
def test_they_have_time_to_end(name: str) -> None:
    config, settings = config_of(name), settings_of(name)
    assert float(settings["TimeoutStopSec"]) > config.drain_grace + config.drain_timeout
    assert settings["Restart"] == "always"
    assert name == "control-plane" or settings["KillMode"] == "mixed"


@pytest.mark.parametrize("name", NAMES)
def test_what_another_start_does_not_mend_is_left_alone(name: str) -> None:
    assert settings_of(name)["RestartPreventExitStatus"] == "2"


@pytest.mark.parametrize("name", NAMES)
def test_the_page_lists_the_files_that_have_to_be_there(name: str) -> None:
    page = (FOLDER / "README.md").read_text()
    files = re.findall(r"/etc/kvplane/([\w.-]+)", (FOLDER / f"{name}.toml").read_text())
    assert len(files) >= 3
    assert not [file for file in files if f"`{file}`" not in page]


@pytest.mark.parametrize("name", NAMES)
def test_one_that_hangs_is_found(name: str) -> None:
    settings = settings_of(name)
    assert float(settings["WatchdogSec"]) >= 30, "a busy one is not ended"
    assert settings["Type"] == "exec", "who gives signs is the first process"


@pytest.mark.parametrize("name", NAMES)
def test_they_are_confined(name: str) -> None:
    settings = settings_of(name)
    assert settings["User"] == "kvplane"
    assert settings["CapabilityBoundingSet"] == ""
    assert (settings["ProtectSystem"], settings["ProtectHome"]) == ("strict", "yes")
