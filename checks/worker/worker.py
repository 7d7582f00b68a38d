"""
The program of a worker process, in which checks run. The runner starts it, never a user.

    PYTHON -I /path/to/checks/worker/worker.py RESULT_DESCRIPTOR PARENT_PID
    PYTHON -I /path/to/checks/worker/worker.py fork SOCKET_DESCRIPTOR PARENT_PID

The second form is no worker: it forks workers (see `checks.worker.fork_server`).

Commands arrive as JSON lines on standard input, results leave as bounded JSON lines on the descriptor (see
`checks.worker.protocol`). This file is run by its path and loads the `checks` package that it is in by path, so that
neither site-packages nor PYTHONPATH can replace that package by another one of its name.
"""

from __future__ import annotations

import os
import sys

# Before anything else is imported: what a library prints must neither mix with the results nor get lost.
if __name__ == "__main__":
    os.dup2(2, 1)

from collections.abc import Sequence
from contextlib import suppress

# On an idle machine it costs nothing; against one other busy process a worker keeps a quarter of a core.
NICE = 5


def load_own_checks() -> None:
    """Import the package that this file is in as `checks`, whatever else has that name."""
    from importlib.util import module_from_spec, spec_from_file_location

    folder = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    spec = spec_from_file_location("checks", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the checks in {folder}")
    package = module_from_spec(spec)
    sys.modules["checks"] = package
    spec.loader.exec_module(package)


class Modesty:
    """Lets all other processes go first: the daemon that must answer, and a job that was not seen."""

    def __init__(self) -> None:
        self._nice = os.nice(0)
        self._oom_score = ""
        with suppress(OSError), open("/proc/self/oom_score_adj") as file:
            self._oom_score = file.read()

    def begin(self) -> None:
        """Be modest."""
        import resource

        # One byte is less than any core dump, and unlike zero it also keeps a dump from being piped to a program, which
        # can take minutes for a process with a model's memory.
        hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
        resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))
        os.setpriority(os.PRIO_PROCESS, 0, min(self._nice + NICE, 19))
        # For processes in sessions of their own only the value of the group counts.
        with suppress(OSError), open("/proc/self/autogroup", "w") as file:
            file.write(str(NICE))
        # When memory runs out, the kernel kills a probe before it kills a job.
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")

    def end(self) -> None:
        """Be as before, as far as this user may: a guard must end what it guards."""
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, 0, self._nice)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write(self._oom_score)


def main(arguments: Sequence[str]) -> None:
    """Serve the runner that started this process."""
    output, parent = arguments[-2:]
    load_own_checks()
    from checks.host.guard import stand_guard

    modesty = Modesty()
    if arguments[0] == "fork":
        from checks.worker.fork_server import serve

        modesty.begin()
        results = serve(int(output), int(parent))  # from here on this is one of the workers
        modesty.end()
    else:
        results = int(output)
    stand_guard(int(parent))  # from here on this is the child of a guard, which kills everything that it starts
    # What a check starts must neither hold the pipe of the results nor read the commands.
    os.set_inheritable(results, False)
    commands = os.dup(0)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    import faulthandler

    from checks.worker.commands import Worker

    modesty.begin()
    faulthandler.enable()  # the last output of a crash says where it was
    with os.fdopen(commands, "rb") as lines:
        Worker(results).serve(lines)
    # The work is done, whatever threads or exit handlers a library has left behind.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
