"""
Taking secrets out of texts: one table for all that leaves this machine or is shown, bundles, records, errors and logs.

A table of our own, tried against `tests/core/secret_forms.py`. detect-secrets 1.5.0 (the maintained set of patterns)
was tried on the same list: made to find literals in source code, it finds 11 of 63 forms without its entropy tests,
and with them calls every other word of a log line a secret; it takes 3 ms a line and brings requests and PyYAML to each
node. Its forms of vendors' tokens are the third part of the table.

In doubt a thing goes: a password may be any word.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable

GONE = "(removed)"

# How a member, a variable or an option ends whose value is a secret: `PGPASSWORD`, `DB_PASS`, `apiKey`, `HF_TOKEN`.
# What goes on (`token_file`, `tokenizer`, `max_tokens`) is another thing. Bounded: a long line takes no long time.
_NAME = (
    r"[\w.-]{0,60}?(?:passw(?:or)?ds?|passwd|passphrase|pwd|(?<=[_-])pass|secrets?|token|credentials?|"
    r"(?:api|access|account|auth|client|deploy|encryption|license|master|node|private|secret|service|session|shared|"
    r"signing|ssh|storage|subscription|user)[_.-]?key)(?![\w-])"
)
# What our own texts write for one.
_PLACEHOLDER = r"(?-i:TOKEN|PASSWORD)(?![\w.~+/=-])"
# A value in quotes, which a text may have escaped, or up to what ends a word; never what stands for one already.
_VALUE = (
    rf"""(?!\(removed\)|\\?["']?{_PLACEHOLDER})"""
    r"""(?:\\?"(?P<a>(?:[^"\\]|\\[^"])+)|\\?'(?P<b>(?:[^'\\]|\\[^'])+)|(?P<c>[^\s"'&,;\\)\]}]+))"""
)
# Of a file: by its path (`/etc/node.key: `), by its ending and words (`hook.token: No such file`), or called so and
# with three words (`token: cannot be read`): tokens and keys are one word, and never three in small letters.
_FILE = (
    r"(?:(?<=/)[\w.-]{0,60}\.(?:token|key):\s|[\w.-]{0,60}\.(?:token|key):\s+(?-i:[A-Za-z][a-z']*\s+[a-z])|"
    r"[\w.-]{0,60}(?:token|key):\s+(?-i:[a-z]+\s+[a-z]+\s+[a-z]+))"
)
# A user alone, where that is no token: these take their keys and passwords elsewhere.
_USER = r"""(?:(?<=ssh://)|(?<=sql://)|(?<=psycopg://)|(?<=postgres://))[\w.-]+@[^\s@]*(?:\s|$)"""
# A user and a group, as `docker run` and `chroot` take them.
_IDS = r"""[\s=,"']*(?:root:root|\d{1,10}:\d{1,10})(?:[\s"']|$)"""
_SCHEMES = "basic|bearer|digest|negotiate|token|apikey|aws4-hmac-sha256"
_QUERY = r"(?:[\w.-]{0,60}?(?:token|secret|passw(?:or)?d|pwd|signature|credential|key)|sig|auth)"

_TABLE = (
    # Headers: whole values, whatever the scheme is.
    rf"""(?i)\bauthorization\\?["']?\s*[:=](?!\s*(?:(?:{_SCHEMES})\s+)?{_PLACEHOLDER})\s*\\?["']?(?:(?:{_SCHEMES})\s+)?(?P<a>[^\n"'\\]{{6,}})""",
    r"""(?i)\b(?:set-)?cookie\\?["']?\s*:\s*\\?["']?(?P<a>[^\n"'\\]+)""",
    r"""(?i)\bx-[\w-]{0,40}?(?:key|token|secret|auth)[\w-]{0,40}\\?["']?\s*:\s*\\?["']?(?P<a>[^\s"'\\]+)""",
    r"(?i)\bbearer\s+(?!(?:tokens?|realm|auth(?:entication|orization)?)(?![\w~+/-]|\.\w))(?P<a>[\w.~+/=-]{6,})",
    # Addresses: whoever is before the @, up to the last one, and parameters.
    rf"""(?<=://)(?!USER(?::PASSWORD)?@|{_USER})(?P<a>[^\s/?#"'<>]+)(?=@[^\s@])""",
    r"""(?<![\w.@/-])(?!pid:(?:\d+@\d|NUMBER@START))[\w.-]{1,60}:(?P<a>[^\s:@/"']{1,200})(?=@[\w\[])""",
    rf"""(?i)(?<=[?&;]){_QUERY}=(?P<a>[^\s&;"'#]+)""",
    r"hooks\.slack\.com/services/(?P<a>[\w/-]+)",
    r"discord(?:app)?\.com/api/webhooks/(?P<a>[\w/-]+)",
    # Names with values, as variables, settings, JSON and connection strings have them, and as options.
    rf"""(?i)(?<![\w.-])(?!{_FILE}){_NAME}\\?["']?\s*(?:=>|[:=])\s*{_VALUE}""",
    rf"""(?i)(?<![\w-])--?{_NAME}(?:["']\s*,)?\s+{_VALUE}""",
    rf"""(?:^|\s|["'])(?:-u|--user|--proxy-user)(?!{_IDS})["']?[\s=,]*["']?[^\s:'"/]+:(?P<a>[^\s"']+)""",
    r"""\bmysql\w{0,20}\s[^\n]{0,200}?-p(?P<a>[^\s"']+)""",
    r"""\bsshpass\s+-p\s*(?P<a>[^\s"']+)""",
    # What is known by its own form; sources: detect-secrets' plugins, and the vendors' pages on tokens.
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?P<a>[\s\S]*?)(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)",
    r"\b(?P<a>eyJ[\w-]{8,4000}\.[\w-]{1,4000}\.[\w-]*)",  # JSON web tokens
    r"\b(?P<a>(?:A3T[A-Z0-9]|ABIA|ACCA|AKIA|ASIA|AROA|AIDA)[0-9A-Z]{12,})\b",  # AWS
    r"\b(?P<a>gh[pousr]_\w{16,}|github_pat_\w{20,}|gl(?:pat|dt|rt|ptt|soat|cbt|imt|agent)-[\w-]{16,})",
    r"\b(?P<a>xox[abeoprs]-[\w-]{10,}|xapp-[\w-]{10,})",  # Slack
    r"\b(?P<a>sk-[\w-]{20,}|[rs]k_(?:live|test)_\w{10,}|nvapi-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|r8_\w{20,})",
    r"\b(?P<a>npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|dckr_pat_[\w-]{20,}|AIza[\w-]{30,}|ya29\.[\w-]{20,})",
    r"\b(?P<a>SG\.[\w-]{16,}\.[\w-]{16,}|(?:AC|SK)[0-9a-f]{32}\b|key-[0-9a-f]{32}\b|\d{8,10}:AA[\w-]{33})",
    r"(?i)\bwandb\b[^\n]{0,20}?\b(?P<a>[0-9a-f]{40})\b",
)


@functools.cache
def _patterns() -> tuple[re.Pattern[str], ...]:
    """Compiled when they are wanted first: a command that has nothing to hide need not wait for them."""
    return tuple(re.compile(pattern) for pattern in _TABLE)


def redact(text: str, gone: Callable[[], str] = lambda: GONE) -> str:
    """A text without secrets; `gone` says what stands in the place of each."""

    def instead(match: re.Match[str]) -> str:
        number = match.lastindex
        if number is None or match[number] == GONE:
            return match[0]
        start, end = match.start(number) - match.start(), match.end(number) - match.start()
        return match[0][:start] + gone() + match[0][end:]

    for pattern in _patterns():
        text = pattern.sub(instead, text)
    return text


def is_secret_name(name: str) -> bool:
    """Whether what stands under this name (a member of JSON, a variable) is a secret."""
    return _named().fullmatch(name) is not None


@functools.cache
def _named() -> re.Pattern[str]:
    return re.compile(rf"(?i)(?:{_NAME}|(?:proxy-)?authorization|(?:set-)?cookie)")
