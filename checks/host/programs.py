"""Runs programs of the machine, bounded in time and output; every failure is a HostError with a reason code."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from checks.host.files import HostError, HostFiles

MAX_OUTPUT_BYTES = 1 << 20
TOOL_PATHS = ("/opt/aws/neuron/bin", "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")

T = TypeVar("T")


class Completed(NamedTuple):
    """How a program ended. `returncode` is negative for a signal; output is cut at a bound."""

    returncode: int
    stdout: str
    stderr: str


class HostPrograms(HostFiles):
    """The files and programs of the machine, or of a directory that stands for it."""

    def find_program(self, name: str) -> str:
        """The path of a program; HostError MissingTool when there is none."""
        if "/" in name:
            candidates = [self.path(name), name] if self.root else [name]
        else:
            folders = [self.path("/bin")] if self.root else []
            folders += [*os.environ.get("PATH", "").split(os.pathsep), *TOOL_PATHS]
            candidates = [os.path.join(folder, name) for folder in folders if folder]
        for candidate in candidates:
            if os.path.isfile(candidate) and os.access(candidate, os.X_OK):
                return candidate
        raise HostError("MissingTool", f"no such program: {name}; install it or name its path")

    def run(
        self,
        argv: Sequence[str],
        *,
        timeout_seconds: float,
        keep_open: Sequence[int] = (),
        folder: str = "",
        environment: Callable[[Mapping[str, str]], Mapping[str, str]] | None = None,
    ) -> Completed:
        """
        Run a program to its end or its time-out, with no input; whatever it has started ends with it.

        HostError Timeout or MissingTool. Output that a grandchild keeps open is not waited for. The program inherits
        the descriptors of `keep_open`, and with them the locks that are on them. `folder` is its working directory
        (empty: ours); `environment` makes its environment out of the usual one.
        """
        from checks.host.running import run_program

        run = functools.partial(run_program, keep_open=keep_open, folder=folder)
        code, out, err = self._started(run, argv, timeout_seconds, environment)
        return Completed(code, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))

    def first_line(self, argv: Sequence[str], *, timeout_seconds: float) -> str:
        """
        The first line that a program which streams writes; then it is killed, with all that it has started.

        HostError Timeout, MissingTool, or NoData where it ended, or wrote megabytes, without one.
        """
        from checks.host.running import run_until_line

        out, err = self._started(run_until_line, argv, timeout_seconds)
        line, whole, _ = out.partition(b"\n")
        if not whole:
            words = err.decode("utf-8", "replace").strip().rpartition("\n")[2][:200]
            raise HostError("NoData", f"{argv[0]} wrote no line{': ' if words else ''}{words}")
        return line.decode("utf-8", "replace")

    def _started(
        self,
        run: Callable[..., T],
        argv: Sequence[str],
        timeout_seconds: float,
        changed: Callable[[Mapping[str, str]], Mapping[str, str]] | None = None,
    ) -> T:
        """Start a program by `run` in the environment of this machine; what goes wrong is a HostError."""
        from checks.host.running import TimeUpError

        program = self.find_program(argv[0])
        environment = {**os.environ, "LC_ALL": "C"}
        if self.root is not None:
            environment["PATH"] = self.path("/bin") + os.pathsep + environment.get("PATH", "")
            environment["HEALTHD_HOST_ROOT"] = str(self.root)
        try:
            return run(
                [program, *argv[1:]],
                environment=environment if changed is None else changed(environment),
                timeout_seconds=timeout_seconds,
                max_bytes=MAX_OUTPUT_BYTES,
            )
        except OSError as error:
            raise HostError("MissingTool", f"{program} cannot be started: {error.strerror or error}") from None
        except TimeUpError as error:
            rest = "" if error.killed else ", and cannot be killed"
            said = b"\n".join((error.out, error.err)).decode("utf-8", "replace")
            text = f"{argv[0]} did not end within {timeout_seconds:g} s{rest}"
            raise HostError("Timeout", text, said) from None
