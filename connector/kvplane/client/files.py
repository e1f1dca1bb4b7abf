"""Files that hold credentials: read again when they change, at no cost while they do not."""

from __future__ import annotations

import os
import ssl
import stat
from collections.abc import Sequence

MAX_FILE_BYTES = 1 << 20

State = tuple[tuple[int, ...] | None, ...]
"""What tells one content of some files from another; None for a file that is not there."""


class FileError(Exception):
    """A file cannot be used; the text names it and says why."""


def state_of(paths: Sequence[str]) -> State:
    """Return the files' state. It blocks for some microseconds."""
    found = list[tuple[int, ...] | None]()
    for path in paths:
        try:
            seen = os.stat(path)
            # Also when it was changed at all: what could not be read may be by another mode now.
            found.append((seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size, seen.st_ino, seen.st_dev))
        except (OSError, ValueError):
            found.append(None)
    return tuple(found)


def read(path: str) -> bytes:
    """Return a file's content. Raises FileError."""
    try:
        with open(path, "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise FileError(f"{path}: not a file")
            content = file.read(MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = (error.strerror or "cannot be read") if isinstance(error, OSError) else "not a path"
        raise FileError(f"{path}: {reason.lower()}") from None
    if len(content) > MAX_FILE_BYTES:
        raise FileError(f"{path}: larger than {MAX_FILE_BYTES} bytes")
    return content


def read_token(path: str) -> str:
    """Return the one line of a token file. Raises FileError, which says nothing of the token."""
    try:
        token = read(path).decode("ascii").strip()
    except UnicodeDecodeError:
        token = ""
    if not token or not token.isprintable() or " " in token or len(token) > 4096:
        raise FileError(f"{path}: must be one line of 1 to 4096 printable ASCII characters without spaces")
    return token


def check_pair(cert: str, key: str) -> None:
    """Check that two files are a certificate and its key. Raises FileError, which says nothing of the key."""
    content = read(key)
    read(cert)
    if b"-----BEGIN ENCRYPTED PRIVATE KEY-----" in content or b"Proc-Type: 4,ENCRYPTED" in content:
        raise FileError(f"{key}: is protected by a password; keys have to be without one")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, password="")
    except (ssl.SSLError, OSError, ValueError) as error:
        if isinstance(error, ssl.SSLError) and error.reason == "KEY_VALUES_MISMATCH":
            raise FileError(f"{key}: is not the key of the certificate {cert}") from None
        raise FileError(f"{cert}, {key}: certificate and key cannot be read as PEM") from None


def check_authorities(path: str) -> None:
    """Check that a file has certificates of authorities. Raises FileError."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=read(path).decode("ascii"))
    except (ssl.SSLError, ValueError):
        raise FileError(f"{path}: no certificates in PEM") from None


class Watched:
    """Says when files have changed and have stayed so for a while.

    Who replaces several files does it one after the other: between them they do not fit each other.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = tuple(paths)
        self._used: State = state_of(self.paths)
        self._seen = self._used

    def look(self) -> bool:
        """Look once; true when the files differ from those last used, as they did at the look before.

        They count as used from then on, usable or not. It blocks for some microseconds.
        """
        state = state_of(self.paths)
        settled, self._seen = state == self._seen, state
        if state == self._used or not settled:
            return False
        self._used = state
        return True
