"""
Instances of EC2 as callers, without Kubernetes: the identity document that AWS has signed (PKCS#7, RSA-2048, SHA-256).

It says which instance of which account the bearer runs on, or has run on: it never expires, and whoever may ask the
metadata service of that instance can copy it. So it says for which names a caller may speak, those made of its instance
id, and is worth nothing without the node's key: see `healthd.aggregator.fleet`. AWS signs for all of its customers;
the accounts are what the settings say.

The form is CMS, in BER: AWS writes lengths that are not known ahead. `asn1crypto` reads it, `cryptography` verifies
the signature over the content, or over the signed attributes that have the digest of the content.

Source: AWS, "Verify the instance identity document"; RFC 5652. Verified with documents signed by openssl and by
`cryptography`, not with one of AWS.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import re
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from healthd.aggregator.identity.tokens import IMPLIED, AuthError, Caller, Instance, Scope
from healthd.aggregator.settings import AggregatorSettings
from healthd.core import wire
from healthd.core.bounded import read_file
from healthd.core.errors import BadInputError, ConfigError, words_of
from healthd.integrations.ec2.settings import AwsCallers

if TYPE_CHECKING:
    from asn1crypto import cms
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

log = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 8192
"""One has some 1,400."""
MAX_FILE_BYTES = 1 << 20
MOST_CERTIFICATES = 200
"""AWS has one for each of some 35 regions."""
LEAST_BITS = 2048
MOST_KEPT = 50_000

UNREADABLE = (ValueError, TypeError, KeyError)
"""What asn1crypto raises for bytes that are no such structure."""

_BASE64 = re.compile(r"MI[A-Za-z0-9+/]+={0,2}")  # of a SEQUENCE that is longer than 127 bytes
_INSTANCE = re.compile(r"i-[0-9a-f]{8,17}")
_ACCOUNT = re.compile(r"[0-9]{12}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")


SET = (0, 1, 17)  # class, method and tag with which signed attributes are signed; the document has [0] in their place


class DocumentError(Exception):
    """Why a document is none that we take, in a few words."""


@dataclass(frozen=True)
class _Signed:
    """What of a document matters: what was signed, by which certificate, and the signature."""

    content: bytes
    serial: int
    digest: bytes | None
    """The SHA-256 of the content as the signed attributes have it; None without such attributes."""
    covered: bytes
    """What the signature is over: the signed attributes in DER, or else the content."""
    signature: bytes


def _parse(data: bytes) -> _Signed:
    """A SignedData with its content and one signature. DocumentError."""
    from asn1crypto import cms, parser

    try:
        outer = cms.ContentInfo.load(data, strict=True)
        if outer["content_type"].native != "signed_data":
            raise DocumentError("it is not signed data")
        signed = outer["content"]
        inside, signers = signed["encap_content_info"], signed["signer_infos"]
        if inside["content_type"].native != "data":
            raise DocumentError("its content is not plain data")
        if len(signers) != 1:
            raise DocumentError("it does not have exactly one signature")
        (signer,) = signers
        if signer["digest_algorithm"]["algorithm"].native != "sha256":
            raise DocumentError("it is not signed with SHA-256: request /latest/dynamic/instance-identity/rsa2048")
        if signer["sid"].name != "issuer_and_serial_number":
            raise DocumentError("it does not name its certificate by issuer and serial number")
        content, attributes = bytes(inside["content"]), signer["signed_attrs"]
        if not isinstance(attributes, cms.CMSAttributes):
            digest, covered = None, content
        else:
            if _attribute(attributes, "content_type").native != "data":
                raise DocumentError("its content is not plain data")
            digest = bytes(_attribute(attributes, "message_digest"))
            covered = parser.emit(*SET, attributes.contents)
        return _Signed(
            content=content,
            serial=signer["sid"].chosen["serial_number"].native,
            digest=digest,
            covered=covered,
            signature=bytes(signer["signature"]),
        )
    except UNREADABLE:
        raise DocumentError("it cannot be read as signed data") from None


def _attribute(attributes: cms.CMSAttributes, kind: str) -> Any:
    """The one value of the one attribute of a kind."""
    found = [one["values"] for one in attributes if one["type"].native == kind]
    if len(found) != 1 or len(found[0]) != 1:
        raise DocumentError("its signed attributes do not fit signed data")
    return found[0][0]


def read_certificates(file: Path) -> dict[int, list[RSAPublicKey]]:
    """
    The keys of the regions' RSA-2048 certificates in a PEM file, by serial number.

    ConfigError names the file and the remedy: also without the libraries, and for the weaker certificates, those of the
    other two signatures of AWS.
    """
    try:
        import asn1crypto.cms  # noqa: F401  (for `verify`)
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import rsa
    except ImportError:
        raise ConfigError(
            "aggregator.aws.certificates: needs asn1crypto and cryptography; run 'pip install asn1crypto cryptography' "
            "in healthd's environment"
        ) from None
    try:
        found = x509.load_pem_x509_certificates(read_file(file, MAX_FILE_BYTES))
    except (OSError, BadInputError, ValueError) as error:
        raise ConfigError(
            f"{file}: no certificates can be read ({words_of(error)}); put AWS's RSA-2048 certificates of your "
            "regions there, as PEM"
        ) from None
    if len(found) > MOST_CERTIFICATES:
        raise ConfigError(f"{file}: {len(found)} certificates; {MOST_CERTIFICATES} are allowed")
    keys: dict[int, list[RSAPublicKey]] = {}
    for number, one in enumerate(found, 1):
        key = one.public_key()
        if not isinstance(key, rsa.RSAPublicKey) or key.key_size < LEAST_BITS:
            raise ConfigError(
                f"{file}: certificate {number} is not RSA with {LEAST_BITS} bits: use those that AWS lists as RSA-2048"
            )
        keys.setdefault(one.serial_number, []).append(key)
    return keys


def verify(data: bytes, keys: dict[int, list[RSAPublicKey]]) -> bytes:
    """What AWS has signed in a document. DocumentError where none of these keys has."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    signed = _parse(data)
    if signed.digest is not None and not hmac.compare_digest(signed.digest, hashlib.sha256(signed.content).digest()):
        raise DocumentError("its content does not match its signature")
    for key in keys.get(signed.serial, ()):
        try:
            key.verify(signed.signature, signed.covered, padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature:
            continue
        return signed.content
    raise DocumentError("its signature matches no certificate in 'certificates': is its region's certificate there?")


class InstanceIdentities:
    """Who the bearers of identity documents are; everything is known from the document, and nobody is asked."""

    def __init__(self, settings: AwsCallers) -> None:
        """ConfigError for certificates that cannot be used."""
        self._settings = settings
        self._keys = read_certificates(settings.certificates) if settings.certificates is not None else {}
        self._kept: OrderedDict[bytes, Caller] = OrderedDict()

    def fresh(self, digest: bytes) -> Caller | None:
        """The caller of a document that was verified before."""
        return self._kept.get(digest)

    known = fresh

    def trouble(self) -> str:
        """Nobody has to be asked."""
        return ""

    async def identify(self, token: str, digest: bytes) -> Caller | None:
        """The caller of a document; None for what is none at all. AuthError for one that does not let it in."""
        if len(token) > MAX_DOCUMENT_BYTES or not _BASE64.fullmatch(token):
            return None
        try:
            data = base64.b64decode(token, validate=True)
        except (binascii.Error, ValueError):
            return None
        try:
            caller = self._caller(verify(data, self._keys))
        except DocumentError as error:
            raise AuthError(401, f"this instance identity document is not accepted: {error}") from None
        self._kept[digest] = caller
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return caller

    def _caller(self, content: bytes) -> Caller:
        try:
            document = wire.decode(content, dict[str, Any], what="document")
        except BadInputError:
            raise DocumentError("its content is not a JSON object") from None
        instance = _text(document, "instanceId", _INSTANCE)
        account = _text(document, "accountId", _ACCOUNT)
        launched = _text(document, "pendingTime", _TIME)
        if account not in self._settings.accounts:
            raise AuthError(
                403,
                f"instance {instance} is of account {account}, which is not authorized; the "
                "operator of the aggregator adds it to 'accounts' of [aggregator.aws]",
            )
        return Caller(
            name=f"{account}/{instance}",
            scopes=IMPLIED[Scope.SYNC],
            nodes=names_of(instance, self._settings.names),
            instance=Instance(id=instance, launched=launched),
        )


def provider(settings: AggregatorSettings) -> InstanceIdentities | None:
    """Who the instances are, where the settings name accounts; else None. ConfigError."""
    callers = settings.of("aws", AwsCallers)
    return InstanceIdentities(callers) if callers.on else None


def names_of(instance: str, templates: Sequence[str]) -> tuple[str, ...]:
    """The names for which an instance may speak."""
    return tuple(template.replace("{instance}", instance) for template in templates)


def _text(document: dict[str, Any], member: str, form: re.Pattern[str]) -> str:
    value = document.get(member)
    if not isinstance(value, str) or not form.fullmatch(value):
        raise DocumentError(f"it has no usable {member}")
    return value
