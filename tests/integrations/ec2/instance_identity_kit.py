"""Identity documents of instances, signed as AWS signs them, by keys of the tests."""

from __future__ import annotations

import base64
import datetime
import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import pkcs7
from cryptography.x509.oid import NameOID

from healthd.integrations.ec2.settings import AwsCallers

ACCOUNT = "123456789012"
INSTANCE = "i-0123456789abcdef0"
OTHER = "i-0fedcba9876543210"


def document(instance: str = INSTANCE, **changes: object) -> bytes:
    """As the metadata service has it, and AWS signs it."""
    made = {
        "accountId": ACCOUNT,
        "architecture": "x86_64",
        "availabilityZone": "us-west-2b",
        "imageId": "ami-5fb8c835",
        "instanceId": instance,
        "instanceType": "trn1.32xlarge",
        "pendingTime": "2026-11-19T16:32:11Z",
        "privateIp": "10.158.112.84",
        "region": "us-west-2",
        "version": "2017-09-30",
        **changes,
    }
    return json.dumps({name: value for name, value in made.items() if value is not None}, indent=2).encode()


@dataclass(frozen=True)
class Region:
    """Who signs the documents of a region."""

    folder: Path
    key: rsa.RSAPrivateKey
    certificate: x509.Certificate

    @property
    def file(self) -> Path:
        """The certificate as AWS publishes it."""
        return self.folder / "region.pem"

    def sign(self, content: bytes, *options: pkcs7.PKCS7Options, digest: pkcs7.PKCS7HashTypes | None = None) -> str:
        """As a node sends it."""
        builder = pkcs7.PKCS7SignatureBuilder().set_data(content)
        builder = builder.add_signer(self.certificate, self.key, digest or hashes.SHA256())
        made = builder.sign(serialization.Encoding.DER, [pkcs7.PKCS7Options.Binary, *options])
        return base64.b64encode(made).decode()

    def sign_by_openssl(self, content: bytes, *options: str) -> str:
        """The same by another program; with `-stream` in BER, as AWS has it."""
        key = self.folder / "region.key"
        form, encoding = serialization.PrivateFormat.PKCS8, serialization.Encoding.PEM
        key.write_bytes(self.key.private_bytes(encoding, form, serialization.NoEncryption()))
        line = ("openssl", "cms", "-sign", "-binary", "-nodetach", "-outform", "DER", "-md", "sha256")
        signer = ("-signer", str(self.file), "-inkey", str(key))
        done = subprocess.run([*line, *signer, *options], input=content, capture_output=True, check=True, timeout=30)
        return base64.b64encode(done.stdout).decode()

    def callers(self, **changes: object) -> AwsCallers:
        """Settings that take this region's documents."""
        return AwsCallers(**{"certificates": self.file, "accounts": (ACCOUNT,), **changes})  # type: ignore[arg-type]


def region(folder: Path) -> Region:
    """A region with a key of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    name = x509.Name([x509.NameAttribute(NameOID.ORGANIZATION_NAME, "Amazon Web Services LLC")])
    begin = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + datetime.timedelta(days=60000))
        .sign(key, hashes.SHA256())
    )
    made = Region(folder=folder, key=key, certificate=certificate)
    made.file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    return made
