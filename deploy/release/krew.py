"""
Write the plug-in of kubectl for krew: `python -m deploy.release.krew VERSION DIR [REPOSITORY_URL]`.

The archive has the script that calls the installed healthd, and the licence: krew installs files and no Python
packages. The manifest, DIR/healthd.yaml, is for a krew index. It names where the archive of the release will be, so it
is written only where the repository is known.

Source: krew, "Writing Krew plugin manifests"; kubernetes-sigs/krew, pkg/index/types.go, internal/index/validation.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
FILES = {"kubectl-healthd": ROOT / "deploy/release/kubectl-healthd", "LICENSE": ROOT / "LICENSE"}

MANIFEST = """\
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: healthd
spec:
  version: v{version}
  homepage: {url}
  shortDescription: Show which nodes may run jobs, and why not
  description: |
    The fleet as the aggregator of healthd sees it: `kubectl healthd status` has every node on a line, the worst
    first; `kubectl healthd explain JOB` says why a job was admitted, held or rejected, with the evidence. All words
    of `healthd fleet` are there.
  caveats: |
    It calls the program `healthd`, which has to be installed beside it:
      {url}/blob/v{version}/docs/install.md
    It speaks to the aggregator, not to the API server: HEALTHD_AGGREGATOR, HEALTHD_TOKEN_FILE and HEALTHD_CA_FILE, or
    the same options, say where it is.
  platforms:
    - selector:
        matchLabels:
          os: linux
      uri: {url}/releases/download/v{version}/{archive}
      sha256: {sha256}
      bin: kubectl-healthd
      files:
        - from: kubectl-healthd
          to: .
        - from: LICENSE
          to: .
"""


def archive() -> bytes:
    """The same bytes each time, so that the checksum of a release can be made again."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, path in FILES.items():
            content = path.read_bytes()
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o755 if name == "kubectl-healthd" else 0o644
            tar.addfile(member, io.BytesIO(content))
    return gzip.compress(packed.getvalue(), mtime=0)


def write(version: str, folder: Path, url: str) -> None:
    """The archive, and with a URL the manifest."""
    content, name = archive(), f"kubectl-healthd-{version}.tar.gz"
    (folder / name).write_bytes(content)
    if url:
        sha256 = hashlib.sha256(content).hexdigest()
        text = MANIFEST.format(version=version, url=url.rstrip("/"), archive=name, sha256=sha256)
        (folder / "healthd.yaml").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    write(sys.argv[1], Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "")
