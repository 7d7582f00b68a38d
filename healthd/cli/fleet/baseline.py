"""`healthd baseline`: limits learned from healthy machines: look, learn, agree, carry from here to there."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from healthd.cli.fleet.line import aggregator_of, done, fleet_options, own_name, print_json
from healthd.cli.settings.options import common_options, load_settings
from healthd.core.errors import BadInputError, ConfigError

if TYPE_CHECKING:
    from healthd.baselines.model import Series

F = TypeVar("F", bound=Callable[..., Any])


def _place(command: F) -> F:
    """Where the baselines are: at the aggregator, or in a file."""
    file = click.option(
        "--file", "where", type=click.Path(path_type=Path), metavar="F", help="In this file, not at the aggregator."
    )
    return file(fleet_options(command))


@click.group(short_help="Limits learned from what healthy machines measured.")
def baseline() -> None:
    """Limits learned from what healthy machines measured."""


@baseline.command(short_help="What is learned, what judges, what has drifted.")
@click.argument("names", nargs=-1)
@_place
def show(names: tuple[str, ...], where: Path | None, as_json: bool, **options: Any) -> int:
    """What is learned, by NAMES of measurements or ids: what judges, what waits for a person, what has drifted."""
    from healthd.cli.fleet.baseline_lines import lines_of

    answer: dict[str, Any] = {} if where is not None else _get(options)
    series = _read(where) if where is not None else _series_of(answer)
    chosen = _chosen(series, names)
    if as_json:
        from healthd.baselines import files

        print_json({**answer, "format": files.FORMAT, "baseline": files.entries_of(chosen, candidates=True)})
    else:
        click.echo("\n".join(lines_of(chosen, answer)))
    return 0


@baseline.command(short_help="Learn now, from the fleet or from files.")
@click.argument("states", nargs=-1, type=click.Path(path_type=Path), metavar="[STATE.json]...")
@click.option("--out", type=click.Path(path_type=Path), metavar="F", help="Where to put what STATEs teach.")
@click.option("--approve", "agree", is_flag=True, help="Approve at once what can be.")
@fleet_options
def learn(states: tuple[Path, ...], out: Path | None, agree: bool, as_json: bool, **options: Any) -> int:
    """
    Learn from files as `healthd check --json` prints them, or let the aggregator learn from all its nodes now.

    Only passing results of healthy nodes that nobody used count: one of each device and day, eleven in all from three
    devices at least.
    """
    from healthd.baselines import files
    from healthd.cli.fleet.baseline_learning import decide, learned_of, too_few
    from healthd.cli.fleet.baseline_lines import lines_of

    if bool(states) != (out is not None):
        raise ConfigError("learning from files needs both: the files, and --out F for what they teach")
    if out is None:
        changed = _call(options, "POST", "/v1/baselines/learn", {})
        if agree:
            _call(options, "POST", "/v1/baselines/decide", {"state": "approved", "owner": own_name()})
        series = _series_of({"format": files.FORMAT, "baseline": changed["changed"]})
    else:
        settings = load_settings(options, section="gate")
        book, left_out = learned_of(states, _read(out) if os.path.exists(out) else (), settings)
        if agree:
            decide(book, (), "approved")
        series = book.all()
        if not any(one.in_force or one.candidate for one in series):
            raise BadInputError(f"nothing could be learned of {len(states)} files: {too_few(book, left_out)}")
        files.write(out, series, candidates=True)
        for line in left_out[:20]:
            click.echo(f"healthd: left out: {line}", err=True)
    if as_json:
        print_json({"format": files.FORMAT, "baseline": files.entries_of(series, candidates=True)})
    else:
        click.echo("\n".join(lines_of(series, {})))
    return 0


def _decision(name: str, state: str, text: str) -> None:
    @baseline.command(name, help=text)
    @click.argument("names", nargs=-1)
    @_place
    def command(names: tuple[str, ...], where: Path | None, as_json: bool, **options: Any) -> int:
        if state == "revoked" and not names:
            raise ConfigError("name what is to be revoked: measurements or ids, as 'healthd baseline show' lists them")
        if where is not None:
            from healthd.baselines import files
            from healthd.cli.fleet.baseline_learning import book_of, decide

            book = book_of(_read(where), load_settings(options, section="gate"))
            count = len(decide(book, names, state))
            files.write(where, book.all(), candidates=True)
        else:
            body = {"state": state, "names": names, "owner": own_name()}
            count = _call(options, "POST", "/v1/baselines/decide", body)["count"]
        done(as_json, f"{count} baselines are {state}", count=count)
        return 0


_decision("approve", "approved", "Let candidates judge: those NAMED, or all. Frozen ones that are named thaw.")
_decision("freeze", "frozen", "Keep what is approved as it is. No candidates any more, and no replacement by import.")
_decision("revoke", "revoked", "Take back what is approved: it judges no more, anywhere.")


@baseline.command(short_help="Write what is approved to a file.")
@click.argument("out", type=click.Path(path_type=Path))
@click.argument("names", nargs=-1)
@click.option("--candidates", is_flag=True, help="Also what nobody has agreed to yet.")
@_place
def export(
    out: Path, names: tuple[str, ...], candidates: bool, where: Path | None, as_json: bool, **options: Any
) -> int:
    """Write a file (JSON, or TOML if it is called so) for `--baseline FILE` and `[baseline] file`."""
    from healthd.baselines import files

    series = _chosen(_read(where) if where is not None else _series_of(_get(options)), names)
    if not files.entries_of(series, candidates=candidates):
        raise BadInputError("nothing is approved that could be exported; 'healthd baseline show' lists what is learned")
    count = files.write(out, series, candidates=candidates)
    done(as_json, f"{out}: {count} baselines", count=count)
    return 0


@baseline.command(name="import", short_help="Give a file to the aggregator.")
@click.argument("file", type=click.Path(path_type=Path))
@fleet_options
def take(file: Path, as_json: bool, **options: Any) -> int:
    """Give a file to the aggregator: what is approved in it judges on the nodes that it is meant for."""
    from healthd.baselines import files

    body = {"format": files.FORMAT, "baseline": files.entries_of(_read(file), candidates=True)}
    count = _call(options, "POST", "/v1/baselines/import", body)["count"]
    done(as_json, f"{count} baselines were taken from {file}", count=count)
    return 0


@baseline.command(short_help="How what is approved differs.")
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path), required=False)
@fleet_options
def diff(old: Path, new: Path | None, as_json: bool, **options: Any) -> int:
    """
    How what is approved differs between two files, or between a file and the aggregator.

    Exit code: 0 they are the same, 1 they differ, 3 it cannot be told.
    """
    from healthd.cli.fleet.baseline_lines import differences

    found = differences(_read(old), _read(new) if new is not None else _series_of(_get(options)))
    if as_json:
        print_json({"differences": found})
    elif found:
        click.echo("\n".join(found))
    return 1 if found else 0


@baseline.command(short_help="A starting configuration from this good node.")
@common_options
@click.option("--out", type=click.Path(path_type=Path), metavar="F", help="Write it here; else print it.")
@click.option("--margin", type=float, default=0.2, show_default=True, help="Share that limits are away from the worst.")
@click.option("--runs", type=click.IntRange(1, 20), default=3, show_default=True, help="Runs; the worst value counts.")
@click.option("--tier", type=click.Choice(["quick", "deep"]), default="quick", show_default=True, help="What to run.")
@click.option("--force", is_flag=True, help="Overwrite an existing file.")
def init(out: Path | None, margin: float, runs: int, tier: str, force: bool, **options: Any) -> int:
    """
    Write a starting configuration with [limits] from this good node: what it measures now, with a margin.

    Exit code: 0 written, 1 the node is not healthy or not free, 2 usage.
    """
    import asyncio

    from checks.contract import Tier
    from healthd.baselines import files
    from healthd.cli.check import examine
    from healthd.cli.fleet.baseline_init import configuration

    if not 0 < margin < 1:
        raise ConfigError(f"--margin is a share between 0 and 1, not {margin:g}")
    if out is not None and os.path.exists(out) and not force:
        raise ConfigError(f"{out} is there already; name another file, or say --force")
    settings = load_settings(options, section="node")
    states = [asyncio.run(examine(settings, (), Tier(tier), quiet=True)) for _ in range(runs)]
    text = configuration(states, margin=margin, tier=tier)
    if out is None:
        sys.stdout.write(text)
    else:
        files.put(out, text.encode())
        click.echo(f"{out}: limits of {states[-1].node} with a margin of {100 * margin:g} %; read it before you use it")
    return 0


# --- series here and there ------------------------------------------------------------------------------------------


def _chosen(series: Sequence[Series], names: Sequence[str]) -> tuple[Series, ...]:
    from healthd.cli.fleet.baseline_learning import book_of

    return book_of(series).find(names)


def _read(path: Path) -> tuple[Series, ...]:
    """A file that was named on the command line; ConfigError where it cannot be used."""
    from healthd.baselines import files

    try:
        return files.read(path)
    except BadInputError as error:
        raise ConfigError(str(error)) from None


def _series_of(answer: dict[str, Any]) -> tuple[Series, ...]:
    from healthd.baselines import files
    from healthd.core import wire

    known = {key: answer[key] for key in ("format", "baseline") if key in answer}
    return files.decode(wire.encode(known), what="answer of the aggregator")


def _get(options: Mapping[str, Any]) -> dict[str, Any]:
    with aggregator_of(options) as aggregator:
        found: dict[str, Any] = aggregator.get("/v1/baselines")
    return found


def _call(options: Mapping[str, Any], method: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    from healthd.core import wire

    with aggregator_of(options) as aggregator:
        return wire.decode(aggregator.call(method, path, body=body), dict[str, Any], what="answer of the aggregator")
