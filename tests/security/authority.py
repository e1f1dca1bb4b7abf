"""Certificates for tests: of an authority, with names of any kind, also ones that are over."""

from __future__ import annotations

import datetime
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_DAY = datetime.timedelta(days=1)


@dataclass(frozen=True)
class Pair:
    """A certificate's file and its key's."""

    cert: str
    key: str


class Authority:
    """Writes certificates into a folder."""

    def __init__(self, folder: Path, name: str = "ca") -> None:
        self.folder = folder
        self._authority = trustme.CA()
        self.ca = str(folder / f"{name}.pem")
        self._authority.cert_pem.write_to_path(self.ca)

    def server(self, name: str = "server", *hosts: str) -> Pair:
        """Issue a certificate for 127.0.0.1 and more."""
        made = self._authority.issue_cert("127.0.0.1", "localhost", *hosts)
        pair = Pair(str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key"))
        replace(pair.cert, made.cert_chain_pems[0].bytes())
        replace(pair.key, made.private_key_pem.bytes())
        return pair

    def client(
        self, name: str, uris: Sequence[str] = (), dns: Sequence[str] = (), *, expired: bool = False
    ) -> Pair:
        """Issue a certificate with names of kind URI and DNS."""
        key = ec.generate_private_key(ec.SECP256R1())
        issuer = serialization.load_pem_private_key(self._authority.private_key_pem.bytes(), None)
        assert isinstance(issuer, ec.EllipticCurvePrivateKey)
        now = datetime.datetime.now(datetime.UTC)
        names = [
            *map(x509.UniformResourceIdentifier, uris),
            *map(x509.DNSName, dns),
        ]
        certificate = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, name)]))
            .issuer_name(x509.load_pem_x509_certificate(self._authority.cert_pem.bytes()).subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 2 * _DAY)
            .not_valid_after(now - _DAY if expired else now + _DAY)
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .sign(issuer, hashes.SHA256())
        )
        pair = Pair(str(self.folder / f"{name}.pem"), str(self.folder / f"{name}.key"))
        replace(pair.cert, certificate.public_bytes(serialization.Encoding.PEM))
        replace(
            pair.key,
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            ),
        )
        return pair

    def revoke(self, *pairs: Pair, over: bool = False) -> None:
        """Put a list of what is revoked into the authority's file, in place of one that was there."""
        issuer = serialization.load_pem_private_key(self._authority.private_key_pem.bytes(), None)
        assert isinstance(issuer, ec.EllipticCurvePrivateKey)
        own = x509.load_pem_x509_certificate(self._authority.cert_pem.bytes())
        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateRevocationListBuilder()
            .issuer_name(own.subject)
            .last_update(now - 2 * _DAY)
            .next_update(now - _DAY if over else now + _DAY)
        )
        for pair in pairs:
            serial = x509.load_pem_x509_certificate(Path(pair.cert).read_bytes()).serial_number
            revoked = x509.RevokedCertificateBuilder().serial_number(serial).revocation_date(now - _DAY)
            builder = builder.add_revoked_certificate(revoked.build())
        listed = builder.sign(issuer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        replace(self.ca, self._authority.cert_pem.bytes() + listed)


def replace(path: str, content: bytes) -> None:
    """Replace a file in one step, as tools that rotate certificates do: it is another one afterwards."""
    new = f"{path}.new"
    Path(new).write_bytes(content)
    os.replace(new, path)
