"""
Runs pytest, then once more and alone what failed, if it is little: `python -m tests.again ARGUMENTS OF PYTEST`.

For CI, whose machines are now and then too busy for a test that counts on time. What fails twice has failed. What
passes when it is run again is written to the file TESTS_UNSTABLE, which `.ci/run` prints at its end.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

# More than that is not one busy moment.
MOST = 5
# In one process, one test after the other. The last of an option counts.
ALONE = ("-n", "0", "--dist", "no", "--last-failed")


def main(arguments: list[str]) -> int:
    """The exit code of pytest: that of the second run, where there is one."""
    with tempfile.TemporaryDirectory(prefix="again-") as cache:
        command = [sys.executable, "-m", "pytest", *arguments, "-o", f"cache_dir={cache}"]
        file = Path(cache, "v/cache/lastfailed")
        code = subprocess.run(command, check=False).returncode
        failed = _failed(file)
        # Every other code says that the tests were not run to the end: nothing to run again.
        if code != 1 or not 0 < len(failed) <= MOST:
            return code
        print(f"\nRun again, alone: {len(failed)} failed of at most {MOST}", flush=True)
        code = subprocess.run([*command, *ALONE], check=False).returncode
        if code == 0 and (left := _failed(file)):
            print(f"not found when run again: {', '.join(left)}", flush=True)
            return 1
    if code == 0 and (unstable := os.environ.get("TESTS_UNSTABLE")):
        with Path(unstable).open("a", encoding="utf-8") as out:
            out.writelines(f"{test}\n" for test in failed)
    return code


def _failed(file: Path) -> list[str]:
    return sorted(json.loads(file.read_text(encoding="utf-8"))) if file.exists() else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
