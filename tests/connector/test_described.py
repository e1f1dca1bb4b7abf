"""What an engine says of its settings when it registers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from kvplane.client import convert
from kvplane.client.model import EngineId, EngineRole, EngineSpec
from kvplane.connector.config import ConnectorConfig
from kvplane.connector.described import describe_settings
from kvplane.controlplane import validate


def vllm_config(**transfer: Any) -> Any:
    members = {"kv_role": "kv_consumer", "kv_connector_extra_config": {}, "kv_load_failure_policy": "fail"}
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(**{**members, **transfer}),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
    )


def test_what_vllm_was_told_is_said() -> None:
    made = vllm_config(kv_connector_extra_config={"decoder_kv_blocks_ttl": 60})
    config = ConnectorConfig("plane:1", max_ttl_s=45.0)
    said = describe_settings(made, config, ("10.0.0.7", 5600), refusal="recurrent_model", kv_digest="ab" * 16)
    assert said.kv_role == "kv_consumer"
    assert (said.side_channel_host, said.side_channel_port) == ("10.0.0.7", 5600)
    assert said.prefix_caching is True
    assert said.kv_load_failure_policy == "fail"
    assert (said.kv_blocks_ttl_s, said.max_ttl_s) == (60.0, 45.0)
    assert (said.refusal, said.kv_digest) == ("recurrent_model", "ab" * 16)


def test_the_host_that_is_announced_counts() -> None:
    config = ConnectorConfig("plane:1", remote_host="10.0.0.9")
    said = describe_settings(vllm_config(), config, ("localhost", 5600), refusal="", kv_digest="")
    assert said.side_channel_host == "10.0.0.9"
    assert said.kv_blocks_ttl_s == 480.0


@pytest.mark.parametrize(
    ("config", "side_channel"),
    [
        (vllm_config(kv_role="x" * 500, kv_load_failure_policy="y" * 500), ("h" * 500, 5600)),
        (vllm_config(kv_connector_extra_config=None, kv_load_failure_policy=None), (None, "5600")),
        (vllm_config(kv_connector_extra_config={"decoder_kv_blocks_ttl": -1}), ("a\nb", 99_999)),
        (vllm_config(kv_connector_extra_config={"decoder_kv_blocks_ttl": "long"}), ("", -1)),
    ],
)
def test_whatever_vllm_was_told_the_registration_is_one_that_is_taken(config: Any, side_channel: Any) -> None:
    """An engine that is refused for what only people read would retain nothing."""
    said = describe_settings(
        config, ConnectorConfig("plane:1"), side_channel, refusal="r" * 99, kv_digest="d" * 99
    )
    wire = convert.spec_to_wire(EngineSpec(EngineId("d"), EngineRole.DECODE, settings=said))
    validate.spec(wire)
