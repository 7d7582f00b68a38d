"""
Vendors' tools as small programs that print what the tools said: their part of a recorded machine.

A tool that did not end in time is recorded as one that hangs, one that streams as one that goes on with its first line.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

from checks.accelerators.neuron.versions import PACKAGES
from checks.host.machine import Host, HostError
from checks.json_text import parse_json
from healthd.core.redaction import redact
from healthd.record.sources import RPM_DATABASES

STREAM_PERIOD_SECONDS = 5
_MAX_NAME_CHARACTERS = 64

# What neuron-monitor is asked for; it honours whole units alone.
_MONITOR_CONFIG = {
    "period": "1s",
    "neuron_runtimes": [
        {"tag_filter": ".*", "metrics": [{"type": "execution_stats"}, {"type": "neuroncore_counters"}]}
    ],
    "system_metrics": [{"type": "neuron_hw_counters"}],
}


class Tool(NamedTuple):
    """
    How a tool is asked. `streams`: it never ends, and its first line is what counts.

    `paths` are tried before the ways in which programs are found. With `only_with`, it is asked where one of these is.
    """

    name: str
    arguments: tuple[str, ...]
    timeout_seconds: float
    streams: bool = False
    paths: tuple[str, ...] = ()
    only_with: tuple[str, ...] = ()


# As checks ask them.
TOOLS = (
    Tool("neuron-ls", ("-j",), 10.0),
    Tool("neuron-monitor", ("-c", "{config}"), 10.0, streams=True),
    Tool(
        "rpm",
        ("-q", "--qf", "%{NAME} %{VERSION}\\n", *PACKAGES.values()),
        5.0,
        only_with=RPM_DATABASES,
    ),
    Tool("fi_info", ("-p", "efa"), 10.0, paths=("/opt/amazon/efa/bin/fi_info",)),
)


class ToolRun(NamedTuple):
    """What came of it. `returncode` None: it did not end, or streams on."""

    arguments: tuple[str, ...]
    stdout: str
    stderr: str
    returncode: int | None


# Whole or cut off in the middle.
_COMMAND = re.compile(r'("command"\s*:\s*")((?:[^"\\]|\\.)*)("|\\?$)')


def run_tool(host: Host, tool: Tool, folder: Path) -> ToolRun | None:
    """Ask a tool; None where it is not there. `folder` takes files that it needs."""
    config = folder / "monitor.json"
    config.write_text(json.dumps(_MONITOR_CONFIG))
    program = next((path for path in tool.paths if host.exists(path)), tool.name)
    argv = [program, *(argument.replace("{config}", str(config)) for argument in tool.arguments)]
    try:
        if tool.streams:
            line = host.first_line(argv, timeout_seconds=tool.timeout_seconds)
            return ToolRun((), redact_output(line) + "\n", "", None)
        done = host.run(argv, timeout_seconds=tool.timeout_seconds)
        if done.returncode != 0:  # neuron-ls up to 2.27 fails while another one asks the driver: once more
            done = host.run(argv, timeout_seconds=tool.timeout_seconds)
    except HostError as error:
        if error.reason == "MissingTool":
            return None
        return ToolRun(tool.arguments, "", "", 1 if error.reason == "NoData" else None)
    return ToolRun(tool.arguments, redact_output(done.stdout), redact_output(done.stderr), done.returncode)


def redact_output(text: str) -> str:
    """Of commands the program's name is kept, without its directory; arguments may hold secrets."""

    def name_alone(match: re.Match[str]) -> str:
        try:
            command = str(parse_json(f'"{match[2]}"', strict=False))
        except ValueError:  # cut off inside an escape: what is before it
            command = match[2].partition("\\")[0]
        word = next(iter(command.split()), "")
        name = "" if "=" in word else word.rpartition("/")[2][:_MAX_NAME_CHARACTERS]
        return f"{match[1]}{json.dumps(name)[1:-1]}{match[3]}"

    return redact(_COMMAND.sub(name_alone, text))


def program_text(name: str, runs: list[ToolRun]) -> str:
    """A program of the standard library that says it again; asked otherwise than it was, it gives the first answer."""
    rows = json.dumps([run._asdict() for run in runs])
    return f'''#!/usr/bin/env -S python3 -S -E
"""What {name} said when this machine was recorded."""

import json
import sys
import time

RUNS = json.loads({rows!r})
run = next((run for run in RUNS if run["arguments"] == sys.argv[1:]), RUNS[0])
try:
    while True:
        sys.stdout.write(run["stdout"])
        sys.stderr.write(run["stderr"])
        sys.stdout.flush()
        if run["returncode"] is not None:
            sys.exit(run["returncode"])
        # It streamed, or did not end in time: nobody waits for it for ever.
        time.sleep({STREAM_PERIOD_SECONDS} if run["stdout"] else 3600)
except BrokenPipeError:
    sys.exit(0)
'''
