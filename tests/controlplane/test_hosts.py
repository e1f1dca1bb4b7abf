"""Hosts and base URLs as engines give them: others connect there, so they say that and nothing else."""

from __future__ import annotations

import pytest

from kvplane.controlplane.validate import _is_base_url, _is_host


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.7",
        "p-0.engines.internal",
        "p_0",
        "P0.Example.",
        "::1",
        "[fd00::7]",
        "fe80::1%eth0",
        "::ffff:10.0.0.7",
    ],
)
def test_hosts(host: str) -> None:
    assert _is_host(host)


@pytest.mark.parametrize(
    "host",
    [
        "10.0.0.7:80",
        "10.0.0.7:0;169.254.169.254",  # to ZeroMQ: from the first, to the second
        "10.0.0.7/x",
        "a@b",
        "a b",
        "a\n",
        "a\0",
        "[p0]",
        "p0%eth0",
        "\u0661",
        "fe80::1%eth0;x",
        "*",
    ],
)
def test_what_says_more_than_a_host(host: str) -> None:
    assert not _is_host(host)


@pytest.mark.parametrize("url", ["http://10.0.0.7:8200", "https://p_0/", "http://[::1]:80", "HTTP://P0"])
def test_base_urls(url: str) -> None:
    assert _is_base_url(url)


@pytest.mark.parametrize("what", ["?x=", "#", "/?a", "/#/", "\t", "\n", " ", "/x"])
def test_a_base_url_has_nothing_that_a_path_would_be_lost_in(what: str) -> None:
    assert not _is_base_url(f"http://10.0.0.7:8200{what}")
    assert not _is_base_url(f"{what}http://10.0.0.7:8200")
    assert not _is_base_url(f"http://10.0.0.7{what}.example")
