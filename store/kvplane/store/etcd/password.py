"""The file with a user's password, read again whenever etcd wants it."""

from __future__ import annotations

from kvplane.store.files import FileError, read


def password_in(content: bytes) -> str:
    """Return the password that a file holds: all of it but line ends behind it. Raises ValueError."""
    try:
        password = content.decode().rstrip("\r\n")
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    if not password:
        raise ValueError("empty")
    return password


def read_password(path: str) -> str:
    """Return the password in a file. Raises FileError, which says nothing of it. It blocks."""
    try:
        return password_in(read(path))
    except ValueError as error:
        raise FileError(f"{path}: {error}") from None
