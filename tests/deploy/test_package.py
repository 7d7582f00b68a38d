"""What is installed works apart from this repository: the wheel, the commands, the data, the container's file list."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

from checks.contract import Tier
from checks.discover import builtin_checks
from healthd.node.checks.catalogue import enabled_checks
from tests.deploy.kubernetes_kit import OVERLAYS, node_pod, of_config_map

ROOT = Path(__file__).parent.parent.parent
CONTAINER = ROOT / "deploy/container"
FILES = ("Containerfile", "Containerfile-torch", "Containerfile-training")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DATA = (".html", ".css", ".js", ".svg", ".mako", ".ini", ".typed")


def run(*command: str | Path, cwd: Path | None = None, seconds: float = 120) -> str:
    """What a program prints; AssertionError with its words where it fails."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd or ROOT)},
    )
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


# --- the container's file list ----------------------------------------------------------------------------------------


def instructions(name: str) -> list[tuple[str, str]]:
    """(INSTRUCTION, the rest) with lines that go on joined, comments left out."""
    text = "\n".join(
        line for line in (CONTAINER / name).read_text(encoding="utf-8").splitlines() if not line.startswith("#")
    )
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    return [(word.upper(), rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def copied(name: str) -> Iterator[tuple[str, str]]:
    """(file or folder of the repository, where to) of all COPY that are not of another stage."""
    for word, rest in instructions(name):
        if word == "COPY" and not rest.startswith("--from"):
            *sources, target = rest.split()
            yield from ((source, target) for source in sources)


@pytest.fixture(scope="module")
def context(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The build's working directory, from nothing but what the container file copies into it."""
    folder = tmp_path_factory.mktemp("context")
    for source, target in copied("Containerfile"):
        if not target.startswith("/"):
            place = folder / (target if target != "./" else source)
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy(ROOT / source, place)
    return folder


@pytest.fixture(scope="module")
def wheel(context: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from these files alone, with the build tools that are pinned here; nothing is downloaded."""
    out = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check", "--quiet"]
    run(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", out, ".", cwd=context)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """
    A fresh environment with the wheel in it, as pipx makes one. What it needs of others is lent by this environment,
    behind its own packages; healthd itself is not there otherwise.
    """
    folder = tmp_path_factory.mktemp("env")
    venv.create(folder, with_pip=False, symlinks=True)
    site = next(folder.glob("lib/python*/site-packages"))
    run(
        sys.executable, "-m", "pip", "--python", folder / "bin/python", "install", "--no-deps", "--no-index", "--quiet",
        "--disable-pip-version-check", wheel,
    )  # fmt: skip
    lent = tmp_path_factory.mktemp("lent")
    for one in Path(sysconfig.get_path("purelib")).iterdir():
        if not one.name.startswith(("healthd", "__editable__", "_distutils", "distutils-precedence", "torch")):
            (lent / one.name).symlink_to(one)
    (site / "lent.pth").write_text(f"{lent}\n", encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", FILES)
def test_everything_that_a_container_file_copies_is_in_the_repository(name: str) -> None:
    sources = [source for source, _ in copied(name)]
    assert sources
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_the_build_is_given_all_that_it_copies_and_no_more() -> None:
    lines = (CONTAINER / "Containerfile.dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    let_in = {line[1:] for line in lines if line.startswith("!")}
    assert let_in == {source for name in FILES for source, _ in copied(name)}


@pytest.mark.parametrize("name", FILES)
def test_container_files_keep_to_the_rules_of_small_and_safe_images(name: str) -> None:
    found = instructions(name)
    known = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "LABEL", "ENV", "USER", "VOLUME", "EXPOSE", "STOPSIGNAL"}
    assert {word for word, _ in found} <= known | {"ENTRYPOINT", "CMD"}
    for word, rest in found:
        assert word != "ADD"
        if word == "FROM":
            assert ":latest" not in rest
            assert ":" in rest or "$" in rest, f"{rest}: no version"
        if word == "RUN":
            assert "curl" not in rest
            assert "sudo" not in rest
            for install in re.findall(r"pip install[^&]*", rest):
                assert "--no-cache-dir" in install
                assert "--constraint" in install, "what is installed must be what was tested"
        if word in ("ENTRYPOINT", "CMD"):
            assert rest.startswith("["), "a shell in between would keep SIGTERM to itself"
    users = [rest for word, rest in found if word == "USER"]
    assert users[-1] == "10001:10001", "by number, so that runAsNonRoot can be checked"


@pytest.mark.parametrize("name", FILES)
def test_an_image_starts_healthd_whatever_it_is_built_on(name: str) -> None:
    """The manifests give arguments alone, which the entry point of a base image would take."""
    found = dict(instructions(name))
    assert found["ENTRYPOINT"] == '["healthd"]'
    assert "CMD" in found, "that of the base would be an argument of healthd"


@pytest.mark.parametrize("name", ["Containerfile", "Containerfile-training"])
def test_an_image_of_a_node_has_what_reads_the_kubelet(name: str) -> None:
    runs = " ".join(rest for word, rest in instructions(name) if word == "RUN")
    named = re.search(r"'\.\[([a-z,]+)\]'", runs)
    assert named is not None
    assert "kubernetes" in named[1].split(",")


RECIPES = {"healthd": "Containerfile", "healthd-torch": "Containerfile-training"}

ASK = """
import json, sys
sys.path.insert(0, sys.argv[1])
from checks.contract import Context, Finding, Tier, load_params
from checks.discover import builtin_checks
from checks.host.machine import Host, HostError
accelerator, names = sys.argv[2], sys.argv[3].split(",")
devices = [{"target": accelerator + ":0", "index": 0, "bus_id": "0000:00:1e.0", "uuid": "GPU-1", "mig": False}]
missing = []
for name in names:
    check = builtin_checks()[name]
    inventory = {"accelerator": accelerator, "device_count": 1, "devices": devices}
    context = Context(host=Host(), params=load_params(check.params_type, {}), tier=Tier.PASSIVE, device=None,
        group=None, previous=None, limits={}, inventory=inventory)
    try:
        found = [(one.reason, one.message) for one in check(context) if isinstance(one, Finding)]
    except HostError as error:
        found = [(error.reason, str(error))]
    missing += [(name, message) for reason, message in found if reason == "MissingTool" and "extra" in message]
print(json.dumps(missing))
"""


@pytest.mark.system("kubectl")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_image_of_an_overlay_has_the_python_packages_that_its_checks_want(
    overlay: str, wheel: Path, tmp_path: Path
) -> None:
    """The checks run under a bare interpreter, as that of a job is: what they want is installed with healthd."""
    (container,) = node_pod(overlay)["containers"]
    recipe = RECIPES[container["image"].rpartition("/")[2].partition(":")[0]]
    runs = " ".join(rest for word, rest in instructions(recipe) if word == "RUN")
    extras = re.findall(r"'\.\[([a-z,-]+)\]'", runs)[0].split(",")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    for requirement in (line for extra in extras for line in PROJECT["project"]["optional-dependencies"][extra]):
        name = re.split(r"[\[<>=~! ]", requirement)[0]
        for top in {file.parts[0] for file in metadata.files(name) or () if file.parts[0] != ".."}:
            if not (tmp_path / top).exists():
                (tmp_path / top).symlink_to(metadata.distribution(name).locate_file(top))
    settings = of_config_map(overlay, "healthd-node")
    passive = [spec.name for spec in enabled_checks(builtin_checks(), settings.node) if spec.tier is Tier.PASSIVE]
    python = Path(sys.base_prefix) / "bin/python3"
    line = [python, "-I", "-S", "-c", ASK, tmp_path / "healthd/bundled", settings.probe.accelerator, ",".join(passive)]
    done = subprocess.run(list(map(str, line)), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []


def test_the_image_of_the_service_has_no_torch() -> None:
    text = " ".join(rest for word, rest in instructions("Containerfile") if word == "RUN")
    assert "torch" not in text
    named = re.search(r"'\.\[([a-z,]+)\]'", text)
    assert named is not None
    extras = PROJECT["project"]["optional-dependencies"]
    for extra in named[1].split(","):
        assert not any(need.startswith("torch") for need in extras[extra])


def test_the_probes_of_the_torch_image_run_under_the_interpreter_that_it_makes() -> None:
    found = dict(instructions("Containerfile-torch"))
    interpreter = found["ENV"].partition("=")[2]
    assert found["ENV"].startswith("HEALTHD_PROBE_PYTHON=")
    assert interpreter.removesuffix("/bin/python") in found["RUN"]


# --- the wheel --------------------------------------------------------------------------------------------------------


def test_the_wheel_has_every_module_and_all_data_of_the_repository(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
    wanted = {
        str(path.relative_to(ROOT) if package == "healthd" else "healthd/bundled" / path.relative_to(ROOT))
        for package in ("checks", "healthd")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", *DATA) and "__pycache__" not in path.parts
    }
    assert wanted
    assert sorted(wanted - packed) == []


def test_the_wheel_has_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"healthd"}, (
        "a job may have a package checks of its own"
    )


def test_every_optional_requirement_is_named_by_the_extra_that_messages_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read(next(n for n in archive.namelist() if n.endswith("METADATA"))).decode()
    assert re.search(r'^Requires-Dist: boto3[^;]*; extra == "aws"$', metadata, re.MULTILINE)
    assert re.search(r'^Requires-Dist: tenacity[^;]*; extra == "aws"$', metadata, re.MULTILINE)
    assert re.search(r'^Requires-Dist: asn1crypto[^;]*; extra == "aws"$', metadata, re.MULTILINE)
    plain = [line for line in metadata.splitlines() if line.startswith("Requires-Dist") and "extra ==" not in line]
    assert not [line for line in plain if re.search(r"torch|boto|numpy|grpc", line)]


def test_the_installed_command_says_its_version(installed: Path) -> None:
    assert PROJECT["project"]["scripts"]["healthd"] == "healthd.__main__:main"
    from healthd import __version__

    assert __version__ in run(installed / "bin/healthd", "--version", cwd=installed)


def test_what_is_installed_is_what_runs(installed: Path) -> None:
    script = "import healthd, checks; print(healthd.__file__); print(checks.__file__)"
    for line in run(installed / "bin/python", "-I", "-c", script, cwd=installed).splitlines():
        assert line.startswith(str(installed))


def test_a_jobs_own_package_checks_and_ours_never_meet(installed: Path, tmp_path: Path) -> None:
    """Neither import finds the other's, also where the job's is found first by everybody else."""
    (tmp_path / "checks").mkdir()
    (tmp_path / "checks/__init__.py").write_text('MINE = "of the job"\n', encoding="utf-8")
    (tmp_path / "checks/contract.py").write_text("raise SystemExit('the job is imported by healthd')\n")
    path = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); "
    theirs = path + "import checks; print(checks.MINE)"
    assert run(installed / "bin/python", "-I", "-c", theirs, cwd=tmp_path) == "of the job\n"
    assert run(installed / "bin/python", "-I", "-c", "import importlib.util as u; print(u.find_spec('checks'))") == (
        "None\n"
    )
    ours = path + "import healthd.cli, checks.contract; print(checks.__file__)"
    found = run(installed / "bin/python", "-I", "-c", ours, cwd=tmp_path).strip()
    assert found == str(next(installed.glob("lib/python*/site-packages")) / "healthd/bundled/checks/__init__.py")
    both = path + "import checks\ntry:\n    import healthd\nexcept ImportError as error:\n    print(error)"
    assert "run it as a process of its own" in run(installed / "bin/python", "-I", "-c", both, cwd=tmp_path)


@pytest.mark.parametrize("name", sorted(PROJECT["project"]["scripts"]))
def test_every_command_is_there_and_can_be_imported(installed: Path, name: str) -> None:
    assert (installed / "bin" / name).is_file()
    module, _, function = PROJECT["project"]["scripts"][name].partition(":")
    script = f"import {module} as found; assert callable(found.{function})"
    run(installed / "bin/python", "-I", "-c", script, cwd=installed)


def test_the_installed_checks_run_in_their_children(installed: Path, tmp_path: Path) -> None:
    command = [installed / "bin/healthd", "check", "load", "disk_space", "--json", "--state-dir", tmp_path]
    done = subprocess.run(
        [str(word) for word in command],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={"PATH": "/usr/bin:/bin", "HEALTHD_NODE_RUN_DIR": str(tmp_path / "run"), "HOME": str(tmp_path)},
    )
    assert done.returncode in (0, 1, 2), done.stderr
    assert '"disk_space"' in done.stdout


def test_the_installed_aggregator_has_its_migrations_and_its_page(installed: Path, tmp_path: Path) -> None:
    script = (
        "from importlib.resources import files; root = files('healthd.aggregator');"
        "print((root / 'store/migrations/env.py').is_file(), (root / 'page/templates/fleet.html').is_file());"
        "import sqlalchemy, asyncio; from healthd.aggregator.store.store import Store; print(Store.__name__)"
    )
    assert run(installed / "bin/python", "-I", "-c", script, cwd=tmp_path).split() == ["True", "True", "Store"]
