"""
What of a machine's readings must not leave it, beside secrets: command lines, audit records, users and passwords of
mounts; and in a bundle names of people and networks, for which stable pseudonyms stand. Pure.
"""

from __future__ import annotations

import collections
import ipaddress
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from checks.json_text import parse_json
from healthd.core.redaction import GONE, is_secret_name, redact

_MAX_NAME_CHARACTERS = 64
_SECRET_OPTION = re.compile(
    r"\b(password|passwd|pass|credentials|cred|username|user|secret|key|token)=[^,\s]+", re.IGNORECASE
)
_SECRET_LINES = (
    (
        re.compile(r"(command line:|kernel command line parameters|with environment:).*", re.IGNORECASE),
        r"\1 (left out)",
    ),
    (re.compile(r"^(audit: |(audit: )?type=\d+ audit\().*"), "audit: (left out)"),
)
# Whole or cut off in the middle.
_COMMAND = re.compile(r'("command"\s*:\s*")((?:[^"\\]|\\.)*)("|\\?$)')
# Members whose values are commands, or the environment, of whoever runs here.
_COMMANDS = frozenset({"command", "cmdline", "argv", "args", "arguments", "env", "environ", "environment"})
_NAMES = frozenset({"instance_name", "tags"})
_ARN = re.compile(r"\barn:aws[\w-]*:[^\s\"',;)\]}]+")
_ACCOUNTS = (
    re.compile(r"\barn:aws[\w-]*:[\w-]*:[\w-]*:(\d{12})\b"),
    re.compile(r"\b(\d{12})\.dkr\.ecr"),
    re.compile(r"(?i)account[_ -]?(?:id)?[\"']?\s*[:=]\s*[\"']?(\d{12})\b"),
)
_RESOURCE = re.compile(r"\b(subnet|vpc|eni|sg|vol|lt|eipalloc)-[0-9a-f]{8,17}\b")
_DNS = re.compile(
    r"\b(?:ip-\d+-\d+-\d+-\d+|[a-z0-9][\w-]*(?:\.[\w-]+)*\.(?:internal|local|amazonaws\.com))\b(?:\.[\w.-]+\b)?",
    re.IGNORECASE,
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?![\w]|\.\d)")
_IPV6 = re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{0,4}:){2,7}[0-9a-fA-F]{0,4}(?![\w:])")
_MAC = re.compile(r"(?<![\w:])(?:[0-9a-f]{2}:){5}[0-9a-f]{2}(?![\w:])", re.IGNORECASE)
_HOME = re.compile(r"(?<=/home/)[^/\s\"']+|(?<=/Users/)[^/\s\"']+|(?<=/fsx/)[^/\s\"']+")
_VERSION = re.compile(r"(?i)(?:version|driver|release|neuronx[\w-]*)\W{1,4}v?(\d+(?:\.\d+){3})(?![\d.]*\w*[/:]\d)")


def redact_line(text: str) -> str:
    """A line of the kernel log without what may hold secrets: parameters of the boot, audit records."""
    for pattern, instead in _SECRET_LINES:
        text = pattern.sub(instead, text)
    return redact(text)


def redact_mounts(text: str) -> str:
    """Mounts or /etc/fstab without names and passwords of users."""
    return redact(_SECRET_OPTION.sub(rf"\1={GONE}", text))


def redact_output(text: str) -> str:
    """Of commands the program's name is kept, without its directory; arguments may hold secrets."""

    def name_alone(match: re.Match[str]) -> str:
        try:
            command = str(parse_json(f'"{match[2]}"', strict=False))
        except ValueError:  # cut off inside an escape: what is before it
            command = match[2].partition("\\")[0]
        word = next(iter(command.split()), "")
        name = "" if "=" in word else word.rpartition("/")[2][:_MAX_NAME_CHARACTERS]
        return f"{match[1]}{json.dumps(name)[1:-1]}{match[3]}"

    return redact(_COMMAND.sub(name_alone, text))


class Redactor:
    """
    Replaces within one bundle: the same thing gets the same pseudonym everywhere, `host-1`, `ip-2`.

    `hosts` are names to be replaced wherever they stand as words; `versions` are texts in which dotted numbers are
    versions, not addresses. With `off` nothing is changed.
    """

    def __init__(self, *, hosts: Iterable[str] = (), versions: Iterable[str] = (), off: bool = False) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self._off = off
        self._names: dict[tuple[str, str], str] = {}
        self._numbers: collections.Counter[str] = collections.Counter()
        self._accounts: set[str] = set()
        self._versions = {match for text in versions for match in _IPV4.findall(text)}
        named = {name for each in hosts for name in (each, each.partition(".")[0]) if _is_telling(name)}
        longest_first = sorted(named, key=lambda name: (-len(name), name))
        words = "|".join(re.escape(name) for name in longest_first)
        self._hosts = re.compile(rf"(?<![\w-])(?:{words})(?![\w-])", re.IGNORECASE) if words else None

    def learn(self, text: str) -> None:
        """Note the accounts and versions that a text shows, before anything is replaced."""
        for pattern in _ACCOUNTS:
            self._accounts.update(pattern.findall(text))
        self._versions.update(_VERSION.findall(text))

    def text(self, text: str) -> str:
        """A text without what must not leave."""
        if self._off:
            return text
        text = redact(text, lambda: self._gone("secrets"))
        text = _ARN.sub(lambda match: self._as("arn", match[0]), text)
        for account in sorted(self._accounts):
            text = re.sub(rf"(?<!\d){account}(?!\d)", lambda match: self._as("account", match[0]), text)
        text = _RESOURCE.sub(lambda match: self._as(match[1], match[0]), text)
        text = _DNS.sub(lambda match: self._as("host", match[0]), text)
        if self._hosts is not None:
            text = self._hosts.sub(lambda match: self._as("host", match[0]), text)
        text = _MAC.sub(lambda match: self._as("mac", match[0]), text)
        text = _IPV4.sub(self._ip, text)
        text = _IPV6.sub(self._ip, text)
        return _HOME.sub(lambda match: self._as("user", match[0]), text)

    def plain(self, value: Any) -> Any:
        """The same of JSON values: texts are cleaned, and members that hold commands or secrets emptied."""
        if self._off:
            return value
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self._member(str(key), inner) for key, inner in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.plain(inner) for inner in value]
        return value

    def _member(self, key: str, value: Any) -> Any:
        if value in (None, "", [], {}) or isinstance(value, bool):
            return value
        if key.lower() in _COMMANDS:
            return self._gone("commands")
        if key.lower() in _NAMES:
            return self._gone("names")
        if is_secret_name(key):
            return self._gone("secrets")
        return self.plain(value)

    def _gone(self, kind: str) -> str:
        self.counts[kind] += 1
        return GONE

    def _as(self, kind: str, value: str) -> str:
        self.counts[kind] += 1
        key = (kind, value.lower())
        if key not in self._names:
            self._numbers[kind] += 1
            self._names[key] = f"{kind}-{self._numbers[kind]}"
        return self._names[key]

    def _ip(self, match: re.Match[str]) -> str:
        """An address by its pseudonym; what every machine has, and versions, as they are."""
        try:
            address = ipaddress.ip_address(match[0])
        except ValueError:
            return match[0]
        metadata = ipaddress.ip_address("169.254.169.254")
        if address.is_loopback or address.is_unspecified or address == metadata or match[0] in self._versions:
            return match[0]
        return self._as("ip", match[0])


def _is_telling(name: str) -> bool:
    """Whether a name tells anything of its owner: an instance id is needed, and `localhost` is everybody's."""
    return len(name) > 1 and name != "localhost" and not re.fullmatch(r"i-[0-9a-f]{8,17}|\d+", name)
