"""Instances of EC2 that speak for themselves: what of a signed document is believed, and what a copy of it is worth."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import os
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization.pkcs7 import PKCS7Options

from healthd.aggregator.identity.tokens import AuthError, Caller, Instance, Scope, new_token
from healthd.core.errors import ConfigError
from healthd.integrations.ec2.credential import write_credential
from healthd.integrations.ec2.identities import DocumentError, InstanceIdentities, read_certificates, verify
from healthd.integrations.ec2.settings import AwsCallers
from healthd.node.settings import SyncSettings
from tests.aggregator.api_kit import running
from tests.aggregator.identity_kit import sync
from tests.checks.identity_kit import read_request, reply, serving
from tests.integrations.ec2.instance_identity_kit import ACCOUNT, INSTANCE, OTHER, Region, document, region
from tests.patience import PATIENCE

pytestmark = pytest.mark.anyio
NO_ATTRIBUTES = PKCS7Options.NoAttributes


@pytest.fixture(name="aws")
def _aws(tmp_path: Path) -> Region:
    return region(tmp_path / "region")


async def who(aws: Region, token: str, **changes: object) -> Caller | None:
    return await InstanceIdentities(aws.callers(**changes)).identify(token, hashlib.sha256(token.encode()).digest())


async def refused(aws: Region, token: str, **changes: object) -> AuthError:
    with pytest.raises(AuthError) as error:
        await who(aws, token, **changes)
    assert "\n" not in str(error.value)
    return error.value


async def test_instance_speaks_for_the_names_of_its_id_and_for_nothing_else(aws: Region) -> None:
    caller = await who(aws, aws.sign(document()), names=("{instance}", "trn-{instance}"))
    assert caller == Caller(
        name=f"{ACCOUNT}/{INSTANCE}",
        scopes=frozenset({Scope.SYNC}),
        nodes=(INSTANCE, f"trn-{INSTANCE}"),
        instance=Instance(id=INSTANCE, launched="2026-11-19T16:32:11Z"),
    )
    assert str(caller) == f"instance {INSTANCE}"
    assert not caller.speaks_for(OTHER)


@pytest.mark.parametrize("options", [(), (NO_ATTRIBUTES,), (PKCS7Options.NoCerts,), (PKCS7Options.NoCapabilities,)])
async def test_every_form_of_the_signature_is_read(aws: Region, options: tuple[PKCS7Options, ...]) -> None:
    assert await who(aws, aws.sign(document(), *options)) is not None


@pytest.mark.system("openssl")
@pytest.mark.parametrize("options", [(), ("-stream",), ("-stream", "-noattr"), ("-stream", "-nocerts")])
async def test_what_openssl_signs_is_read_also_in_ber(aws: Region, options: tuple[str, ...]) -> None:
    token = aws.sign_by_openssl(document(), *options)
    assert ("-stream" in options) is (base64.b64decode(token)[1] == 0x80), "a length that is not known ahead"
    caller = await who(aws, token)
    assert caller is not None
    assert caller.nodes == (INSTANCE,)


async def test_document_of_somebody_else_is_refused(aws: Region, tmp_path: Path) -> None:
    other = region(tmp_path / "other")
    error = await refused(aws, other.sign(document()))
    assert error.status == 401
    assert "its signature matches no certificate in 'certificates'" in str(error)
    error = await refused(aws, aws.sign(document(accountId="999999999999")))
    assert error.status == 403
    assert "of account 999999999999, which is not authorized" in str(error)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"no JSON", "not a JSON object"),
        (b"[]", "not a JSON object"),
        (document(instanceId="i-*"), "no usable instanceId"),
        (document(instanceId=None), "no usable instanceId"),
        (document(accountId=123456789012), "no usable accountId"),
        (document(pendingTime="yesterday"), "no usable pendingTime"),
    ],
)
async def test_signed_nonsense_is_refused(aws: Region, content: bytes, why: str) -> None:
    error = await refused(aws, aws.sign(content))
    assert (error.status, why in str(error)) == (401, True), error


async def test_other_digests_and_what_is_no_document_are_refused(aws: Region) -> None:
    error = await refused(aws, aws.sign(document(), digest=hashes.SHA384()))
    assert "not signed with SHA-256: request /latest/dynamic/instance-identity/rsa2048" in str(error)
    for token in ("secret-token-of-a-file", "eyJhbGciOiJSUzI1NiJ9.e30.c2ln", "MI" + "A" * 9000):
        assert await who(aws, token) is None, "another platform or the token file may know it"


@pytest.mark.parametrize("options", [(), (NO_ATTRIBUTES,)])
def test_no_change_of_a_byte_changes_what_is_believed(aws: Region, options: tuple[PKCS7Options, ...]) -> None:
    holds_under_changes(aws, base64.b64decode(aws.sign(document(), *options)))


@pytest.mark.system("openssl")
@pytest.mark.parametrize("options", [("-stream",), ("-stream", "-noattr")])
def test_no_change_of_a_byte_of_ber_changes_what_is_believed(aws: Region, options: tuple[str, ...]) -> None:
    holds_under_changes(aws, base64.b64decode(aws.sign_by_openssl(document(), *options)))


def holds_under_changes(aws: Region, good: bytes) -> None:
    """Every byte flipped, and cut off: the same document, or a refusal."""
    keys = read_certificates(aws.file)
    assert verify(good, keys) == document()
    for at in range(len(good)):
        changed = bytearray(good)
        changed[at] ^= 0x01 << (at % 8)
        try:
            assert verify(bytes(changed), keys) == document(), f"byte {at}"
        except DocumentError:
            continue
    for length in range(0, len(good), 7):
        with pytest.raises(DocumentError):
            verify(good[:length], keys)
    with pytest.raises(DocumentError):
        verify(b"\x30\x80" * 4000, keys)


def test_content_of_another_document_under_the_same_attributes_is_refused(aws: Region) -> None:
    """The signature is over the attributes: they have to be those of this content."""
    good = base64.b64decode(aws.sign(document()))
    forged = good.replace(INSTANCE.encode(), OTHER.encode())
    assert forged != good
    with pytest.raises(DocumentError, match="its content does not match its signature"):
        verify(forged, read_certificates(aws.file))


def test_settings_that_cannot_be_meant_are_an_error(aws: Region, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no accounts are listed"):
        AwsCallers(certificates=aws.file)
    with pytest.raises(ValueError, match="twelve digits"):
        aws.callers(accounts=("*",))
    for name in ("*", "{instance}*", "node-1", "{instance}{instance}"):
        with pytest.raises(ValueError, match=r"must have \{instance\} once"):
            aws.callers(names=(name,))
    with pytest.raises(ValueError, match="replaces a token"):
        SyncSettings(token_file=tmp_path / "token", instance_identity=True)
    missing = tmp_path / "missing.pem"
    with pytest.raises(ConfigError, match="no certificates can be read"):
        InstanceIdentities(AwsCallers(certificates=missing, accounts=(ACCOUNT,)))
    key, name = ec.generate_private_key(ec.SECP256R1()), aws.certificate.subject
    weak = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    begin, end = aws.certificate.not_valid_before_utc, aws.certificate.not_valid_after_utc
    made = weak.serial_number(1).not_valid_before(begin).not_valid_after(end).sign(key, hashes.SHA256())
    missing.write_bytes(made.public_bytes(serialization.Encoding.PEM))
    with pytest.raises(ConfigError, match="certificate 1 is not RSA with 2048 bits: use those that AWS lists"):
        read_certificates(missing)


def bearer(token: str) -> dict[str, str]:
    return {"authorization": f"Bearer {token}"}


async def test_copy_of_a_document_is_worth_nothing_without_the_nodes_key(aws: Region, tmp_path: Path) -> None:
    token = aws.sign(document())
    clerk, entry = new_token("shared", [Scope.SYNC, Scope.ADMIN])
    file = tmp_path / "tokens.toml"
    file.write_text(entry)
    file.chmod(0o600)
    async with running(tmp_path, integrations={"aws": aws.callers()}, token_table=file) as client:
        assert (await sync(client, INSTANCE, headers=bearer(token))).status_code == 200
        other = await sync(client, OTHER, headers=bearer(token))
        assert (other.status_code, f"only for {INSTANCE}" in other.text) == (403, True)
        copied = await sync(client, INSTANCE, "another-key-another-key", "i2", headers=bearer(token))
        assert (copied.status_code, f"healthd fleet rekey {INSTANCE}" in copied.text) == (403, True), copied.text
        shared = await sync(client, INSTANCE, "another-key-another-key", "i2", headers=bearer(clerk))
        assert shared.status_code == 403, "nor is a token that speaks for every name"
        node = (await client.get(f"/v1/nodes/{INSTANCE}", headers=bearer(clerk))).json()
        assert "DuplicateNode" not in str(node), "a refusal raises no doubt"
        assert (await sync(client, INSTANCE, seq=2, headers=bearer(token))).status_code == 200
        assert (await client.get("/v1/nodes", headers=bearer(token))).status_code == 403, "it may sync, and no more"


async def test_machine_that_was_started_anew_with_an_empty_disk_is_let_in(aws: Region, tmp_path: Path) -> None:
    """A stopped instance starts on another host: AWS says when, and an older document is no longer of use."""
    before, after = aws.sign(document()), aws.sign(document(pendingTime="2026-11-20T08:00:00Z"))
    async with running(tmp_path, integrations={"aws": aws.callers()}) as client:
        assert (await sync(client, INSTANCE, headers=bearer(before))).status_code == 200
        assert (await sync(client, INSTANCE, "the-key-of-a-new-disk", "i2", headers=bearer(after))).status_code == 200
        old = await sync(client, INSTANCE, seq=2, headers=bearer(before))
        assert old.status_code in (403, 409), old.text
        again = await sync(client, INSTANCE, "the-key-of-a-new-disk", "i2", seq=2, headers=bearer(after))
        assert again.status_code == 200
    async with running(tmp_path, integrations={"aws": aws.callers()}) as client:
        copied = await sync(client, INSTANCE, "a-key-of-somebody-else", "i3", headers=bearer(after))
        assert copied.status_code == 403, "also before the node has spoken to an aggregator that was restarted"


class Metadata:
    """The metadata service of an instance."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer

    def __call__(self, connection: object) -> None:
        first, headers = read_request(connection)  # type: ignore[arg-type]
        method, path, _ = first.split()
        if method == "PUT":
            answer = reply("200 OK", b"TOKEN==")
        elif headers.get("x-aws-ec2-metadata-token") == "TOKEN==" and path.endswith("/instance-identity/rsa2048"):
            assert path == "/latest/dynamic/instance-identity/rsa2048"
            answer = reply("200 OK", self.answer)
        else:
            answer = reply("404 Not Found")
        connection.sendall(answer)  # type: ignore[attr-defined]


def in_lines(token: str) -> bytes:
    """As the metadata service breaks it."""
    return "\n".join(token[at : at + 64] for at in range(0, len(token), 64)).encode()


def test_node_gets_its_document_from_the_metadata_service(aws: Region, tmp_path: Path) -> None:
    token = aws.sign(document())
    with serving(Metadata(in_lines(token))) as endpoint:
        file = write_credential(tmp_path / "run", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint})
    assert file.read_text() == f"{token}\n"
    assert file.stat().st_mode & 0o777 == 0o600
    with (
        serving(Metadata(b"<html>")) as endpoint,
        pytest.raises(ConfigError, match="returns no identity document; is this an EC2 instance"),
    ):
        write_credential(tmp_path / "run", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint})


async def test_daemon_is_known_to_its_aggregator_by_its_document_alone(aws: Region, tmp_path: Path) -> None:
    """The whole way: metadata service, daemon, aggregator."""
    clerk, entry = new_token("me", [Scope.READ])
    file = tmp_path / "tokens.toml"
    file.write_text(entry)
    file.chmod(0o600)
    with serving(Metadata(in_lines(aws.sign(document())))) as endpoint:
        async with running(tmp_path, integrations={"aws": aws.callers()}, token_table=file) as client:
            environ = {
                **{key: value for key, value in os.environ.items() if not key.startswith("HEALTHD_")},
                "AWS_EC2_METADATA_SERVICE_ENDPOINT": endpoint,
                "HEALTHD_NODE_SYNC_AGGREGATORS": str(client.base_url),
                "HEALTHD_NODE_SYNC_INSTANCE_IDENTITY": "true",
                "HEALTHD_NODE_CHECKS": "load",
                "HEALTHD_PROBE_ACCELERATOR": "cpu",
            }
            folders = (f"--state-dir={tmp_path}/node", f"--run-dir={tmp_path}/run")
            words = ("node", f"--name={INSTANCE}", "--listen=127.0.0.1:0", *folders)
            daemon = await asyncio.create_subprocess_exec(sys.executable, "-m", "healthd", *words, env=environ)
            try:
                async with asyncio.timeout(30 * PATIENCE):
                    while (await client.get(f"/v1/nodes/{INSTANCE}", headers=bearer(clerk))).status_code != 200:
                        assert daemon.returncode is None
                        await asyncio.sleep(0.1)
            finally:
                daemon.terminate()
                await daemon.wait()
