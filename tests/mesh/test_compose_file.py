"""compose.yaml is one that Docker Compose takes, with both kinds of engines, and processes can be made of."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.compose.load import Tally
from deploy.compose.run import conversations, seconds, unfit
from deploy.compose.topology import Names, Service, resolved
from deploy.rig.process import RigError
from kvplane.cli.config import Config
from kvplane.connector.config import read_config

FAKE, VLLM = {"prefill0", "decode0", "decode1"}, {"vllm-prefill", "vllm-decode"}
COMMON = {
    *(f"{name}{n}" for name in ("controlplane", "router") for n in (0, 1)),
    "etcd0",
    "etcd1",
    "etcd2",
    "front",
}


def test_docker_compose_takes_it_with_fake_engines_unless_asked_otherwise() -> None:
    assert set(resolved()["services"]) == COMMON | FAKE
    assert set(resolved({"COMPOSE_PROFILES": "vllm"})["services"]) == COMMON | VLLM


def test_what_it_sets_are_options_of_ours() -> None:
    for name, service in resolved()["services"].items():
        for variable in service.get("environment") or ():
            if variable.startswith("KVPLANE_"):
                assert variable.removeprefix("KVPLANE_").lower() in Config.model_fields, (name, variable)


def test_the_engines_settings_are_read_by_the_connector() -> None:
    services = resolved({"COMPOSE_PROFILES": "vllm"})["services"]
    for name, role in (("vllm-prefill", "kv_producer"), ("vllm-decode", "kv_consumer")):
        service = services[name]
        own = service["networks"]["default"]["ipv4_address"]
        assert service["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"] == own
        command = service["command"]
        # vllm serve takes the model as its first word, and is to take it no longer as an option.
        assert (service["entrypoint"], command[0]) == (["vllm", "serve"], "Qwen/Qwen3-0.6B")
        config = json.loads(command[command.index("--kv-transfer-config") + 1])
        assert config["kv_role"] == role
        assert _read(config).endpoint == f"http://{own}:8000"


def _read(config: Mapping[str, Any]) -> Any:
    return read_config(config["kv_connector_extra_config"])


def test_a_grace_that_is_too_short_for_a_drain_is_not_in_it() -> None:
    """Compose kills after stop_grace_period: that is longer than what the router may take."""
    service = resolved()["services"]["router0"]
    settings = service["environment"]
    least = float(settings["KVPLANE_DRAIN_GRACE"]) + float(settings["KVPLANE_DRAIN_TIMEOUT"])
    minutes, seconds = re.fullmatch(r"(?:(\d+)m)?(\d+)s", service["stop_grace_period"]).groups()  # type: ignore[union-attr]
    assert int(minutes or 0) * 60 + int(seconds) > least


@pytest.fixture
def names() -> Names:
    aliases = {"networks": {"default": {"aliases": ["plane"]}}}
    return Names({"p0": aliases, "p1": aliases, "r0": {}}, "127.9.9")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("dns:///plane:50051", "127.9.9.1:50051,127.9.9.2:50051"),
        ("etcd://p0:2379,p1:2379/x", "etcd://127.9.9.1:2379,127.9.9.2:2379/x"),
        ("p0=http://p0:2380", "p0=http://127.9.9.1:2380"),
        ("--host=r0", "--host=127.9.9.3"),
        ("--name=r0", "--name=r0"),
        ("xp0:1 p0-a:1 p0", "xp0:1 p0-a:1 p0"),
        ("http://0.0.0.0:1", "http://127.9.9.7:1"),
    ],
)
def test_names_become_addresses(names: Names, text: str, wanted: str) -> None:
    assert names.put_into(text, "127.9.9.7") == wanted


def test_a_name_of_several_is_refused_where_one_is_needed(names: Names) -> None:
    with pytest.raises(RigError, match="plane stands for several services"):
        names.put_into("http://plane:1", "127.9.9.7")


def test_a_program_that_cannot_run_here_is_named(names: Names, tmp_path: Path) -> None:
    with pytest.raises(RigError, match="nginx is not among the programs"):
        Service("r0", {"entrypoint": ["nginx"], "command": []}, names, tmp_path)


def test_what_compose_does_not_take_is_told() -> None:
    with pytest.raises(RigError, match=r"does not take compose\.yaml: "):
        resolved({"PORT": "not a port"})


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-1", "soon", ""])
def test_a_run_takes_seconds_that_can_be_waited(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="seconds above 0"):
        seconds(text)


@pytest.mark.parametrize("text", ["0", "-3", "1.5", "many"])
def test_a_run_takes_conversations_that_ask_something(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="whole number from 1"):
        conversations(text)


def test_a_run_without_a_request_proves_nothing() -> None:
    assert not Tally().clean
    assert Tally(requests=1).clean


def test_a_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """etcd's data names the addresses of its members, which are others in each run."""
    assert unfit(tmp_path / "new") is None
    assert "is not empty" in (unfit(tmp_path) or "")
    (tmp_path / "file").touch()
    assert unfit(tmp_path / "file") == "File exists"
