"""The command line: `sapwood COMMAND ...`. It may know every package, and imports that of a command only when the
command is called: `sapwood --help` answers at once."""

from __future__ import annotations

import os
import signal
import sys

from . import __version__

TYPE_CHECKING = False  # as typing has it; nothing is imported here before Ctrl-C is taken care of
if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence
    from typing import NoReturn

# By name: the module whose `main` gets the arguments behind it, and what the command does. Its `parser` tells shells
# what there is to complete.
COMMANDS = {
    "serve": ("sapwood.server.command", "serve a model over HTTP, as OpenAI's API"),
    "chat": ("sapwood.commands.chat", "talk to a running server in the terminal"),
    "bench": ("sapwood.bench.command", "measure a model on this machine, or a server: latency, throughput, cache"),
    "completion": ("sapwood.commands.completion", "print what makes a shell complete these commands"),
}
_INTERRUPTED = 130  # what a shell expects of a program that Ctrl-C has ended
_OF_THE_ENGINE = {"accelerate", "jinja2", "safetensors", "tokenizers", "torch", "tqdm", "transformers"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The status to exit with: 0, 1 if something failed, 2 if something asked for was wrong.

    As a program, Ctrl-C ends it at once while it imports and loads: inside an import it might become any error. A
    command with work to lose sets a handler of its own."""
    if arguments is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, leave)
    try:
        return _main(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:
        sys.stderr.write("\nsapwood: interrupted\n")
        return _INTERRUPTED


def leave(*_: object) -> NoReturn:
    """The handler of Ctrl-C until a command sets its own."""
    os.write(2, b"\nsapwood: interrupted\n")
    os._exit(_INTERRUPTED)


def _main(arguments: Sequence[str]) -> int:
    from importlib import import_module

    if not arguments:
        parser().print_help()
        return 0
    asked = parser().parse_args(arguments)
    try:
        command = import_module(COMMANDS[asked.command][0])
        if asked.command == "completion":
            return int(command.main(asked.arguments, parsers()))
        return int(command.main(asked.arguments))
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package == "sapwood":
            raise
        extra = "engine" if package in _OF_THE_ENGINE else "server"
        sys.stderr.write(f"sapwood {asked.command}: needs {error.name}: pip install 'sapwood[{extra}]'\n")
        return 1


def parser() -> argparse.ArgumentParser:
    import argparse

    parser = argparse.ArgumentParser(
        prog="sapwood",
        description="An LLM serving engine grown around one prefix tree.",
        epilog="\n".join(["commands:", *(f"  {name:11} {what}" for name, (_, what) in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"sapwood {__version__}")
    parser.add_argument("command", choices=COMMANDS, help="one of those below; `sapwood COMMAND --help` says more")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    return parser


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command, and of `sapwood` itself under "". A command whose packages are missing has none."""
    from contextlib import suppress
    from importlib import import_module

    found = {"": parser()}
    for name, (module, _) in COMMANDS.items():
        with suppress(ModuleNotFoundError):
            found[name] = import_module(module).parser()
    return found
