"""Messages: one clear line for a failure, a line with its duration for each step."""

from __future__ import annotations

import contextlib
import errno
import signal
import sys
import time
from collections.abc import Callable, Iterator


class UserError(Exception):
    """What was expected, what was found and what to do, in one line."""


class Steps:
    """Prints steps as they run and remembers them for the closing table."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, float]] = []

    @contextlib.contextmanager
    def step(self, name: str) -> Iterator[Callable[[str], None]]:
        """Time a block. The function it gives takes a few words on the outcome."""
        print(f"-> {name} ...", flush=True)
        outcome = "done"

        def tell(text: str) -> None:
            nonlocal outcome
            outcome = text

        start = time.monotonic()
        yield tell
        seconds = time.monotonic() - start
        self.rows.append((name, outcome, seconds))
        print(f"   {outcome} ({seconds:.1f} s)", flush=True)

    def table(self) -> str:
        width = max(len(row[0]) for row in self.rows)
        total = sum(row[2] for row in self.rows)
        lines = [f"{n:<{width}}  {s:>6.1f} s  {o}" for n, o, s in self.rows]
        return "\n".join([*lines, f"{'total':<{width}}  {total:>6.1f} s"])


def run_main(main: Callable[[list[str]], int]) -> None:
    """Run a command line entry point and exit with its status."""
    # So that what was being made aside is removed when the process is told to end.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        status = main(sys.argv[1:])
    except UserError as e:
        print(f"error: {e}", file=sys.stderr)
        status = 1
    except OSError as e:
        where = f" at {e.filename}" if e.filename else ""
        if e.errno == errno.ENOSPC:
            said = f"expected free disk space, found none{where}; free some"
        else:
            said = f"expected to read and write files, found: {e.strerror}{where}; mend that"
        print(f"error: {said} and run again", file=sys.stderr)
        status = 1
    except KeyboardInterrupt:
        print("error: interrupted; run the same command again", file=sys.stderr)
        status = 130
    sys.exit(status)
