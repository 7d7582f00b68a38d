"""JSON of the model, asked for by several threads at once: a hook has some, and a daemon has many."""

from __future__ import annotations

import subprocess
import sys

# Records that nobody has decoded before, by threads that come a moment apart.
PROGRAM = """
import dataclasses, sys, threading, time
from healthd.core import wire
sys.setswitchinterval(1e-6)
for _ in range(40):
    inner = dataclasses.make_dataclass("Inner", [(f"a{n}", int) for n in range(20)])
    middle = dataclasses.make_dataclass("Middle", [(f"b{n}", inner) for n in range(5)])
    outer = dataclasses.make_dataclass("Outer", [(f"c{n}", middle) for n in range(5)])
    one = inner(*range(20))
    body = wire.encode(outer(*[middle(*[one] * 5)] * 5))
    def decode(pause):
        time.sleep(pause)
        assert wire.decode(body, outer, what="record").c4.b4 == one
    threads = [threading.Thread(target=decode, args=(0.00005 * n,)) for n in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def test_threads_that_decode_the_same_records_first_at_once_do_not_crash() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
