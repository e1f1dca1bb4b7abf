"""TLS, client certificates, users and their tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import trustme

from deploy.rig.etcd import EtcdServer, EtcdTls
from kvplane.etcd.v1 import etcd_pb2 as pb
from kvplane.store.base import Compare, Put
from kvplane.store.clock import SystemClock
from kvplane.store.errors import StoreUnavailableError
from kvplane.store.etcd import EtcdStore
from kvplane.store.etcd.methods import ALARM
from kvplane.store.url import open_store
from tests.store.etcd.conftest import MakeStore, StartEtcd

PASSWORD = "p:w@1/ä"


@pytest.fixture
def certificates(tmp_path: Path) -> Path:
    """A folder with an authority, a server's and a client's certificate, and those of another authority."""
    for prefix in ("", "other-"):
        authority = trustme.CA()
        authority.cert_pem.write_to_path(tmp_path / f"{prefix}ca.pem")
        for name, certificate in (
            ("server", authority.issue_cert("127.0.0.1", "localhost", "etcd.example")),
            ("client", authority.issue_cert("client@kvplane.example")),
        ):
            certificate.private_key_pem.write_to_path(tmp_path / f"{prefix}{name}.key")
            certificate.cert_chain_pems[0].write_to_path(tmp_path / f"{prefix}{name}.pem")
    return tmp_path


@pytest.fixture
def secure_etcd(certificates: Path, start_etcd: StartEtcd) -> EtcdServer:
    """An etcd with TLS that wants client certificates."""
    return start_etcd(
        tls=EtcdTls(certificates / "ca.pem", certificates / "server.pem", certificates / "server.key", True)
    )


@pytest.fixture
def opened(secure_etcd: EtcdServer, certificates: Path) -> Callable[[str], EtcdStore]:
    """A function that opens a store in the secure etcd; {0} in its options is the certificates' folder."""

    def open_with(options: str) -> EtcdStore:
        url = f"etcd://{secure_etcd.endpoint}/tls?timeout=2&{options.format(certificates)}"
        store = open_store(url, SystemClock())
        assert isinstance(store, EtcdStore)
        return store

    return open_with


CLIENT = "cert={0}/client.pem&key={0}/client.key"


async def test_tls_with_a_client_certificate(opened: Callable[[str], EtcdStore]) -> None:
    async with await asyncio.to_thread(opened, "ca={0}/ca.pem&" + CLIENT) as store:
        done = await store.transact([Compare(b"k", 0)], [Put(b"k", b"v")])
        assert (await anext(store.watch(b"", from_revision=done.revision))).revision == done.revision
        lease = await store.grant_lease(10)
        assert await store.keep_lease(lease.lease_id) == lease


@pytest.mark.parametrize(
    "options",
    [
        pytest.param("ca={0}/ca.pem", id="no-client-certificate"),
        pytest.param("ca={0}/other-ca.pem&" + CLIENT, id="another-authority"),
        pytest.param("ca={0}/ca.pem&cert={0}/other-client.pem&key={0}/other-client.key", id="another-client"),
        pytest.param("ca={0}/ca.pem&server_name=other.example&" + CLIENT, id="another-server-name"),
        pytest.param("tls=true&" + CLIENT, id="the-systems-authorities"),
        pytest.param("tls=false", id="no-tls"),
    ],
)
async def test_what_does_not_fit_is_not_connected(opened: Callable[[str], EtcdStore], options: str) -> None:
    async with await asyncio.to_thread(opened, options) as store:
        with pytest.raises(StoreUnavailableError):
            await store.transact([], [Put(b"k", b"v")])


async def test_a_server_known_by_another_name(opened: Callable[[str], EtcdStore]) -> None:
    async with await asyncio.to_thread(opened, "ca={0}/ca.pem&server_name=etcd.example&" + CLIENT) as store:
        assert await store.get(b"k") is None


async def test_certificates_are_read_again_where_connections_are_made_anew(
    secure_etcd: EtcdServer, certificates: Path, opened: Callable[[str], EtcdStore]
) -> None:
    """etcd reads its own at each handshake; here both sides' come from another authority meanwhile."""
    async with await asyncio.to_thread(opened, "ca={0}/ca.pem&" + CLIENT) as store:
        first = await store.transact([], [Put(b"k", b"1")])
        assert first.succeeded

        def replace() -> None:
            for name in ("server", "client"):
                for end in ("pem", "key"):
                    (certificates / f"other-{name}.{end}").replace(certificates / f"{name}.{end}")
            (certificates / "other-ca.pem").replace(certificates / "ca.pem")
            secure_etcd.restart()

        await asyncio.to_thread(replace)
        watch = store.watch(b"k", from_revision=first.revision)
        assert (await anext(watch)).revision == first.revision
        assert (await store.transact([Compare(b"k", first.revision)], [Put(b"k", b"2")])).succeeded
        lease = await store.grant_lease(10)
        assert await store.keep_lease(lease.lease_id) == lease


async def test_certificates_that_cannot_be_used_leave_the_old_ones_in_use(
    secure_etcd: EtcdServer, certificates: Path, opened: Callable[[str], EtcdStore]
) -> None:
    async with await asyncio.to_thread(opened, "ca={0}/ca.pem&" + CLIENT) as store:
        assert await store.get(b"k") is None
        await asyncio.to_thread((certificates / "client.key").write_text, "nonsense")
        await asyncio.to_thread(secure_etcd.restart)
        assert await store.get(b"k") is None
        await asyncio.to_thread(secure_etcd.stop)
        with pytest.raises(StoreUnavailableError, match=r"certificates not read again: .*cannot be read"):
            await store.get(b"k")


async def test_a_user_whose_tokens_end(start_etcd: StartEtcd, tmp_path: Path) -> None:
    """etcd forgets a token after its time, and at a restart: calls get another one, and nobody notices.

    The user may do what the store needs, and nothing else.
    """
    server = await asyncio.to_thread(start_etcd, flags=("--auth-token-ttl", "1"))
    await asyncio.to_thread(server.add_user, "kv", PASSWORD, b"/fleet/")
    await asyncio.to_thread(server.enable_auth, "root's")
    file = tmp_path / "password"
    await asyncio.to_thread(file.write_text, PASSWORD + "\n")
    url = f"etcd://kv@{server.endpoint}/fleet?password_file={file}&timeout=10"
    async with await asyncio.to_thread(open_store, url, SystemClock()) as store:
        assert isinstance(store, EtcdStore)
        first = await store.transact([Compare(b"k", 0)], [Put(b"k", b"1")])
        assert first.succeeded
        token = store._client._token
        assert token
        await asyncio.sleep(4)  # etcd looks once a second
        done = await asyncio.gather(
            store.transact([Compare(b"k", first.revision)], [Put(b"k", b"2")]),
            *[store.transact([], [Put(b"%d" % number, b"")]) for number in range(10)],
        )
        assert all(each.succeeded for each in done)
        assert store._client._token not in ("", token)
        watch = store.watch(b"", from_revision=done[0].revision)
        await anext(watch)
        lease = await store.grant_lease(10)
        assert await store.keep_lease(lease.lease_id) == lease
        await asyncio.to_thread(server.restart)
        done[0] = await store.transact([], [Put(b"k", b"3", lease.lease_id)])
        assert (await anext(watch)).revision == done[0].revision
        assert await store.keep_lease(lease.lease_id) == lease
        assert [item.key for item in (await store.scan(b"")).items][-1] == b"k"
        await store.revoke_lease(lease.lease_id)
        assert await store.get(b"k") is None
        assert not (await store._client.repeated(ALARM, pb.AlarmRequest())).alarms


async def test_a_user_without_rights(start_etcd: StartEtcd, make_store: MakeStore) -> None:
    server = await asyncio.to_thread(start_etcd)
    await asyncio.to_thread(server.add_user, "kv", PASSWORD, b"/fleet/")
    await asyncio.to_thread(server.enable_auth, "root's")
    store = make_store(server.endpoint, user="kv", password=PASSWORD, prefix=b"/other/")
    with pytest.raises(StoreUnavailableError, match="PERMISSION_DENIED"):
        await store.get(b"k")
    with pytest.raises(StoreUnavailableError, match="PERMISSION_DENIED"):
        await store.transact([], [Put(b"k", b"")])
    with pytest.raises(StoreUnavailableError):
        await anext(store.watch(b""))


@pytest.mark.parametrize("user", [{}, {"user": "root", "password": "wrong"}])
async def test_no_user_or_a_wrong_password(
    start_etcd: StartEtcd, make_store: MakeStore, user: dict[str, str]
) -> None:
    server = await asyncio.to_thread(start_etcd)
    await asyncio.to_thread(server.enable_auth, PASSWORD)
    store = make_store(server.endpoint, **user)
    for call in (
        lambda: store.get(b"k"),
        lambda: store.transact([], [Put(b"k", b"")]),
        lambda: anext(store.watch(b"")),
    ):
        with pytest.raises(StoreUnavailableError, match="INVALID_ARGUMENT") as caught:
            await call()
        assert "wrong" not in str(caught.value)


async def test_a_password_that_is_replaced(start_etcd: StartEtcd, tmp_path: Path) -> None:
    """The file is read whenever etcd wants the password; what cannot be read leaves the one before."""
    server = await asyncio.to_thread(start_etcd)
    await asyncio.to_thread(server.add_user, "kv", PASSWORD, b"/fleet/")
    await asyncio.to_thread(server.enable_auth, "root's")
    file = tmp_path / "password"
    await asyncio.to_thread(file.write_text, "another")
    url = f"etcd://kv@{server.endpoint}/fleet?password_file={file}&timeout=10"
    async with await asyncio.to_thread(open_store, url, SystemClock()) as store:
        with pytest.raises(StoreUnavailableError, match="INVALID_ARGUMENT"):
            await store.get(b"k")
        await asyncio.to_thread(file.write_text, PASSWORD)
        assert await store.get(b"k") is None
        await asyncio.to_thread(file.unlink)
        await asyncio.to_thread(server.restart)  # which forgets its tokens
        assert await store.get(b"k") is None
        await asyncio.to_thread(file.write_text, "another")
        await asyncio.to_thread(server.restart)
        with pytest.raises(StoreUnavailableError, match="INVALID_ARGUMENT"):
            await store.get(b"k")
        await asyncio.to_thread(file.write_bytes, b"\xff")
        with pytest.raises(StoreUnavailableError, match=r"not read again: .*not UTF-8 text") as caught:
            await store.get(b"k")
        assert "another" not in str(caught.value)
