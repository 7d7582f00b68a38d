"""The documentation site has no dead link; what a release is made of; CI elsewhere runs what `.ci/run` does."""

from __future__ import annotations

import functools
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from deploy.release import sbom, tag
from docs import site
from healthd import __version__
from tests.ui.stage import chromium

ROOT = Path(__file__).parent.parent
MKDOCS = Path(sys.executable).parent / "mkdocs"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "pages"
    site.collect(folder)
    return folder


def build(pages: Path, *, nav: bool = True) -> tuple[int, str]:
    """Exit code and output of the site of these pages; without `nav` they need not be all that it has."""
    if not MKDOCS.exists():
        pytest.skip(f"{MKDOCS} is not installed: pip install -r requirements.txt")
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    text = text.replace("build/site-pages", str(pages)).replace("build/site", str(pages.parent / "site"))
    text = text if nav else text.partition("\nnav:")[0]
    config = pages.parent / "mkdocs.yml"
    config.write_text(text, encoding="utf-8")
    done = subprocess.run(
        [str(MKDOCS), "build", "--strict", "--config-file", str(config)],
        env={
            **os.environ,
            "NO_MKDOCS_2_WARNING": "1",
            "SITE_VERSION": (pages / "version.txt").read_text(encoding="utf-8").strip(),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def made(pages: Path) -> Path:
    code, said = build(pages)
    assert code == 0, said
    return pages.parent / "site"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Nothing is to be read of it."""


@pytest.fixture
def served(made: Path) -> Iterator[str]:
    """The URL of the site: the clipboard is for pages of a server alone."""
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(made))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.system("chromium")
def test_code_of_the_site_is_whole_and_what_is_copied_can_be_typed(served: str) -> None:
    """No line is cut at the width of a notebook, and a command is copied without its prompt and without its output."""
    with chromium() as browser:
        allowed = ["clipboard-read", "clipboard-write"]
        page = browser.new_context(viewport={"width": 1280, "height": 900}, permissions=allowed).new_page()
        for name in ("index.html", "docs/aggregator.html", "docs/operations.html", "docs/settings.html"):
            page.goto(f"{served}/{name}")
            cut = "[...document.querySelectorAll('pre > code')].filter(one => one.scrollWidth > one.clientWidth + 1)"
            assert page.evaluate(f"{cut}.map(one => one.innerText.slice(0, 80))") == [], name
        page.goto(f"{served}/docs/aggregator.html")
        block = page.locator("pre", has_text="healthd tls init")
        block.hover()
        block.locator("button").click()
        page.get_by_text("Copied to clipboard").wait_for()
        copied = page.evaluate("navigator.clipboard.readText()").splitlines()
        assert copied[0].startswith("mkdir -p /etc/healthd")
        assert copied[-1] == "chmod 600 tokens.toml"
        assert not [line for line in copied if line.startswith("$")]


@pytest.mark.thorough
def test_site_builds_and_leads_to_everything(pages: Path, made: Path) -> None:
    assert (made / "docs/kubernetes.html").is_file()
    assert (made / "docs/pictures/fleet.png").is_file()
    assert (made / "deploy/kubernetes/examples/gated-job.yaml").is_file()
    said = (pages / "version.txt").read_text(encoding="utf-8").strip()
    assert said.startswith(f"healthd {__version__}")
    for page in made.rglob("*.html"):
        assert said in page.read_text(encoding="utf-8"), f"{page} does not say which version it is of"
    assert "cdn" not in (made / "index.html").read_text(encoding="utf-8"), "nothing is loaded from elsewhere"


def test_a_link_that_leads_nowhere_fails_the_build(pages: Path, tmp_path: Path) -> None:
    other = tmp_path / "pages"
    (other / "docs").mkdir(parents=True)
    (other / "docs/other.md").write_text("# Other", encoding="utf-8")
    (other / "index.md").write_text("[x](gone.md) [x](docs/other.md#no-such-heading)", encoding="utf-8")
    shutil.copy(pages / "version.txt", other)
    code, said = build(other, nav=False)
    assert code != 0
    assert re.search(r"WARNING .*gone\.md", said)
    assert re.search(r"WARNING .*no-such-heading", said)


def test_reference_shows_every_operation(pages: Path) -> None:
    text = (pages / "docs/api-reference.md").read_text(encoding="utf-8")
    shown = re.findall(r"^### `([A-Z]+) (\S+)`$", text, re.MULTILINE)
    paths = json.loads((pages / "docs/openapi.json").read_text(encoding="utf-8"))["paths"]
    assert sorted(shown) == sorted((method.upper(), path) for path, methods in paths.items() for method in methods)


# --- a release ------------------------------------------------------------------------------------------------------


def described_by_setup(repository: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    found: dict[str, Any] = {}
    monkeypatch.setenv("REPOSITORY_URL", repository)
    monkeypatch.setattr("setuptools.setup", found.update)
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(ROOT / "setup.py"))
    return found


def test_links_of_the_package_lead_into_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    text = described_by_setup("https://git.example.com/team/healthd/", monkeypatch)["long_description"]
    targets = re.findall(r"\]\(([^)]+)\)", text)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith(("https://", "#"))] == []
    assert "](https://git.example.com/team/healthd/raw/main/docs/pictures/validation.png)" in text
    assert "](https://git.example.com/team/healthd/blob/main/docs/install.md)" in text
    for target in targets:
        file = re.sub(r"^https://git\.example\.com/team/healthd/(raw|blob)/main/", "", target).partition("#")[0]
        assert "://" in file or not file or (ROOT / file).exists(), target


def test_a_clone_names_no_repository_that_it_does_not_know(monkeypatch: pytest.MonkeyPatch) -> None:
    found = described_by_setup("", monkeypatch)
    assert found["project_urls"] == {}
    assert found["long_description"] == (ROOT / "README.md").read_text(encoding="utf-8")


def test_bill_of_a_release_names_all_parts_in_the_versions_that_are_here() -> None:
    bill = sbom.bill("1.2.3")
    parts = {part["name"]: part["version"] for part in bill["components"]}
    assert {"starlette", "boto3", "psycopg-binary", "anyio", "grpcio"} <= set(parts)
    assert not {"torch", "pytest", "mkdocs"} & set(parts)
    lines = (ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    assert set(parts) <= {sbom.name_of(one.name) for one in pinned}, "a part that is not pinned"
    assert {name: version for name, version in parts.items() if metadata.version(name) != version} == {}
    references = {part["bom-ref"] for part in bill["components"]} | {bill["metadata"]["component"]["bom-ref"]}
    for one in bill["dependencies"]:
        assert {one["ref"], *one["dependsOn"]} <= references


# --- CI elsewhere ---------------------------------------------------------------------------------------------------


def test_the_workflow_runs_what_ci_runs() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]["run"]["steps"]
    assert steps[-1] == {"run": ".ci/run"}
    assert "make site" in (ROOT / ".ci/run").read_text(encoding="utf-8")


def test_forms_for_issues_have_what_they_must() -> None:
    forms = [path for path in (ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml") if path.name != "config.yml"]
    assert len(forms) == 2
    for path in forms:
        form = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert {"name", "description", "body"} <= set(form)
        ids = [part["id"] for part in form["body"] if part["type"] != "markdown"]
        assert len(ids) == len(set(ids)) > 0


def test_a_tag_must_name_the_version_of_every_place(tmp_path: Path) -> None:
    for place, _ in tag.PLACES:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        text = (ROOT / place).read_text(encoding="utf-8").replace(__version__, "4.5.6")
        (tmp_path / place).write_text(text.replace("(not released yet)", "(2026-12-24)", 1), encoding="utf-8")
    assert tag.differences("v4.5.6", tmp_path) == []
    for wrong in ("v4.5.7", "4.5.6", "", "v4.5.6-rc1"):
        assert [line.partition(":")[0] for line in tag.differences(wrong, tmp_path)] == [
            place for place, _ in tag.PLACES
        ]
    chart = tmp_path / "deploy/helm/healthd/Chart.yaml"
    chart.write_text(
        chart.read_text(encoding="utf-8").replace("appVersion: 4.5.6", "appVersion: 4.5.5"), encoding="utf-8"
    )
    assert tag.differences("v4.5.6", tmp_path) == [
        "deploy/helm/healthd/Chart.yaml: version 4.5.6, 4.5.5, the tag is 'v4.5.6'"
    ]


def test_the_release_workflow_compares_the_tag_before_it_builds() -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))["jobs"]["draft"]
    lines = [step.get("run", "") for step in job["steps"]]
    compares = next(i for i, line in enumerate(lines) if "make tag-is-version" in line)
    assert compares < next(i for i, line in enumerate(lines) if "make release" in line)


def test_the_version_of_the_site_names_the_commit_and_whether_the_tree_was_changed(tmp_path: Path) -> None:
    assert site.version(tmp_path) == f"healthd {__version__}", "no repository, as in an unpacked release"
    git = ("git", "-C", str(tmp_path), "-c", "user.name=x", "-c", "user.email=x@example.com")
    (tmp_path / "file").write_text("1")
    for words in (("init", "-q"), ("add", "file"), ("commit", "-qm", "one"), ("tag", "v9")):
        subprocess.run([*git, *words], check=True)
    clean = site.version(tmp_path)
    assert re.fullmatch(rf"healthd {re.escape(__version__)}, commit [0-9a-f]{{12}}", clean)
    (tmp_path / "file").write_text("2")
    assert site.version(tmp_path) == f"{clean}, changed"
