from __future__ import annotations

from typing import Any

import pytest

from kvplane.connector.config import ConfigError, ConnectorConfig, read_config

ADDRESS = {"kvplane_address": "10.0.0.5:50051"}


def test_defaults() -> None:
    assert read_config(ADDRESS, {}) == ConnectorConfig("10.0.0.5:50051", "", 64, 0.5, 0.1, "")


def test_all_settings() -> None:
    extra = {
        "kvplane_address": "10.0.0.5:50051,10.0.0.6:50051",
        "kvplane_endpoint": "http://[fd00::7]:8200/",
        "kvplane_chunk_tokens": 32,
        "kvplane_retain_fraction": 1,
        "kvplane_free_block_floor": 0.0,
        "kvplane_remote_host": "[fd00::7]",
        "kvplane_tenant_id": "acme",
        "kvplane_tenant_weights": {"acme": 3, "trial": 0.5},
        "kvplane_ask_timeout_s": 1,
        "bidirectional_kv_xfer": True,  # not ours
        "backends": ["UCX"],
    }
    assert read_config(extra, {}) == ConnectorConfig(
        "10.0.0.5:50051,10.0.0.6:50051",
        "http://[fd00::7]:8200",
        32,
        1.0,
        0.0,
        "fd00::7",
        tenant_id="acme",
        tenant_weights={"acme": 3.0, "trial": 0.5},
        ask_timeout_s=1.0,
    )


def test_the_environment_stands_in_for_the_address() -> None:
    assert read_config({}, {"KVPLANE_ADDRESS": "a:1"}).address == "a:1"
    assert read_config(None, {"KVPLANE_ADDRESS": "a:1"}).address == "a:1"
    assert read_config(ADDRESS, {"KVPLANE_ADDRESS": "a:1"}).address == "10.0.0.5:50051"


def test_the_environment_stands_in_for_the_endpoint() -> None:
    variables = {"KVPLANE_ENDPOINT": "http://10.0.0.7:8000/"}
    assert read_config(ADDRESS, variables).endpoint == "http://10.0.0.7:8000"
    given = ADDRESS | {"kvplane_endpoint": "http://a:1"}
    assert read_config(given, variables).endpoint == "http://a:1"
    with pytest.raises(ConfigError, match="kvplane_endpoint: ':8000' is not an HTTP base URL"):
        read_config(ADDRESS, {"KVPLANE_ENDPOINT": ":8000"})


@pytest.mark.parametrize("address", ["localhost:1", "[::1]:50051", "dns:///plane:50051", "unix:/run/plane"])
def test_addresses(address: str) -> None:
    assert read_config({"kvplane_address": address}, {}).address == address


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({}, ["kvplane_address", "KVPLANE_ADDRESS"]),
        ({"kvplane_address": 7}, ["kvplane_address"]),
        ({"kvplane_address": "http://a:1"}, ["kvplane_address", "URL"]),
        ({"kvplane_address": "plane"}, ["kvplane_address", "host:port"]),
        ({"kvplane_address": "plane:"}, ["kvplane_address", "host:port"]),
        ({"kvplane_address": ":1"}, ["kvplane_address", "host:port"]),
        ({"kvplane_address": "plane:99999"}, ["kvplane_address", "host:port"]),
        ({"kvplane_address": "10.0.0.5:1,b"}, ["kvplane_address", "'b'"]),
        ({"kvplane_address": "a:1,b:1"}, ["kvplane_address", "'a:1'", "dns:///"]),
        ({"kvplane_adress": "a:1"}, ["kvplane_adress", "did you mean kvplane_address?"]),
        ({**ADDRESS, "kvplane_x": 1}, ["kvplane_x", "known:"]),
        ({**ADDRESS, "kvplane_endpoint": "10.0.0.7:8200"}, ["kvplane_endpoint"]),
        ({**ADDRESS, "kvplane_endpoint": "http://"}, ["kvplane_endpoint"]),
        (
            {**ADDRESS, "kvplane_endpoint": "http://fd00::7:8200"},
            ["kvplane_endpoint", "http://[fd00::7]:8200"],
        ),
        ({"kvplane_address": "fd00::7:50051"}, ["kvplane_address", "needs brackets"]),
        ({**ADDRESS, "kvplane_endpoint": "http://10.0.0.7:8200/v1"}, ["kvplane_endpoint", "without a path"]),
        ({**ADDRESS, "kvplane_remote_host": "http://10.0.0.7"}, ["kvplane_remote_host", "host name"]),
        ({"kvplane_address": ["a:1"]}, ["kvplane_address", "separated by commas"]),
        ({**ADDRESS, "kvplane_endpoint": "http://a:b"}, ["kvplane_endpoint"]),
        ({**ADDRESS, "kvplane_endpoint": 8200}, ["kvplane_endpoint"]),
        ({**ADDRESS, "kvplane_chunk_tokens": 0}, ["kvplane_chunk_tokens"]),
        ({**ADDRESS, "kvplane_chunk_tokens": "64"}, ["kvplane_chunk_tokens"]),
        ({**ADDRESS, "kvplane_chunk_tokens": True}, ["kvplane_chunk_tokens"]),
        ({**ADDRESS, "kvplane_retain_fraction": 1.5}, ["kvplane_retain_fraction"]),
        ({**ADDRESS, "kvplane_retain_fraction": "half"}, ["kvplane_retain_fraction"]),
        ({**ADDRESS, "kvplane_free_block_floor": -0.1}, ["kvplane_free_block_floor"]),
        ({**ADDRESS, "kvplane_ttl_s": "always"}, ["kvplane_ttl_s", "always", "adaptive"]),
        ({**ADDRESS, "kvplane_ttl_s": 0.5}, ["kvplane_ttl_s", "0.5"]),
        ({**ADDRESS, "kvplane_ttl_s": True}, ["kvplane_ttl_s"]),
        ({**ADDRESS, "kvplane_ttl_s": 481}, ["kvplane_ttl_s", "481", "kvplane_max_ttl_s", "480"]),
        ({**ADDRESS, "kvplane_max_ttl_s": float("nan")}, ["kvplane_max_ttl_s"]),
        ({**ADDRESS, "kvplane_min_ttl_s": 500}, ["kvplane_min_ttl_s", "kvplane_max_ttl_s"]),
        ({**ADDRESS, "kvplane_max_ttl_s": 4000}, ["kvplane_max_ttl_s", "kvplane_max_age_s", "3600"]),
        ({**ADDRESS, "kvplane_max_age_s": float("inf")}, ["kvplane_max_age_s"]),
        ({**ADDRESS, "decoder_kv_blocks_ttl": 60, "kvplane_ttl_s": 90}, ["kvplane_ttl_s", "60"]),
        ({**ADDRESS, "decoder_kv_blocks_ttl": "x"}, ["decoder_kv_blocks_ttl"]),
        ({**ADDRESS, "kvplane_remote_host": None}, ["kvplane_remote_host"]),
        ({**ADDRESS, "kvplane_tenant_weights": 3}, ["kvplane_tenant_weights: 3 is not an object such as"]),
        ({**ADDRESS, "kvplane_tenant_weights": {"a": 0}}, ["kvplane_tenant_weights: a: 0", "from 0.001"]),
        ({**ADDRESS, "kvplane_tenant_weights": {"a": True}}, ["kvplane_tenant_weights: a: True"]),
        ({**ADDRESS, "kvplane_tenant_weights": {"a": "2"}}, ["kvplane_tenant_weights: a: '2'"]),
        ({**ADDRESS, "kvplane_tenant_weights": {"": 2}}, ["kvplane_tenant_weights: not of 1 to 256 bytes"]),
        ({**ADDRESS, "kvplane_tenant_weights": {"a\ud800": 2}}, ["kvplane_tenant_weights", "Unicode"]),
        ({**ADDRESS, "kvplane_tenant_id": ""}, ["kvplane_tenant_id"]),
        ({**ADDRESS, "kvplane_tenant_id": "x" * 257}, ["kvplane_tenant_id"]),
        ({**ADDRESS, "kvplane_tenant_id": "é" * 129}, ["kvplane_tenant_id", "256 bytes"]),
        ({**ADDRESS, "kvplane_tenant_id": "a\ud800"}, ["kvplane_tenant_id", "'a\\ud800'", "Unicode"]),
        ({**ADDRESS, "kvplane_endpoint": "http://d\udfff"}, ["kvplane_endpoint", "Unicode"]),
        ({"kvplane_address": "a\ud800:1"}, ["kvplane_address", "Unicode"]),
        ({**ADDRESS, "kvplane_ask_timeout_s": -0.1}, ["kvplane_ask_timeout_s", "from 0 to 30"]),
        ({**ADDRESS, "kvplane_ask_timeout_s": True}, ["kvplane_ask_timeout_s"]),
    ],
)
def test_errors_are_one_line_and_name_the_field(extra: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        read_config(extra, {})
    message = str(raised.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (None, 480, 20, 3600)),
        ({"kvplane_ttl_s": "adaptive"}, (None, 480, 20, 3600)),
        ({"kvplane_ttl_s": 30}, (30, 480, 20, 3600)),
        ({"kvplane_max_ttl_s": 5}, (None, 5, 5, 3600)),
        ({"kvplane_max_age_s": 100}, (None, 100, 20, 100)),
        ({"decoder_kv_blocks_ttl": 60}, (None, 60, 20, 3600)),
        ({"decoder_kv_blocks_ttl": 60, "kvplane_max_ttl_s": 90}, (None, 90, 20, 3600)),
        ({"decoder_kv_blocks_ttl": 900}, (None, 480, 20, 3600)),
    ],
)
def test_leases(given: dict[str, Any], expected: tuple[float | None, float, float, float]) -> None:
    config = read_config({**ADDRESS, **given}, {})
    assert (config.ttl_s, config.max_ttl_s, config.min_ttl_s, config.max_age_s) == expected
