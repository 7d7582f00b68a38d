"""The `healthd` command, and `python -m healthd`."""

from __future__ import annotations

import gc
import sys

from healthd.runner.workers.launch import end_ahead, start_ahead

GARBAGE_THRESHOLD = 10_000


def main() -> None:
    """
    Run the command line.

    A check needs the node's worker whatever its settings are, and most need torch; started before the rest of healthd
    is imported, they import meanwhile.
    """
    if sys.argv[1:2] == ["check"] and None not in (sys.stdin, sys.stdout, sys.stderr):
        start_ahead(sys.argv[2:])
    try:
        usual = gc.get_threshold()
        # What is imported stays: it would be looked through a hundred times, a tenth of the start.
        gc.set_threshold(GARBAGE_THRESHOLD)
        from healthd.cli import main as run

        gc.set_threshold(*usual)
        run()
    except KeyboardInterrupt:  # before the command line, which tells it otherwise, was there
        if sys.stderr is not None:
            sys.stderr.write("\nhealthd: stopped\n")
        sys.exit(130)
    finally:
        end_ahead()


if __name__ == "__main__":
    main()
