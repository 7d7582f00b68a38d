"""Which files of healthd and checks a piece of work enters, by the interpreter's profiler; needs nothing but Python."""

from __future__ import annotations

import os
import runpy
import sys
import threading
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
ROOMS = (f"{ROOT}/healthd/", f"{ROOT}/checks/")


class Entered:
    """
    While the file `folder/on` exists, writes the path of each file whose functions are called to `folder/entered`.

    What runs while a module is imported is not counted; everything else is. Threads are seen that start after
    `install`. Code without a file, such as the methods that dataclasses make, is seen where it calls some that has one.
    """

    def __init__(self, folder: Path) -> None:
        self.switch, self.record = folder / "on", folder / "entered"
        self._seen: set[str] = set()

    def install(self) -> None:
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def remove(self) -> None:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event != "call" or name in self._seen or not name.startswith(ROOMS):
            return
        if not os.path.exists(self.switch) or _is_imported(frame):
            return
        self._seen.add(name)
        descriptor = os.open(self.record, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        os.write(descriptor, f"{os.path.relpath(name, ROOT)}\n".encode())
        os.close(descriptor)

    def files(self) -> list[str]:
        """The files by the moment of their first call, in all processes."""
        return list(dict.fromkeys(self.record.read_text().splitlines()))


def _is_imported(frame: FrameType) -> bool:
    above: FrameType | None = frame
    while above is not None:
        if above.f_code.co_filename.startswith("<frozen importlib"):
            return True
        above = above.f_back
    return False


def interpreter(folder: Path) -> Path:
    """A Python that runs a program as the real one does, and records what it enters in `folder`."""
    made = folder / "python"
    made.write_text(f"""#!{sys.executable} -IS
import runpy
runpy.run_path({str(Path(__file__).resolve())!r})["run_program"]({str(folder)!r})
""")
    made.chmod(0o755)
    return made


def run_program(folder: str) -> None:
    """Run the first argument that is no option, as its interpreter would."""
    sys.argv = sys.argv[next(number for number, word in enumerate(sys.argv) if number and not word.startswith("-")) :]
    Entered(Path(folder)).install()
    runpy.run_path(sys.argv[0], run_name="__main__")
