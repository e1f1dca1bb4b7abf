"""The files of an etcd store's certificates, read again where connections are made anew."""

from __future__ import annotations

from dataclasses import replace

from kvplane.store.etcd.settings import EtcdTls
from kvplane.store.files import check_authorities, check_pair, read


def read_again(tls: EtcdTls) -> EtcdTls:
    """Return what the files say now; the same object if that is what they said. It blocks.

    Raises FileError.
    """
    paths = tls.paths
    ca = read(paths.ca) if paths.ca else tls.ca
    cert, key = (read(paths.cert), read(paths.key)) if paths.cert else (tls.cert, tls.key)
    if (ca, cert, key) == (tls.ca, tls.cert, tls.key):
        return tls
    if paths.ca:
        check_authorities(paths.ca)
    if paths.cert:
        check_pair(paths.cert, paths.key)
    return replace(tls, ca=ca, cert=cert, key=key)
