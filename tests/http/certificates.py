"""Certificates for servers on this machine: good ones, and ones that nobody should believe."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

DAY = timedelta(days=1)


class Issuer(NamedTuple):
    """Who signs."""

    name: x509.Name
    key: ec.EllipticCurvePrivateKey


class Authority:
    """An authority of one test; `file` is what a client has to know of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._issuer = Issuer(_named(folder.name), _new_key())
        self.file = folder / "authority.pem"
        certificate = _signed(self._issuer, self._issuer.name, self._issuer.key, [], is_authority=True)
        self.file.write_bytes(certificate.public_bytes(Encoding.PEM))

    def server(self, *hosts: str, is_expired: bool = False, is_self_signed: bool = False) -> ssl.SSLContext:
        """What a server speaks TLS with that claims to be `hosts`."""
        key, name = _new_key(), _named(hosts[0])
        issuer = Issuer(name, key) if is_self_signed else self._issuer
        certificate = _signed(issuer, name, key, list(hosts), is_expired=is_expired)
        private = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        file = self._folder / "server.pem"
        file.write_bytes(certificate.public_bytes(Encoding.PEM) + private)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(file)
        return context


def _new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _signed(
    issuer: Issuer,
    name: x509.Name,
    key: ec.EllipticCurvePrivateKey,
    hosts: list[str],
    *,
    is_authority: bool = False,
    is_expired: bool = False,
) -> x509.Certificate:
    ends = datetime.now(UTC) + (-DAY if is_expired else DAY)
    made = (
        x509.CertificateBuilder()
        .issuer_name(issuer.name)
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(ends - 5 * DAY)
        .not_valid_after(ends)
        .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
    )
    if hosts:
        names = x509.SubjectAlternativeName([x509.DNSName(host) for host in hosts])
        made = made.add_extension(names, critical=False)
    return made.sign(issuer.key, hashes.SHA256())
