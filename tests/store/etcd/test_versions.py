"""What is said of versions of etcd that lose data."""

from __future__ import annotations

import subprocess

import pytest

from deploy.rig.etcd import etcd_binary
from kvplane.store.etcd.store import EtcdStore
from kvplane.store.etcd.versions import caution


@pytest.mark.parametrize("version", ["3.4.21", "3.5.0", "3.5.1", "3.5.2", "3.5.5"])
def test_versions_that_lose_data_are_named_with_the_remedy(version: str) -> None:
    said = caution(version) or ""
    assert f"etcd {version} " in said
    assert said.endswith("3.4.22 or later" if version.startswith("3.4") else "3.5.6 or later")


@pytest.mark.parametrize(
    "version", ["3.4.22", "3.4.23", "3.5.6", "3.5.16", "3.6.0", "4.0.0", "3.6.0-rc.1", "", "odd"]
)
def test_of_others_nothing_is_said(version: str) -> None:
    assert caution(version) is None


@pytest.fixture
def version() -> str:
    """Of the etcd that tests run with."""
    shown = subprocess.run([etcd_binary(), "--version"], capture_output=True, text=True, check=True)
    return shown.stdout.split()[2]


async def test_a_store_says_it_of_the_etcd_it_is_in(store: EtcdStore, version: str) -> None:
    assert await store.caution() == caution(version)
