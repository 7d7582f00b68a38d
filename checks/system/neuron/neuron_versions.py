"""Whether the versions of AWS's Neuron software go together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from checks.accelerators.neuron.versions import (
    PACKAGES,
    Package,
    find_started,
    parse_version,
    read_loaded,
    read_packages,
    same_version,
)
from checks.contract import Action, Context, Finding, Measurement, NoParams, Status, check
from checks.host.machine import Host, HostError

Version = tuple[int, ...]
_FIRST: Version = (0,)
_LAST: Version = (1 << 31,)


class Pair(NamedTuple):
    """Two parts that do not work together while each is in its range: from the first version to below the second."""

    one: str
    one_from: Version
    one_below: Version
    other: str
    other_from: Version
    other_below: Version
    remedy: str


# Source: release notes of the Neuron runtime and driver. They name driver 2.29 and runtime 2.32; that what came after
# them is no less strict is an assumption.
PAIRS = (
    Pair("driver", (2, 29), _LAST, "runtime", _FIRST, (2, 33), "upgrade aws-neuronx-runtime-lib to 2.33 or newer"),
    Pair("runtime", (2, 32), _LAST, "driver", _FIRST, (2, 27), "upgrade aws-neuronx-dkms to 2.27 or newer"),
)


@check(tier="passive", interval_seconds=600, timeout_seconds=10)
def neuron_versions(ctx: Context[NoParams]) -> Iterator[Finding]:
    """
    Driver, runtime and collectives of AWS Neuron are compatible, and the loaded driver is the installed one.

    The check judges the packages of this machine. A container has its own packages. If it has none, the check is
    skipped, because the job's runtime is elsewhere.

    Reads:   /sys/module/neuron/version; the kernel log, for the driver that started last; /var/lib/dpkg/status, else
             `rpm -q`.
    Judges:  fail VersionMismatch (pairs known not to work) | warn VersionMismatch (the loaded driver is not the
             installed one, runtime and collectives of different releases, an installation that broke off) | unknown
             NoData (no version of the driver), NoData, NoPermission, MissingTool, Timeout (packages that cannot be
             read) | skip NotApplicable (no Neuron devices in use, no Neuron packages).
    Cost:    8 ms (rpm 50 ms); harmless to jobs.
    Source:  release notes of the Neuron runtime and driver.
    Unverified on hardware: what the files and the kernel log hold is from documentation.
    """
    if ctx.inventory.get("accelerator") != "neuron":
        text = "no Neuron devices are in use here"
        yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
        return
    shown, started = read_loaded(ctx.host), _started(ctx.host)
    loaded = shown or started
    known = loaded is not None and parse_version(loaded) is not None
    if not known:
        said = f"is {loaded!r}, which is not a version number" if loaded else "cannot be found"
        text = f"the version of the loaded Neuron driver {said}: checked /sys/module/neuron/version and the kernel log"
        yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
    try:
        packages = read_packages(ctx.host) or {}
    except HostError as error:
        text = f"the installed Neuron packages cannot be read: {error}"
        yield Finding(status=Status.UNKNOWN, reason=error.reason, message=text, target="node")
        return
    if not packages:
        text = (
            f"no Neuron packages are installed to compare with driver {loaded or '(unknown)'}; a container has its own"
        )
        yield Finding(status=Status.SKIP, reason="NotApplicable", message=text, target="node")
        return
    findings = [*judge_driver(shown, started, packages), *judge_packages(packages), *judge_pairs(loaded, packages)]
    yield from findings
    if not findings and known and loaded is not None:
        yield _go_together(loaded, packages)


def judge_driver(shown: str | None, started: str | None, packages: Mapping[str, Package]) -> Iterator[Finding]:
    """The loaded driver against the kernel log's and the installed one."""
    if shown and started and same_version(shown, started) is False:
        text = (
            f"the loaded Neuron driver reports version {shown}, but the kernel log shows that {started} started "
            "last: was a reload interrupted? Reload the driver or reboot"
        )
        yield _mismatch(text, Action.REBOOT)
    loaded, installed = shown or started, packages.get("driver")
    if loaded and installed and installed.state is None and same_version(loaded, installed.version) is False:
        text = (
            f"Neuron driver {loaded} is loaded but {installed.version} is installed (aws-neuronx-dkms): reload the "
            "driver or reboot while no job runs"
        )
        yield _mismatch(text, Action.REBOOT)


def judge_packages(packages: Mapping[str, Package]) -> Iterator[Finding]:
    """Packages by themselves: whole, with a version, and of one release."""
    for part, package in packages.items():
        if package.state is not None:
            text = (
                f"{PACKAGES[part]} {package.version} is {package.state}: its installation did not finish; "
                "install it again"
            )
            yield _mismatch(text, Action.INSPECT)
        elif parse_version(package.version) is None:
            text = f"{PACKAGES[part]} has the unreadable version {package.version!r}"
            yield Finding(status=Status.UNKNOWN, reason="NoData", message=text, target="node")
    runtime, collectives = packages.get("runtime"), packages.get("collectives")
    if runtime is None or collectives is None:
        return
    one, other = parse_version(runtime.version), parse_version(collectives.version)
    if one and other and one[:2] != other[:2]:
        text = (
            f"Neuron runtime {runtime.version} and collectives {collectives.version} are from different releases: "
            "install both from the same Neuron SDK"
        )
        yield _mismatch(text, Action.INSPECT)


def judge_pairs(loaded: str | None, packages: Mapping[str, Package]) -> Iterator[Finding]:
    """Pairs that are known not to work together."""
    said = {part: package.version for part, package in packages.items()}
    if loaded is not None:
        said["driver"] = loaded
    versions = {part: version for part, text in said.items() if (version := parse_version(text)) is not None}
    for pair in PAIRS:
        one, other = versions.get(pair.one), versions.get(pair.other)
        if one is None or other is None:
            continue
        if pair.one_from <= one < pair.one_below and pair.other_from <= other < pair.other_below:
            text = (
                f"Neuron {pair.one} {said[pair.one]} does not work with {pair.other} {said[pair.other]}: {pair.remedy}"
            )
            yield Finding(status=Status.FAIL, reason="VersionMismatch", message=text, target="node")


def _started(host: Host) -> str | None:
    """None also where the log cannot be read: `kernel_log` tells that."""
    try:
        return find_started(host.kernel_log())
    except HostError:
        return None


def _mismatch(text: str, action: Action) -> Finding:
    return Finding(status=Status.WARN, reason="VersionMismatch", message=text, target="node", action=action)


def _go_together(loaded: str, packages: Mapping[str, Package]) -> Finding:
    others = ", ".join(f"{part} {package.version}" for part, package in packages.items() if part != "driver")
    return Finding(
        status=Status.PASS,
        reason=None,
        message=f"no known conflict: driver {loaded} (loaded), {others or 'no other Neuron package'}",
        target="node",
        measurements=(
            Measurement(
                name="neuron_packages_count", value=float(len(packages)), lower=None, upper=None, origin="none"
            ),
        ),
    )
