"""`healthd baseline`: learn limits from what healthy machines measured, and print them as a settings file."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from healthd.cli.fleet.line import aggregator_of
from healthd.cli.settings.options import Command, aggregator_option, common_options
from healthd.core.bounded import read_file
from healthd.core.errors import BadInputError, ConfigError, words_of

if TYPE_CHECKING:
    from healthd.baselines import Learned, SampleSeries
    from healthd.core.model import NodeState

# A node's state is some 100 kB, a page of them some more.
MOST_BYTES = 64 << 20
MOST_SHOWN = 20


@click.command(
    cls=Command,
    short_help="Learn limits from what healthy machines measured.",
    examples=(
        "healthd baseline --aggregator https://head:8090 --write learned.toml",
        "healthd baseline n1-monday.json n2-monday.json",
    ),
)
@click.argument("states", nargs=-1, type=click.Path(path_type=Path), metavar="[STATE.json]...")
@click.option("--write", type=click.Path(path_type=Path), metavar="FILE", help="Write a new file instead of printing.")
@click.option(
    "--false-alarms",
    type=float,
    metavar="N",
    help="Acceptable false alarms in one run of the whole fleet (default 0.01).",
)
@click.option(
    "--share-ratio", type=float, metavar="SHARE", help="Minimum distance between a limit and the median (default 0.1)."
)
@aggregator_option
@common_options
def baseline(
    states: tuple[Path, ...],
    write: Path | None,
    false_alarms: float | None,
    share_ratio: float | None,
    **options: Any,
) -> int:
    """
    Learn limits from what healthy machines measured, and print them as a settings file (TOML) to review and roll out.

    Without files it learns from the latest measurements of the aggregator's fleet; with files, from the output of
    `healthd check --json`. Only passing results of healthy, idle nodes count: one per device and day. At least eleven
    samples from three devices are needed.

    Exit code: 0 limits were learned, 1 none could be learned, 2 usage.
    """
    from healthd import baselines

    false_alarms = baselines.FALSE_ALARMS if false_alarms is None else false_alarms
    share_ratio = baselines.SHARE_RATIO if share_ratio is None else share_ratio
    if not 0 < false_alarms <= 100:
        raise ConfigError(f"--false-alarms must be more than 0 and at most 100, not {false_alarms:g}")
    if not 0 < share_ratio < 1:
        raise ConfigError(f"--share-ratio must be between 0 and 1, not {share_ratio:g}")
    left_out: list[str] = []
    series = _series_of(states, left_out) if states else _series_of_fleet(options)
    comparisons = sum(one.devices for one in series)
    learned = [
        baselines.learn(one, comparisons=comparisons, false_alarms=false_alarms, share_ratio=share_ratio)
        for one in series
    ]
    for line in left_out[:MOST_SHOWN]:
        click.echo(f"healthd: left out: {line}", err=True)
    if not any(one is not None and (one.lower, one.upper) != (None, None) for one in learned):
        raise BadInputError(f"no limit can be learned: {_why_none(series, left_out)}")
    text = settings_text(series, learned)
    if write is None:
        sys.stdout.write(text)
        return 0
    try:
        with write.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{write} exists; name a new file") from None
    except OSError as error:
        raise ConfigError(f"{write}: cannot be written: {words_of(error)}") from None
    click.echo(f"{write}: review these limits, then add them to the settings file of the nodes", err=True)
    return 0


def settings_text(series: Sequence[SampleSeries], learned: Sequence[Learned | None]) -> str:
    """A settings file with a table `[baselines.NAME]` for each kind of machine; what has no limit is a comment."""
    lines = [
        "# Limits learned by `healthd baseline`. Review them, then add them to the settings file of the nodes.",
        "# The limits of a table apply only to machines of its hardware and versions; [limits.NAME] overrides them.",
    ]
    kinds = dict.fromkeys(one.kind for one in series)
    often = Counter(kind.hardware for kind in kinds)
    for kind in kinds:
        here = [(one, found) for one, found in zip(series, learned, strict=True) if one.kind == kind]
        table = f"baselines.{_quoted(kind.hardware if often[kind.hardware] == 1 else str(kind))}"
        versions = ", ".join(f"{_quoted(name)} = {_quoted(version)}" for name, version in kind.versions)
        lines += [
            "",
            f"[{table}]",
            f"hardware = {_quoted(kind.hardware)}",
            f"accelerator = {_quoted(kind.accelerator)}",
            f"versions = {{ {versions} }}",
        ]
        for one, found in here:
            lines += ["", *_limit_lines(table, one, found)]
    return "\n".join(lines) + "\n"


def _limit_lines(table: str, series: SampleSeries, learned: Learned | None) -> Iterator[str]:
    from checks.limits import quantity

    name, plain = _quoted(series.name), series.name.partition("/")[0]
    if learned is None:
        yield f"# {name}: no limit: {len(series.values)} samples of {series.devices} devices are too few"
        return
    noise = 100 * learned.mad / learned.median
    yield (
        f"# median {quantity(plain, learned.median)}, MAD {noise:.1f} %, {learned.samples} samples, "
        f"{series.devices} devices"
    )
    if learned.lower is None and learned.upper is None:
        yield f"# {name}: no limit: its samples differ too much"
        return
    if learned.outside:
        yield f"# {learned.outside} of the samples would have failed"
    yield f"[{table}.limits.{name}]"
    yield f"lower = {_number(learned.lower)}" if learned.lower is not None else f"upper = {_number(learned.upper)}"


def _quoted(text: str) -> str:
    """A string of TOML, on one line."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _number(value: float | None) -> str:
    """Four digits: more would say that it is known so well."""
    return repr(float(f"{value:.4g}"))


def _series_of_fleet(options: Mapping[str, Any]) -> tuple[SampleSeries, ...]:
    from healthd.baselines import SampleSeries
    from healthd.core import wire

    with aggregator_of(options) as aggregator:
        answer = aggregator.get("/v1/fleet/samples")
    return wire.convert(answer.get("series"), tuple[SampleSeries, ...], what="answer of the aggregator")


def _series_of(files: Sequence[Path], left_out: list[str]) -> tuple[SampleSeries, ...]:
    """What the files hold; `left_out` gets the nodes that teach nothing, and why."""
    from healthd import baselines

    samples = []
    for path in files:
        for state in _states(path):
            free = dataclasses.replace(state, quarantine=None)
            why, kind = baselines.why_not(free), baselines.kind_of(free)
            if why is not None or kind is None:
                left_out.append(f"{path}: {state.node}: {why}")
                continue
            # The node's own clock says when it was: a file may be old, and days tell samples apart.
            samples += [(kind, one) for one in baselines.samples_of(free, now=state.observed_at)]
    return baselines.series_of(samples)


def _states(path: Path) -> tuple[NodeState, ...]:
    """The states in a file: one, or a list. ConfigError where it cannot be used."""
    from healthd.core import wire
    from healthd.core.model import NodeState

    try:
        body = read_file(path, MOST_BYTES)
        if body.lstrip()[:1] == b"[":
            return wire.decode(body, tuple[NodeState, ...], what="states")
        return (wire.decode(body, NodeState, what="state"),)
    except (OSError, BadInputError) as error:
        raise ConfigError(f"{path}: {words_of(error)}; use a file written by 'healthd check --json'") from None


def _why_none(series: Sequence[SampleSeries], left_out: Sequence[str]) -> str:
    from healthd.baselines import LEAST_DEVICES, LEAST_SAMPLES

    if not series:
        return f"left out: {left_out[0]}" if left_out else "no healthy, idle node has measured anything in the last day"
    most = max(series, key=lambda one: (one.devices >= LEAST_DEVICES, len(one.values)))
    if len(most.values) >= LEAST_SAMPLES and most.devices >= LEAST_DEVICES:
        return f"the samples differ too much ({most.name})"
    text = (
        f"only {len(most.values)} samples of {most.devices} devices; {LEAST_SAMPLES} samples of {LEAST_DEVICES} "
        "devices are needed"
    )
    return f"{text}; left out: {left_out[0]}" if left_out else text
