"""Commands run by a user that the machine has no account of, as containers with any number do."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.patience import PATIENCE

LOAD = """
import msgspec, socket, tempfile, tomllib
import healthd.cli.settings.checks, healthd.node.settings
from healthd.cli.settings.options import load_settings
from healthd.core.errors import ConfigError
"""

USE = f"""{LOAD}
import healthd.node.occupancy.occupancy, healthd.runner.settings
from healthd.cli.support.doctor import _run_folder
"""

# Imported while files of others can be read; then as somebody whom nobody knows, without a home.
AS_NOBODY_KNOWN = """
import getpass, os, sys
{imports}
os.setgroups([])
os.setgid(54321)
os.setuid(54321)
os.environ.clear()
{does}
"""


def as_nobody_known(imports: str, does: str) -> str:
    program = AS_NOBODY_KNOWN.format(imports=imports, does=does)
    line = [sys.executable, "-c", program]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60 * PATIENCE, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.system(root=True)  # to become somebody else
def test_who_has_no_account_decides_under_a_number() -> None:
    imports = "from healthd.cli.fleet.line import own_name"
    assert as_nobody_known(imports, "print(own_name())") == "uid 54321\n"


@pytest.mark.system(root=True)  # to become somebody else
def test_who_has_no_home_is_asked_for_the_directory() -> None:
    does = """
try:
    load_settings({}, section="node").node
except ConfigError as error:
    print(error)
print(load_settings({"state_dir": "/x"}, section="node").node.state_dir)
"""
    said = as_nobody_known(LOAD, does).splitlines()
    assert said == ["configuration: 'node.state_dir' must be set", "/x"]


@pytest.mark.system(root=True)  # to become somebody else
@pytest.mark.parametrize("made", ["folder", "link"])
def test_directory_that_another_user_has_made_under_our_name_is_not_used_and_stops_nothing_else(made: str) -> None:
    """Links in it would lead what we write to files of ours."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "healthd-54321"
        Path(folder).chmod(0o1777)
        place.mkdir() if made == "folder" else place.symlink_to("/")
        does = f"""
os.environ["TMPDIR"] = {folder!r}
given = {{"state_dir": "/x"}}
for section in ("node", "gate"):
    settings = load_settings(given, section=section)  # commands that do not use the directory load too
    for use in (settings.runner, settings.control_socket):
        try:
            print(use())
        except ConfigError as error:
            print(error)
item = _run_folder(settings)
print(item.state, item.text)
named = load_settings({{**given, "run_dir": "/y"}}, section="node")
print(named.runner().run_dir, named.control_socket())
"""
        said = as_nobody_known(USE, does).splitlines()
    text = f"{place}: another user has made it; name a directory of yours with --run-dir"
    assert said == [*[text] * 4, f"missing {text}", "/y /y/node.sock"]


@pytest.mark.system(root=True)  # to become somebody else
def test_what_a_directory_hides_is_told_and_no_error_of_ours(tmp_path: Path) -> None:
    """/etc/healthd may hold tokens and be closed; whether there are settings in it cannot be known then."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    does = f"""
from pathlib import Path
options.DEFAULT_FILE = Path({str(closed / "healthd.toml")!r})
root = {{"host_root": Path({str(closed / "root")!r}), "config": Path("/dev/null")}}
for given in ({{}}, root):
    try:
        load_settings({{"state_dir": "/x", **given}}, section="node")
    except ConfigError as error:
        print(error)
print(_folder("state directory", Path({str(closed / "state")!r}), "--state-dir").state)
"""
    imports = f"{LOAD}\nfrom healthd.cli.settings import options\nfrom healthd.cli.support.doctor import _folder"
    said = as_nobody_known(imports, does).splitlines()
    assert said == [
        f"{closed}/healthd.toml: cannot be read: Permission denied",
        f"{closed}/root: no such directory; --host-root needs a directory with proc/, sys/ and etc/ of a machine",
        "missing",
    ]
