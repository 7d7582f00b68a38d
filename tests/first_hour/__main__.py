"""
Walk the ways, each from a clone of its own in which nothing is installed, and say how long each step took.

    python -m tests.first_hour [WAY ...]

A step that fails is tried again for a minute, as people do who were too quick; then the way has failed. Exit code 1
where a way failed, or took longer than five minutes. Packages are downloaded; the interpreter with torch is the one of
this environment.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.first_hour.ways import AIM_SECONDS, ROOT, WAYS, Way

STEP_SECONDS = 400.0
AGAIN_SECONDS = 60.0
HEAD = "head head.example.com"


class Shell:
    """One bash, as a person has it: directories, variables and what runs in the background stay."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        kept = {name: os.environ[name] for name in os.environ if not name.startswith(("HEALTHD_", "PYTHON", "VIRTUAL"))}
        kept |= {"HOME": str(folder), "HEALTHD_PROBE_PYTHON": sys.executable, "PATH": "/usr/local/bin:/usr/bin:/bin"}
        kept |= {"HEALTHD_NODE_STATE_DIR": str(folder / "state"), "HEALTHD_NODE_RUN_DIR": str(folder / "run")}
        kept |= {"HEALTHD_AGGREGATOR_STATE_DIR": str(folder / "aggregator")}
        # What the kernel's log says of the past of this machine is another matter.
        kept |= {"HEALTHD_NODE_DISABLED": "kernel_log"}
        self.said = (folder / "said").open("wb+")
        # Its own names of machines, where root may have them: `head` is this one.
        own = ["unshare", "--mount"] if os.geteuid() == 0 else []
        self.process = subprocess.Popen(
            [*own, "bash"], stdin=subprocess.PIPE, stdout=self.said, stderr=self.said, cwd=folder / "clone", env=kept
        )

    def run(self, line: str) -> tuple[int, str]:
        """The exit code of a line and what it printed; 124 where it has not ended."""
        begin, mark = self.said.seek(0, os.SEEK_END), f"{self.folder}/ended"
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\necho $? > {mark}.new; mv {mark}.new {mark}\n".encode())
        self.process.stdin.flush()
        end = time.monotonic() + STEP_SECONDS
        while not Path(mark).exists():
            if time.monotonic() > end or self.process.poll() is not None:
                return 124, self._since(begin)
            time.sleep(0.05)
        code = int(Path(mark).read_text())
        Path(mark).unlink()
        return code, self._since(begin)

    def _since(self, begin: int) -> str:
        self.said.seek(begin)
        return self.said.read().decode(errors="replace")

    def close(self) -> None:
        """End it with all that it has started."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"kill $(jobs -p); wait\nexit\n")
        self.process.stdin.close()
        self.process.wait(60)
        self.said.close()


def walk(way: Way) -> bool:
    """Walk a way; whether it led to its end within the aim."""
    path = "/usr/sbin:/usr/local/bin:/usr/bin:/bin"
    missing = [name for name in way.needs if shutil.which(name, path=path) is None]
    missing += ["root"] if way.as_root and os.geteuid() else []
    if missing:
        print(f"{way.name} is left out; missing: {', '.join(missing)}\n", flush=True)
        return True
    folder = Path(tempfile.mkdtemp(prefix=f"healthd-{way.name}-"))
    (folder / "clone").mkdir()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    subprocess.run(["tar", "-x", "-C", folder / "clone"], input=archive, check=True)
    shell = Shell(folder)
    if way.as_root:
        layers = folder / "layers"
        layers.mkdir()
        shell.run(f"mount -t tmpfs layers {layers}")
        for name in ("etc", "opt", "run", "var"):
            over = f"lowerdir=/{name},upperdir={layers}/{name},workdir={layers}/{name}.work"
            shell.run(f"mkdir {layers}/{name} {layers}/{name}.work && mount -t overlay own -o {over} /{name}")
    if os.geteuid() == 0:
        (folder / "hosts").write_text(f"127.0.0.1 localhost {HEAD} {socket.gethostname()}\n")
        shell.run(f"mount --bind {folder}/hosts /etc/hosts")
    print(f"{way.name} ({way.page})", flush=True)
    began, good = time.monotonic(), True
    try:
        for line in way.lines({"folder": str(folder), "probe": sys.executable}):
            good = step(shell, line)
            if not good:
                break
    finally:
        shell.close()
        shutil.rmtree(folder, ignore_errors=True)
    took = time.monotonic() - began
    late = "" if took <= AIM_SECONDS else f", longer than {AIM_SECONDS:.0f} s"
    print(f"{took:7.1f} s  {way.name} {'is walked' if good else 'FAILED'}{late}\n", flush=True)
    return good and not late


def step(shell: Shell, line: str) -> bool:
    """Type a line; print what it took."""
    began, tries = time.monotonic(), 0
    while True:
        tries += 1
        code, said = shell.run(line)
        took = time.monotonic() - began
        if code == 0 or took > AGAIN_SECONDS or code == 124:
            break
        time.sleep(1)
    again = f" (try {tries})" if tries > 1 else ""
    print(f"{took:7.1f} s  {line.partition(' #')[0].strip()[:110]}{again}", flush=True)
    if code:
        print(f"           exit code {code}: {said.strip()[-600:]}", flush=True)
    return code == 0


if __name__ == "__main__":
    wanted = sys.argv[1:] or [way.name for way in WAYS]
    unknown = set(wanted) - {way.name for way in WAYS}
    if unknown:
        sys.exit(f"no such way: {', '.join(unknown)}; there are: {', '.join(way.name for way in WAYS)}")
    results = [walk(way) for way in WAYS if way.name in wanted]
    sys.exit(0 if all(results) else 1)
