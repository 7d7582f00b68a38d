"""
Instances of EC2 as callers, without Kubernetes: the identity document that AWS has signed (PKCS#7, RSA-2048, SHA-256).

It says which instance of which account the bearer runs on, or has run on: it never expires, and whoever may ask the
metadata service of that instance can copy it. So it says for which names a caller may speak, those made of its instance
id, and is worth nothing without the node's key: see `healthd.aggregator.inventory`. AWS signs for all of its customers;
the accounts are what the settings say.

The form is CMS, in BER: AWS writes lengths that are not known ahead. What the signature covers is compared byte by
byte, so that a mistake in reading it can refuse a good document and never accept another one.

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

from healthd.aggregator.auth import IMPLIED, AuthError, Caller, Instance, Scope
from healthd.aggregator.settings import AwsCallers
from healthd.core import wire
from healthd.core.bounded import read_file
from healthd.core.errors import BadInputError, ConfigError, words_of

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

log = logging.getLogger(__name__)

MAX_DOCUMENT_BYTES = 8192
"""One has some 1,400."""
MAX_DEPTH = 16
MAX_FILE_BYTES = 1 << 20
MOST_CERTIFICATES = 200
"""AWS has one for each of some 35 regions."""
LEAST_BITS = 2048
MOST_KEPT = 50_000

_BASE64 = re.compile(r"MI[A-Za-z0-9+/]+={0,2}")  # of a SEQUENCE that is longer than 127 bytes
_INSTANCE = re.compile(r"i-[0-9a-f]{8,17}")
_ACCOUNT = re.compile(r"[0-9]{12}")
_TIME = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}Z")

SEQUENCE, SET, INTEGER, OCTETS, OBJECT = 0x30, 0x31, 0x02, 0x04, 0x06
CONSTRUCTED, CONTEXT_0 = 0x20, 0xA0
SIGNED_DATA = bytes.fromhex("2a864886f70d010702")
DATA = bytes.fromhex("2a864886f70d010701")
SHA256 = bytes.fromhex("608648016503040201")
CONTENT_TYPE = bytes.fromhex("2a864886f70d010903")
MESSAGE_DIGEST = bytes.fromhex("2a864886f70d010904")


class DocumentError(Exception):
    """Why a document is none that we take, in a few words."""


@dataclass(frozen=True)
class _Part:
    """One value of BER: its tag, its content, and what is inside of a constructed one."""

    tag: int
    content: bytes
    inner: tuple[_Part, ...]

    def octets(self) -> bytes:
        """The bytes of an OCTET STRING, also of one in pieces."""
        if self.tag == OCTETS:
            return self.content
        if self.tag == OCTETS | CONSTRUCTED:
            return b"".join(part.octets() for part in self.inner)
        raise DocumentError("no OCTET STRING where one belongs")


def _read(data: bytes, at: int, limit: int, depth: int) -> tuple[_Part, int]:
    """The value that begins at an offset and ends before `limit`, and where the next one begins."""
    if depth > MAX_DEPTH or at + 2 > limit:
        raise DocumentError("it is cut off, or too deep")
    tag, first = data[at], data[at + 1]
    at += 2
    if tag & 0x1F == 0x1F:
        raise DocumentError("a tag of several bytes")
    if first == 0x80:  # the length is not told: up to two zero bytes
        if not tag & CONSTRUCTED:
            raise DocumentError("a plain value without a length")
        begin, parts = at, []
        while data[at : at + 2] != b"\0\0":
            part, at = _read(data, at, limit, depth + 1)
            parts.append(part)
        if at + 2 > limit:
            raise DocumentError("it is cut off")
        return _Part(tag, data[begin:at], tuple(parts)), at + 2
    length = first
    if first & 0x80:
        size = first & 0x7F
        if size > 2:
            raise DocumentError("a length beyond the document")
        length, at = int.from_bytes(data[at : at + size], "big"), at + size
    end = at + length
    if end > limit:
        raise DocumentError("it is cut off")
    content, found, inside = data[at:end], [], at
    while tag & CONSTRUCTED and inside < end:
        part, inside = _read(data, inside, end, depth + 1)
        found.append(part)
    return _Part(tag, content, tuple(found)), end


def _only(part: _Part, tag: int, index: int) -> _Part:
    """The part of a constructed value at an index, which has to have that tag."""
    if index >= len(part.inner) or part.inner[index].tag != tag:
        raise DocumentError("it is not built like signed data")
    return part.inner[index]


@dataclass(frozen=True)
class _Signed:
    """What of a document matters: what was signed, by whom, and the signature."""

    content: bytes
    serial: int
    attributes: _Part | None
    signature: bytes


def _parse(data: bytes) -> _Signed:
    """A SignedData with its content and one signature. DocumentError."""
    outer, end = _read(data, 0, len(data), 0)
    if end != len(data) or outer.tag != SEQUENCE or _only(outer, OBJECT, 0).content != SIGNED_DATA:
        raise DocumentError("it is no signed data")
    signed = _only(_only(outer, CONTEXT_0, 1), SEQUENCE, 0)
    inside = _only(signed, SEQUENCE, 2)
    if _only(inside, OBJECT, 0).content != DATA:
        raise DocumentError("what is signed is no plain data")
    holder = _only(inside, CONTEXT_0, 1)
    if len(holder.inner) != 1:
        raise DocumentError("it has no content")
    signers = signed.inner[-1]
    if signers.tag != SET or len(signers.inner) != 1:
        raise DocumentError("it has not exactly one signature")
    signer = _only(signers, SEQUENCE, 0)
    serial = _only(_only(signer, SEQUENCE, 1), INTEGER, 1)
    if _only(_only(signer, SEQUENCE, 2), OBJECT, 0).content != SHA256:
        raise DocumentError("it is not signed by SHA-256: ask for /latest/dynamic/instance-identity/rsa2048")
    attributes = signer.inner[3] if len(signer.inner) > 3 and signer.inner[3].tag == CONTEXT_0 else None
    signature = _only(signer, OCTETS, 5 if attributes is not None else 4)
    return _Signed(
        content=holder.inner[0].octets(),
        serial=int.from_bytes(serial.content, "big", signed=True),
        attributes=attributes,
        signature=signature.content,
    )


def _attribute(attributes: _Part, kind: bytes) -> _Part:
    """The one value of the one attribute of a kind."""
    found = [one for one in attributes.inner if one.inner and one.inner[0].content == kind]
    if len(found) != 1 or len(found[0].inner) != 2 or len(found[0].inner[1].inner) != 1:
        raise DocumentError("its signed attributes are not those of signed data")
    return found[0].inner[1].inner[0]


def _der_set(content: bytes) -> bytes:
    """The signed attributes as they are signed: a SET, whose own tag in the document is another one."""
    size = len(content)
    if size < 0x80:
        return bytes([SET, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([SET, 0x80 | len(length)]) + length + content


def read_certificates(file: Path) -> dict[int, list[RSAPublicKey]]:
    """
    The keys of the regions' RSA-2048 certificates in a PEM file, by serial number.

    ConfigError names the file and the remedy: also without `cryptography`, and for the weaker certificates, those of
    the other two signatures of AWS.
    """
    try:
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import rsa
    except ImportError:
        raise ConfigError(
            "aggregator.aws.certificates: needs cryptography; run 'pip install cryptography' in healthd's environment"
        ) from None
    try:
        found = x509.load_pem_x509_certificates(read_file(file, MAX_FILE_BYTES))
    except (OSError, BadInputError, ValueError) as error:
        raise ConfigError(
            f"{file}: no certificates can be read ({words_of(error)}); put AWS's RSA-2048 certificates of your regions "
            "there, as PEM"
        ) from None
    if len(found) > MOST_CERTIFICATES:
        raise ConfigError(f"{file}: {len(found)} certificates; {MOST_CERTIFICATES} are allowed")
    keys: dict[int, list[RSAPublicKey]] = {}
    for number, one in enumerate(found, 1):
        key = one.public_key()
        if not isinstance(key, rsa.RSAPublicKey) or key.key_size < LEAST_BITS:
            raise ConfigError(
                f"{file}: certificate {number} is not of RSA with {LEAST_BITS} bits: take those that AWS lists as "
                "RSA-2048"
            )
        keys.setdefault(one.serial_number, []).append(key)
    return keys


def verify(data: bytes, keys: dict[int, list[RSAPublicKey]]) -> bytes:
    """What AWS has signed in a document. DocumentError where none of these keys has."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import padding

    signed = _parse(data)
    covered = signed.content
    if signed.attributes is not None:
        if _attribute(signed.attributes, CONTENT_TYPE).content != DATA:
            raise DocumentError("what is signed is no plain data")
        digest = _attribute(signed.attributes, MESSAGE_DIGEST).octets()
        if not hmac.compare_digest(digest, hashlib.sha256(signed.content).digest()):
            raise DocumentError("its content is not what was signed")
        covered = _der_set(signed.attributes.content)
    for key in keys.get(signed.serial, ()):
        try:
            key.verify(signed.signature, covered, padding.PKCS1v15(), hashes.SHA256())
        except InvalidSignature:
            continue
        return signed.content
    raise DocumentError("it is not signed by a certificate of 'certificates': is that of its region there?")


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
            raise AuthError(401, f"this instance identity document is not taken: {error}") from None
        self._kept[digest] = caller
        while len(self._kept) > MOST_KEPT:
            self._kept.popitem(last=False)
        return caller

    def _caller(self, content: bytes) -> Caller:
        try:
            document = wire.decode(content, dict[str, Any], what="document")
        except BadInputError:
            raise DocumentError("what is signed is no JSON object") from None
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


def names_of(instance: str, templates: Sequence[str]) -> tuple[str, ...]:
    """The names for which an instance may speak."""
    return tuple(template.replace("{instance}", instance) for template in templates)


def _text(document: dict[str, Any], member: str, form: re.Pattern[str]) -> str:
    value = document.get(member)
    if not isinstance(value, str) or not form.fullmatch(value):
        raise DocumentError(f"it has no usable {member}")
    return value
