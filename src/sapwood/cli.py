"""The command line: `sapwood COMMAND ...`. The only place that knows everybody, and it imports a command's room only
when that command is asked for: `sapwood --help` answers at once."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from . import __version__

# By name: the module whose `main` gets the arguments behind it, and what the command does.
COMMANDS = {
    "bench": ("sapwood.bench.command", "measure a model on this machine: latency, throughput, cache, step times"),
}
_INTERRUPTED = 130  # what a shell expects of a program that Ctrl-C has ended


def main(arguments: Sequence[str] | None = None) -> int:
    """The status to exit with: 0, 1 if something failed, 2 if something asked for was wrong."""
    parser = argparse.ArgumentParser(
        prog="sapwood",
        description="An LLM serving engine grown around one prefix tree.",
        epilog="\n".join(["commands:", *(f"  {name:9} {what}" for name, (_, what) in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sapwood {__version__}")
    parser.add_argument("command", choices=COMMANDS, help="one of those below; `sapwood COMMAND --help` says more")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    command = import_module(COMMANDS[asked.command][0])
    try:
        return int(command.main(asked.arguments))
    except KeyboardInterrupt:
        sys.stderr.write("\nsapwood: interrupted\n")
        return _INTERRUPTED
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] == "sapwood":
            raise
        sys.stderr.write(f"sapwood {asked.command}: needs {error.name}: pip install 'sapwood[engine]'\n")
        return 1
