"""Fifty forms and more in which secrets stand in logs, messages, command lines and addresses; each is made up here."""

from __future__ import annotations

SECRET = "hunter2Zq9xWv8K"
_HEX32 = "0123456789abcdef" * 2
_LONG = "aB3dE5fG7hI9jK1lM3nO5pQ7rS9tU1vW3xY5zA7b"


def _made(*parts: str) -> str:
    """Put together here, so that no scanner of repositories takes the list for a leak."""
    return "".join(parts)


# Text -> what must not be in it afterwards.
FORMS: tuple[tuple[str, str], ...] = (
    # variables and settings
    (f"AWS_SECRET_ACCESS_KEY={SECRET}", SECRET),
    (f"export AWS_SESSION_TOKEN='{SECRET}'", SECRET),
    (f"OPENAI_API_KEY={SECRET} python train.py", SECRET),
    (f"WANDB_API_KEY: {SECRET}", SECRET),
    (f"HF_TOKEN={SECRET}", SECRET),
    (f"PGPASSWORD={SECRET} psql", SECRET),
    (f"MYSQL_PWD={SECRET}", SECRET),
    (f"DB_PASS={SECRET}", SECRET),
    (f"client_secret = {SECRET}", SECRET),
    (f'{{"password": "{SECRET}", "user": "ann"}}', SECRET),
    (f"{{'apiKey': '{SECRET}'}}", SECRET),
    (f'{{\\"token\\": \\"{SECRET}\\"}}', SECRET),
    (f'password = "two words {SECRET}"', SECRET),
    (f"passphrase: {SECRET}", SECRET),
    (f"aws_secret_access_key = {SECRET}", SECRET),
    (f"SECRET_KEY='{SECRET}'", SECRET),
    (f"credentials={SECRET}", SECRET),
    (f"access_token={SECRET}&user=ann", SECRET),
    (f"AccountKey={SECRET}==;EndpointSuffix=core.windows.net", SECRET),
    (f"Server=db;User Id=ann;Password={SECRET};", SECRET),
    (f"host=db user=ann password={SECRET} dbname=h", SECRET),
    (f"GITLAB_DEPLOY_TOKEN: '{SECRET}'", SECRET),
    (f"encryption_key={SECRET}", SECRET),
    (f"app.token: {SECRET}", SECRET),
    (f"app.token:  {SECRET}", SECRET),
    (f"TOKEN=TOKEN-{SECRET}", SECRET),
    # command lines
    (f"train.py --password {SECRET} --epochs 3", SECRET),
    (f"train.py --api-key={SECRET}", SECRET),
    (f"train.py --token '{SECRET}'", SECRET),
    (f"curl -u ann:{SECRET} https://example.com", SECRET),
    (f"curl --user ann:{SECRET} https://example.com", SECRET),
    (f"mysql -uann -p{SECRET} h", SECRET),
    (f"['train.py', '--secret-key', '{SECRET}']", SECRET),
    (f"docker login --username ann --password {SECRET}", SECRET),
    (f"sshpass -p {SECRET} ssh head", SECRET),
    # headers
    (f"Authorization: Basic {SECRET}==", SECRET),
    (f"Authorization: Bearer {SECRET}", SECRET),
    (f"authorization: {SECRET}", SECRET),
    (f"bearer token-{SECRET}", SECRET),
    (f"curl -H 'X-Api-Key: {SECRET}'", SECRET),
    (f"Proxy-Authorization: Digest username=ann, response={SECRET}", SECRET),
    (f"Cookie: session={SECRET}; theme=dark", SECRET),
    (f"X-Healthd-Node-Key: {SECRET}", SECRET),
    (f"{{'Authorization': 'Token {SECRET}'}}", SECRET),
    # addresses
    (f"postgresql://ann:{SECRET}@db.internal:5432/h", SECRET),
    (f"postgresql://ann:p@{SECRET}@db/h", SECRET),
    (f"postgresql://ann@db:{SECRET}@db.internal/h", SECRET),
    (f"redis://:{SECRET}@cache:6379/0", SECRET),
    (f"https://{SECRET}@github.com/x/y.git", SECRET),
    (f"https://hooks.slack.com/services/T0001/B0001/{SECRET}", SECRET),
    (f"https://s3.example.com/x?X-Amz-Signature={SECRET}&X-Amz-Date=1", SECRET),
    (f"https://example.com/?sig={SECRET}&sv=1", SECRET),
    # tokens that are known by their own form
    (_made("gh", "p_", _LONG[:36]), _LONG[:36]),
    (_made("github", "_pat_", _LONG[:22], "_", _LONG), _LONG),
    (_made("gl", "pat-", _LONG[:20]), _LONG[:20]),
    (_made("xox", "b-123456789012-", _LONG[:24]), _LONG[:24]),
    (_made("AK", "IA", "IOSFODNN7EXAMPLE"), "IOSFODNN7EXAMPLE"),
    (_made("sk", "-proj-", _LONG), _LONG),
    (_made("sk", "_live_", _LONG[:24]), _LONG[:24]),
    (_made("hf", "_", _LONG[:34]), _LONG[:34]),
    (_made("np", "m_", _LONG[:36]), _LONG[:36]),
    (_made("py", "pi-AgEIcHlwaS5vcmc", _LONG * 2), _LONG),
    (_made("AI", "za", _LONG[:35]), _LONG[:35]),
    (_made("S", "G.", _LONG[:22], ".", _LONG + "abc"), _LONG[:22]),
    (_made("ey", "JhbGciOiJIUzI1NiJ9.", "eyJzdWIiOiJhbm4ifQ.", _LONG), _LONG),
    (_made("wandb: key ", _HEX32, "01234567"), _HEX32),
    (_made("-----BEGIN OPENSSH PRIVATE ", f"KEY-----\n{_LONG}\n-----END OPENSSH PRIVATE KEY-----"), _LONG),
    (_made("-----BEGIN RSA PRIVATE ", f"KEY-----\\n{_LONG}"), _LONG),
)

# What looks a little like a secret and is needed to understand a report.
HARMLESS = (
    "hook.token: cannot be read: No such file or directory",
    "/var/run/secrets/account/token: holds no token; is the service account mounted?",
    "/etc/healthd/node.key: no token can be read",
    "hook.token: No such file or directory",
    "hook.token: Is a directory",
    "hook.token: is empty",
    "node.key: Permission denied",
    "/etc/healthd/hook.token: [Errno 5] Input/output error",
    "/var/lib/healthd/node.key: the node's key cannot be kept: Read-only file system",
    "a token is required: send 'Authorization: Bearer TOKEN'",
    "the Authorization header must read 'Bearer TOKEN'",
    "its file holds bearer tokens; the first line is the bearer token. WWW-Authenticate: Bearer realm=healthd",
    "write sqlite:///PATH or postgresql+psycopg://USER:PASSWORD@HOST/NAME",
    "postgresql+psycopg://USER@HOST/NAME",
    "postgresql://healthd@db.internal/healthd: cannot be reached",
    "train.py --token TOKEN --password 'PASSWORD'",
    "docker run -u root:root --user 1000:1000 --user=1000:1000 image",
    "name its file with --token-file or HEALTHD_TOKEN_FILE",
    "a token is required: send it",
    "token 'ci' lacks scope 'admin'; it has: read",
    "matmul: fp32 512x512x512 product is wrong (seed 1708288533): 1 of 262144 elements",
    "i-0123456789abcdef0 in us-west-2a",
    "neuron: nd5: NEURON_HW_ERR=HBM_UNCORRECTABLE_ERROR",
    "gate g-01a1fe339c37-a21d545ad0, 6.154 s",
    "sha256:3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f708192a",
    "boot id 2f1b9f0e-6a2f-4a58-9a57-0f9a3f1c2b7d",
    "http://head:8090/v1/gates?job=train&limit=1",
    "12:34:56 std::vector<int>::at",
    "passed: 12, failed: 0",
    "compass=3 bypass=1 keyboard=us monkey=2",
    "git@github.com:x/y.git",
    "ssh -p 2222 ann@head",
    "mkdir -p /run/healthd/slurm",
    "tokens.toml: 3 tokens read again",
    "all_reduce of 1024 bytes: n3 (its rank 0) holds 1 wrong values",
    "max_tokens=4096 tokenizer=bpe key=3 keys=12",
    "secretary=ann",
)
