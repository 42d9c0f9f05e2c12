"""`python -m tests.engine.victim LAYOUT URI LIFE`: backs up one prompt after the other until it is killed."""

from __future__ import annotations

import sys

from .machine import PAGE, Machine, toks


def main(layout: str, uri: str, life: int) -> None:
    machine = Machine(layout, uri, pages=100, host=100)
    machine.serve("first", toks(1000 * life, 8 * PAGE + 1), 1)
    sys.stdout.write("backing up\n")
    sys.stdout.flush()
    n = 0
    while True:
        n += 1
        machine.serve(f"r{n}", toks(1000 * life + n % 500, 8 * PAGE + 1), 1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
