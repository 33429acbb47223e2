"""Certificates of an authority of one's own, for servers on loopback."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["Certificates"]

_ADDRESS: Final = "127.0.0.1"
_HOST: Final = "localhost"
_VALID: Final = dt.timedelta(days=7)
# Clocks of clients may be behind.
_BEFORE: Final = dt.timedelta(hours=1)


@final
@dataclass(frozen=True, slots=True)
class Certificates:
    """The files of a server with a certificate that only those trust who know the authority.

    Attributes:
        authority: Certificate of the authority: what clients are given as bundle.
        certificate: Certificate of the server, for ``127.0.0.1`` and ``localhost``.
        key: Its private key.
    """

    authority: Path
    certificate: Path
    key: Path

    @classmethod
    def make(cls, folder: Path) -> Certificates:
        """Make an authority and a certificate in a folder, or take those that are there."""
        made = cls(folder / "authority.pem", folder / "certificate.pem", folder / "key.pem")
        if made.key.exists():
            return made
        folder.mkdir(parents=True, exist_ok=True)
        authority_key = ec.generate_private_key(ec.SECP256R1())
        authority_name = _name("authority of the tests")
        authority = _sign(
            _builder(authority_name, authority_name, authority_key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_usage(signs_certificates=True), critical=True),
            authority_key,
        )
        key = ec.generate_private_key(ec.SECP256R1())
        names = [x509.IPAddress(ipaddress.ip_address(_ADDRESS)), x509.DNSName(_HOST)]
        certificate = _sign(
            _builder(_name(_HOST), authority_name, key.public_key())
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(_usage(signs_certificates=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(x509.SubjectAlternativeName(names), critical=False),
            authority_key,
        )
        made.authority.write_bytes(authority.public_bytes(serialization.Encoding.PEM))
        made.certificate.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        made.key.touch(0o600)
        made.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return made


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.timezone.utc)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _BEFORE)
        .not_valid_after(now + _VALID)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _sign(
    builder: x509.CertificateBuilder, authority: ec.EllipticCurvePrivateKey
) -> x509.Certificate:
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    return builder.add_extension(identifier, critical=False).sign(authority, hashes.SHA256())


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
