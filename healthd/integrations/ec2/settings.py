"""Settings of instances of EC2 as callers: `[aggregator.aws]`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MOST_ENTRIES = 100


@dataclass(frozen=True, kw_only=True)
class AwsCallers:
    """Instances of EC2 that may speak here as nodes, with the identity document that AWS signs for them. ValueError."""

    certificates: Path | None = None
    """PEM file with AWS's RSA-2048 certificates of your regions, from its page "AWS public certificates for instance
    identity document signatures". None: identity documents are not accepted. Needs asn1crypto and cryptography."""

    accounts: tuple[str, ...] = ()
    """AWS accounts, as twelve digits, whose instances may act as nodes. Required: AWS signs documents for all of its
    customers."""

    names: tuple[str, ...] = ("{instance}",)
    """Node names that an instance may use: `{instance}` stands for its instance id. By default the id itself, which is
    the default node name on EC2."""

    def __post_init__(self) -> None:
        if self.certificates is None:
            if self.accounts:
                raise ValueError("accounts: go with the certificates that their documents are signed by; set both")
            return
        if not self.accounts:
            raise ValueError("certificates: are set but no accounts are listed; name some")
        for what, listed in (("accounts", self.accounts), ("names", self.names)):
            if not 1 <= len(listed) <= MOST_ENTRIES:
                raise ValueError(f"{what}: {len(listed)} entries; 1 to {MOST_ENTRIES} are allowed")
        for account in self.accounts:
            if not re.fullmatch(r"[0-9]{12}", account):
                raise ValueError(f"accounts: {account[:40]!r} must be the twelve digits of an AWS account")
        for name in self.names:
            if not re.fullmatch(r"[A-Za-z0-9._-]*\{instance\}[A-Za-z0-9._-]*", name) or len(name) > 200:
                raise ValueError(f"names: {name[:80]!r} must have {{instance}} once, as trn-{{instance}}")

    @property
    def on(self) -> bool:
        """Whether instances are taken by their documents."""
        return self.certificates is not None
