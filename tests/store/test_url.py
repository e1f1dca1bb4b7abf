"""From URLs to stores, and what the errors say."""

from __future__ import annotations

import pytest

from kvplane.store.memory import MemoryStore
from kvplane.store.testing import ManualClock
from kvplane.store.url import StoreUrlError, open_store, without_password


async def test_memory() -> None:
    async with open_store("memory://", ManualClock()) as store:
        assert isinstance(store, MemoryStore)
        assert await store.get(b"k") is None


async def test_each_memory_url_is_a_store_of_its_own() -> None:
    assert open_store("memory://", ManualClock()) is not open_store("memory://", ManualClock())


def test_memory_options() -> None:
    store = open_store("memory://?history_revisions=7&history_bytes=1024", ManualClock())
    assert isinstance(store, MemoryStore)
    assert (store._history_revisions, store._history_bytes) == (7, 1024)
    store = open_store("MEMORY://?history_revisions=1", ManualClock())
    assert isinstance(store, MemoryStore)
    assert store._history_revisions == 1


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "has no scheme; allowed: memory://, etcd:// and etcd3://"),
        ("memory", "has no scheme"),
        ("memory:", "has no scheme"),
        ("://", "has no scheme"),
        ("localhost:2379", "has no scheme"),
        ("//memory", "has no scheme"),
        ("redis://localhost", "unknown store scheme redis://; allowed: memory://, etcd:// and etcd3://"),
        ("mem://", "unknown store scheme mem://"),
        ("memory://localhost", "takes no host"),
        ("memory:///kv", "takes no host, path"),
        ("memory://#x", "takes no host, path or fragment"),
        ("memory://?ttl=3", "no option 'ttl'; allowed: history_revisions, history_bytes"),
        ("memory://?history_revisions", "whole number of at least 1 for history_revisions, not ''"),
        ("memory://?history_revisions=", "not ''"),
        ("memory://?history_revisions=0", "not '0'"),
        ("memory://?history_revisions=-1", "not '-1'"),
        ("memory://?history_bytes=1e6", "not '1e6'"),
        ("memory://?history_bytes=%C2%B2", "whole number"),
        ("memory://?history_bytes=1&history_bytes=2", "has the option history_bytes twice"),
        ("memory://[", "cannot be parsed"),
        ("memory://?history_bytes=" + "9" * 5000, "whole number"),
    ],
)
def test_errors_are_one_line_that_names_what_is_allowed(url: str, says: str) -> None:
    with pytest.raises(StoreUrlError) as caught:
        open_store(url, ManualClock())
    assert isinstance(caught.value, ValueError)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "url", ["etcd://u:secret@h", "redis://u:secret@h", "memory://u:secret@h", "u:secret@h", "x://u:secret@["]
)
def test_errors_do_not_repeat_passwords(url: str) -> None:
    with pytest.raises(StoreUrlError) as caught:
        open_store(url, ManualClock())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("memory://?history_bytes=9", "memory://?history_bytes=9"),
        ("etcd://h:1,g:2/p?timeout=2", "etcd://h:1,g:2/p?timeout=2"),
        ("etcd://me@h:1", "etcd://me@h:1"),
        ("etcd://me:secret@h:1/p", "etcd://me:***@h:1/p"),
        ("etcd://me:se/cr@et@h", "etcd://me:***@h"),
        ("redis://:secret@h", "redis://:***@h"),
        ("nonsense", "nonsense"),
    ],
)
def test_what_is_shown_of_a_url_has_no_password(url: str, shown: str) -> None:
    assert without_password(url) == shown
