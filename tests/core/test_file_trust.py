"""Files that say what runs here and whom to believe: what others can write is refused in one line with the remedy."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from healthd.aggregator.identity.tokens import Scope, new_token, read_tokens
from healthd.cli.settings.options import load_settings
from healthd.core.errors import ConfigError
from healthd.core.file_trust import check_file
from healthd.core.http.client import Aggregator, Endpoint, read_token
from tests.aggregator.api_kit import scenario
from tests.hooks.inside import run_inside

PROGRAMS = '[programs.mine]\ncommand = ["/opt/mine"]\n'
CHECK = (
    "import sys; from pathlib import Path; from healthd.core.file_trust import check_file; "
    "check_file(Path(sys.argv[1]), 'settings file')"
)


def written(file: Path, text: str = PROGRAMS, mode: int = 0o644) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    file.chmod(mode)
    return file


def load(file: Path) -> None:
    load_settings({"config": file}, section="node")


def test_own_files_are_read_wherever_nobody_else_can_replace_them(tmp_path: Path) -> None:
    sticky = written(tmp_path / "sticky" / "healthd.toml")
    sticky.parent.chmod(0o1777)
    link = tmp_path / "link.toml"
    link.symlink_to(sticky)
    for file in (written(tmp_path / "healthd.toml"), sticky, link):
        load(file)
    check_file(tmp_path / "not-there", "settings file")
    check_file(Path("/dev/null"), "settings file")


def test_settings_that_everybody_may_write_are_refused_by_every_command(tmp_path: Path) -> None:
    file = written(tmp_path / "healthd.toml", mode=0o666)
    said = run_inside("gate", "--job", "j", "--node", "n1", "--config", str(file))
    assert (said.code, said.out) == (2, "")
    assert said.err == f"healthd: {file}: everyone can write this settings file; run: chmod o-w {file}\n"


@pytest.mark.parametrize("deep", ["", "below/"])
def test_settings_that_everybody_may_replace_are_refused(tmp_path: Path, deep: str) -> None:
    folder = tmp_path / "open"
    file = written(folder / f"{deep}healthd.toml")
    folder.chmod(0o777)
    with pytest.raises(ConfigError, match=rf"everyone can write {folder}; run: chmod o-w {folder}"):
        load(file)


def test_link_that_everybody_may_turn_elsewhere_is_refused_and_so_is_what_it_leads_to(tmp_path: Path) -> None:
    file = written(tmp_path / "own" / "healthd.toml")
    link = tmp_path / "open" / "healthd.toml"
    link.parent.mkdir()
    link.symlink_to(file)
    load(link)
    link.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="everyone can replace"):
        load(link)
    link.parent.chmod(0o755)
    file.parent.chmod(0o777)
    with pytest.raises(ConfigError, match="everyone can replace"):
        load(link)


def use_token(file: Path) -> None:
    read_token(file)


def use_tokens(file: Path) -> None:
    file.write_text(new_token("a", [Scope.READ])[1])
    read_tokens(file)


def use_ca(file: Path) -> None:
    Aggregator(Endpoint(urls=("https://head:8090",), token=None, ca_file=file))


def use_programs(file: Path) -> None:
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    settings = written(file.with_name("healthd.toml"), f'[programs.mine]\ncommand = ["{file}"]\n')
    load_settings({"config": settings}, section="node").runner()


def use_checks(file: Path) -> None:
    folder = file.parent / "checks"
    folder.mkdir(exist_ok=True)
    check = written(folder / "mine.py", "", 0o644)
    check.chmod(file.stat().st_mode & 0o777)
    settings = written(file.with_name("healthd.toml"), f'[probe]\ndirectories = ["{folder}"]\n')
    load_settings({"config": settings}, section="node").runner()


def use_tls(file: Path) -> None:
    async def nothing(_: object) -> None:
        pass

    scenario(nothing, file.parent / "state", tls_cert=file, tls_key=file)


@pytest.mark.parametrize(
    "use", [use_token, use_tokens, use_ca, use_programs, use_checks, use_tls], ids=lambda f: f.__name__
)
def test_every_other_file_that_is_believed_is_refused_too(tmp_path: Path, use: Callable[[Path], object]) -> None:
    file = written(tmp_path / "file", "some-token-of-some-length\n", 0o666)
    with pytest.raises(ConfigError, match=r"(everyone|others) can write .*; run: chmod g?o-w "):
        use(file)


def test_directory_of_checks_that_everybody_may_add_to_is_refused_in_spite_of_a_sticky_bit(tmp_path: Path) -> None:
    folder = tmp_path / "checks"
    folder.mkdir()
    folder.chmod(0o1777)
    settings = written(tmp_path / "healthd.toml", f'[probe]\ndirectories = ["{folder}"]\n')
    with pytest.raises(ConfigError, match="everyone can write this directory of check files"):
        load_settings({"config": settings}, section="node").runner()


@pytest.mark.system(root=True)  # only root can give files to others
def test_settings_of_another_user_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path / "healthd.toml")
    os.chown(file, 12345, -1)
    with pytest.raises(ConfigError, match=rf"belongs to user 12345, who can change it; run: chown root {file}"):
        load(file)


def test_name_that_leads_past_its_folders_is_followed(tmp_path: Path) -> None:
    """`link/../x` is beside what the link leads to; the folders of its name need not be there."""
    written(tmp_path / "real" / "x.toml")
    (tmp_path / "real" / "below").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real" / "below")
    check_file(tmp_path / "link" / ".." / "x.toml", "settings file")
    check_file(tmp_path / "link" / ".." / ".." / "real" / "x.toml", "settings file")


@pytest.mark.system(root=True)  # only root can give files to others
def test_owner_whom_a_user_namespace_does_not_tell_is_not_held_against_a_file(tmp_path: Path) -> None:
    """The host's root is nobody in a rootless container."""
    file = written(tmp_path / "healthd.toml")
    os.chown(file, 12345, -1)
    line = ["unshare", "--user", "--map-root-user", sys.executable, "-c", CHECK, str(file)]
    assert subprocess.run(line, check=False, timeout=60).returncode == 0


@pytest.mark.system(root=True)  # only root can mount
def test_what_a_mount_makes_read_only_is_read_as_in_a_pod(tmp_path: Path) -> None:
    """A ConfigMap's volume is a directory of mode 0777 that is mounted read-only."""
    file = written(tmp_path / "open" / "healthd.toml")
    file.parent.chmod(0o777)
    os.chown(file, 12345, -1)
    mount = f"mount --bind {file.parent} {file.parent} && mount -o remount,ro,bind {file.parent}"
    line = ["unshare", "--mount", "sh", "-ec", f'{mount} && exec "$0" -c "{CHECK}" {file}', sys.executable]
    assert subprocess.run(line, check=False, timeout=60).returncode == 0
