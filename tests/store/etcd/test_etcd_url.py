"""From etcd:// URLs to settings, and what the errors say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvplane.store.etcd import EtcdSettings, EtcdStore, EtcdTls
from kvplane.store.etcd.url import etcd_settings
from kvplane.store.testing import ManualClock
from kvplane.store.url import StoreUrlError, open_store

PEM = "-----BEGIN CERTIFICATE-----\nnot looked at\n"


@pytest.mark.parametrize("scheme", ["etcd", "etcd3", "ETCD"])
def test_a_url_is_a_store(scheme: str) -> None:
    store = open_store(f"{scheme}://h1:1,h2:2/fleet", ManualClock())
    assert isinstance(store, EtcdStore)
    assert store._client._settings == EtcdSettings(("h1:1", "h2:2"), b"/fleet/")


@pytest.mark.parametrize(
    ("hosts", "endpoints"),
    [
        ("localhost", ("localhost:2379",)),
        ("10.0.0.1:1,h-2.example.:2,x_y:65535", None),
        ("etcd-0.etcd.kv.svc.cluster.local:2379", ("etcd-0.etcd.kv.svc.cluster.local:2379",)),
        ("[::1]:2379,[fe80::1]", ("[::1]:2379", "[fe80::1]:2379")),
        ("h:1,[2001:DB8::1]:2", ("h:1", "[2001:db8::1]:2")),
    ],
)
def test_endpoints(hosts: str, endpoints: tuple[str, ...] | None) -> None:
    if endpoints is None:
        with pytest.raises(StoreUrlError):
            etcd_settings(f"etcd://{hosts}")
    else:
        assert etcd_settings(f"etcd://{hosts}").endpoints == endpoints


@pytest.mark.parametrize(
    ("path", "prefix"),
    [
        ("", b"/kvplane/"),
        ("/", b"/kvplane/"),
        ("/a", b"/a/"),
        ("/a/", b"/a/"),
        ("/a/b", b"/a/b/"),
        ("/a%2Fb%20%C3%A4%FF", b"/a/b \xc3\xa4\xff/"),
        ("/" + "p" * 126, b"/" + b"p" * 126 + b"/"),
    ],
)
def test_prefixes(path: str, prefix: bytes) -> None:
    assert etcd_settings(f"etcd://h{path}").prefix == prefix
    assert etcd_settings(f"etcd://h{path}?timeout=3").prefix == prefix


def test_user_and_password_file(tmp_path: Path) -> None:
    file = tmp_path / "password"
    file.write_text(" p:w@1/\u00e4 \n")
    settings = etcd_settings(f"etcd://me%40here@h:1/p?password_file={file}&timeout=0.5")
    assert (settings.user, settings.password) == ("me@here", " p:w@1/\u00e4 ")
    assert (settings.endpoints, settings.prefix, settings.timeout_s) == (("h:1",), b"/p/", 0.5)
    assert "p:w" not in repr(settings)


def test_tls(tmp_path: Path) -> None:
    for name in ("ca", "cert", "key"):
        (tmp_path / name).write_text(PEM + name)
    files = "&".join(f"{name}={tmp_path}/{name}" for name in ("ca", "cert", "key"))
    ca, cert, key = (f"{PEM}{name}".encode() for name in ("ca", "cert", "key"))
    assert etcd_settings("etcd://h").tls is None
    assert etcd_settings("etcd://h?tls=false").tls is None
    assert etcd_settings("etcd://h?tls=true").tls == EtcdTls()
    assert etcd_settings(f"etcd://h?ca={tmp_path}/ca").tls == EtcdTls(ca=ca)
    assert etcd_settings(f"etcd://h?{files}&server_name=s").tls == EtcdTls(ca, cert, key, "s")
    assert "key" not in repr(etcd_settings(f"etcd://h?{files}"))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("etcd://", "endpoint without a host; its form is etcd://[user@]host:port[,host:port...]"),
        ("etcd:///p", "endpoint without a host"),
        ("etcd://h,", "endpoint without a host"),
        ("etcd://:2379", "endpoint without a host"),
        ("etcd://h:", "a port that is not a number from 1 to 65535"),
        ("etcd://h:0", "from 1 to 65535"),
        ("etcd://h:65536", "from 1 to 65535"),
        ("etcd://h:+1", "from 1 to 65535"),
        ("etcd://h:\u0661", "from 1 to 65535"),
        ("etcd://h:" + "9" * 5000, "from 1 to 65535"),
        ("etcd://::1", "needs brackets around an IPv6 address"),
        ("etcd://[::1", "no IPv6 address"),
        ("etcd://[h]:1", "no IPv6 address"),
        ("etcd://[::1]2", "no IPv6 address"),
        ("etcd://h h:1", "neither a name nor an address"),
        ("etcd://dns:///h", "from 1 to 65535"),
        ("etcd://h:1,h:1", "names an endpoint twice"),
        ("etcd://h,h:2379", "names an endpoint twice"),
        ("etcd://h#x", "takes no fragment"),
        ("etcd://h/" + "p" * 127, "a prefix of at most 128 bytes"),
        ("etcd://u:pw@h", "takes no password; put it into a file, named by password_file="),
        ("etcd://u@h", "needs password_file="),
        ("etcd://h?password_file=/dev/null", "a password_file, but no user"),
        ("etcd://u@h?password_file=/dev/null", "a password_file that is empty"),
        ("etcd://u@h?password_file=/nowhere/at/all", "password_file names: No such file or directory"),
        ("etcd://h?ca=/", "cannot read the file that ca names: Is a directory"),
        ("etcd://h?ca=/dev/null", "a file for ca that is not PEM"),
        ("etcd://h?ca=%00", "cannot read the file that ca names"),
        ("etcd://h?cert=/dev/null", "needs cert and key together"),
        ("etcd://h?tls=yes", "takes true or false for tls, not 'yes'"),
        ("etcd://h?tls=false&server_name=s", "has tls=false and server_name"),
        ("etcd://h?timeout=0", "takes 0.1 to 60 seconds for timeout, not '0'"),
        ("etcd://h?timeout=2s", "not '2s'"),
        ("etcd://h?timeout=nan", "not 'nan'"),
        ("etcd://h?timeout=inf", "not 'inf'"),
        ("etcd://h?timeout=", "the option timeout without a value"),
        ("etcd://h?timeout=1&timeout=1", "has the option timeout twice"),
        (
            "etcd://h?ttl=1",
            "has no option 'ttl'; allowed: tls, ca, cert, key, server_name, password_file, timeout",
        ),
        ("etcd://h?password=secret", "has no option 'password'"),
    ],
)
def test_errors_are_one_line_that_names_what_is_allowed(url: str, says: str) -> None:
    with pytest.raises(StoreUrlError) as caught:
        open_store(url, ManualClock())
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200
    assert "that is etcd://" not in str(caught.value)  # an error told within another


@pytest.mark.parametrize(
    "url",
    [
        "etcd://u:secret@h",
        "etcd://u:secret@h:0/p",
        "etcd://u:secret@",
        "etcd://secret h",
        "etcd://h?password=secret",
        "etcd://h?ca=/secret",
        "etcd://u@h?password_file=secret",
        "etcd3://u:se/secret@h",
        "u:secret@etcd://h",
    ],
)
def test_errors_repeat_nothing_that_could_be_secret(url: str) -> None:
    with pytest.raises(StoreUrlError) as caught:
        open_store(url, ManualClock())
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [{"endpoints": ()}, {"prefix": b""}, {"prefix": b"p" * 129}, {"timeout_s": 0.0}, {"timeout_s": -1.0}],
)
def test_settings_that_cannot_work(settings: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"not|needed"):
        EtcdSettings(**{"endpoints": ("h:1",), **settings})  # type: ignore[arg-type]
