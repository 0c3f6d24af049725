"""A certificate authority for tests, and what it signs, as files in PEM."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)


class Authority:
    """Signs for whoever asks; its own certificate is `file`."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self._name = folder, _name(name)
        self._key = ec.generate_private_key(ec.SECP256R1())
        constraints = x509.BasicConstraints(ca=True, path_length=0)
        certificate = self._builder(self._name, self._key.public_key())
        certificate = certificate.add_extension(constraints, critical=True)
        self.file = self._write(name, certificate.sign(self._key, hashes.SHA256()))

    def issue(self, name: str, *hosts: str) -> tuple[Path, Path]:
        """The files of a certificate for these hosts, and of its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._builder(_name(name), key.public_key())
        if hosts:
            names = x509.SubjectAlternativeName([_host(host) for host in hosts])
            certificate = certificate.add_extension(names, critical=False)
        path = self.folder / f"{name}.key"
        path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return self._write(name, certificate.sign(self._key, hashes.SHA256())), path

    def _builder(
        self, subject: x509.Name, key: ec.EllipticCurvePublicKey
    ) -> x509.CertificateBuilder:
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
        )

    def _write(self, name: str, certificate: x509.Certificate) -> Path:
        path = self.folder / f"{name}.crt"
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return path


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
