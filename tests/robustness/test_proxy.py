"""Links do what their faults say: delay, stall, lose, cut, and heal."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
import time
from collections.abc import Iterator

import pytest

from deploy.rig.process import LOCALHOST, free_ports
from deploy.rig.proxy import Fault, Link, Proxies


class _Echo(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        heard: list[bytes] = self.server.heard  # type: ignore[attr-defined]
        while data := self.request.recv(65536):
            heard.append(data)
            self.request.sendall(data)


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__((LOCALHOST, 0), _Echo)
        self.heard: list[bytes] = []

    def handle_error(self, request: object, client_address: object) -> None:
        """A reset is what is tested."""


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def link(server: _Server) -> Iterator[Link]:
    with Proxies() as proxies:
        yield proxies.link(server.server_address[1])


def connect(link: Link, timeout_s: float = 5.0) -> socket.socket:
    return socket.create_connection((LOCALHOST, link.port), timeout_s)


def says(client: socket.socket, text: bytes) -> bytes:
    client.sendall(text)
    return client.recv(len(text))


def is_silent(client: socket.socket, seconds: float = 0.2) -> bool:
    client.settimeout(seconds)
    try:
        client.recv(1)
    except TimeoutError:
        return True
    finally:
        client.settimeout(5.0)
    return False


def is_reset(client: socket.socket) -> bool:
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def test_a_link_forwards_and_passes_the_end_on(link: Link) -> None:
    with connect(link) as client:
        assert says(client, b"hello") == b"hello"
        blob = bytes(range(256)) * 4096
        threading.Thread(target=client.sendall, args=(blob,), daemon=True).start()
        got = b""
        while len(got) < len(blob):
            got += client.recv(65536)
        assert got == blob
        client.shutdown(socket.SHUT_WR)
        assert client.recv(1) == b""


def test_a_delay_holds_each_direction_back_and_keeps_the_order(link: Link) -> None:
    link.break_(Fault.DELAY, delay_s=0.15)
    with connect(link) as client:
        began = time.monotonic()
        client.sendall(b"a")
        assert says(client, b"b")[:1] == b"a"
        assert time.monotonic() - began >= 0.3
        link.heal()
        client.settimeout(5.0)


def test_what_is_stalled_comes_when_healed(link: Link, server: _Server) -> None:
    with connect(link) as client:
        assert says(client, b"one") == b"one"
        link.break_(Fault.STALL)
        client.sendall(b"two")
        assert is_silent(client)
        assert server.heard == [b"one"]
        link.heal()
        assert client.recv(3) == b"two"


def test_a_half_open_link_loses_what_is_sent_and_is_reset_when_healed(link: Link, server: _Server) -> None:
    with connect(link) as old:
        assert says(old, b"one") == b"one"
        link.break_(Fault.HALF_OPEN)
        old.sendall(b"two")
        with connect(link) as new:
            new.sendall(b"three")
            assert is_silent(old)
            assert is_silent(new)
            link.heal()
            assert is_reset(old)
            assert is_reset(new)
    assert server.heard == [b"one"]
    with connect(link) as client:
        assert says(client, b"four") == b"four"


def test_a_deaf_link_lets_requests_through_and_loses_the_answers(link: Link, server: _Server) -> None:
    with connect(link) as client:
        link.break_(Fault.DEAF)
        client.sendall(b"one")
        assert is_silent(client)
        assert server.heard == [b"one"]
        link.heal()
        assert is_reset(client)


def test_a_cut_link_resets_and_refuses(link: Link) -> None:
    with connect(link) as old:
        assert says(old, b"one") == b"one"
        link.break_(Fault.CUT)
        assert is_reset(old)
        with contextlib.suppress(ConnectionResetError), connect(link) as new:
            assert is_reset(new)
        link.heal()
        with connect(link) as client:
            assert says(client, b"two") == b"two"


def test_a_link_to_nowhere_resets() -> None:
    with Proxies() as proxies:
        nowhere = proxies.link(free_ports(1)[0])
        with connect(nowhere) as client:
            assert is_reset(client)
        assert nowhere.connections == 0
