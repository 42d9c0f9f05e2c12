"""`sapwood completion bash|zsh|fish`: a script for that shell, made from the parsers of all commands. Sapwood itself
does not run when a user presses Tab."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

_HOW = """\
put it where your shell looks for it:
  bash  sapwood completion bash > ~/.local/share/bash-completion/completions/sapwood
  zsh   sapwood completion zsh > some folder of $fpath, as _sapwood
  fish  sapwood completion fish > ~/.config/fish/completions/sapwood.fish
"""


class Word(NamedTuple):
    """A command or an option to complete."""

    name: str
    help: str
    values: tuple[str, ...] = ()  # to choose from
    takes_value: bool = False


Tree = dict[str, list[Word]]  # by the words before, such as "", " serve" or " bench latency"


def main(arguments: Sequence[str], parsers: Mapping[str, argparse.ArgumentParser]) -> int:
    """`parsers` are those of the commands, by name, and of the program under ""."""
    asked = parser().parse_args(arguments)
    sys.stdout.write(SHELLS[asked.shell](tree_of(parsers)))
    return 0


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        prog="sapwood completion",
        description="Print a script that makes a shell complete commands and options.",
        epilog=_HOW,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("shell", choices=SHELLS)
    return made


def tree_of(parsers: Mapping[str, argparse.ArgumentParser]) -> Tree:
    found: Tree = {}
    for name, each in parsers.items():
        _add(found, f" {name}" if name else "", each)
    return found


def _add(found: Tree, path: str, parser: argparse.ArgumentParser) -> None:
    words = found[path] = []
    for action in parser._actions:
        choices = tuple(map(str, action.choices or ()))
        if action.help == argparse.SUPPRESS:
            continue
        if action.option_strings:
            help = _help_of(action, parser)
            takes = action.nargs != 0
            words += [Word(name, help, choices, takes) for name in action.option_strings]
        elif isinstance(action, argparse._SubParsersAction):
            helps = {each.dest: each.help or "" for each in action._choices_actions}
            words += [Word(name, helps.get(name, "")) for name in choices]
            for name, each in action.choices.items():
                _add(found, f"{path} {name}", each)
        else:
            words += [Word(name, "") for name in choices]


def _help_of(action: argparse.Action, parser: argparse.ArgumentParser) -> str:
    help = " ".join(parser._get_formatter()._expand_help(action).split()) if action.help else ""
    return help if len(help) <= 80 else help[:77] + "..."


# ---- the shells: each script finds the command that the words before the cursor belong to, then the words after it


def bash(tree: Tree) -> str:
    values, free = _options(tree)
    return f"""\
# bash completion of sapwood
_sapwood() {{
    local current=${{COMP_WORDS[COMP_CWORD]}} before=${{COMP_WORDS[COMP_CWORD-1]}} command="" words="" at
    for ((at = 1; at < COMP_CWORD; at++)); do
        case "$command ${{COMP_WORDS[at]}}" in
            {_any(tree)}) command="$command ${{COMP_WORDS[at]}}" ;;
        esac
    done
    case "$command" in
{_lines(f"        {_quoted(at)}) words={_quoted(_names(words))} ;;" for at, words in tree.items())}
    esac
    case "$command:$before" in
{_lines(f"        {_quoted(at)}) words={_quoted(' '.join(offered))} ;;" for at, offered in values.items())}
        {_any(free)}) words="" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$current"))
}}
complete -o default -F _sapwood sapwood
"""


def zsh(tree: Tree) -> str:
    values, free = _options(tree)
    described = {at: " ".join(_quoted(f"{word.name}:{word.help}") for word in words) for at, words in tree.items()}
    return f"""\
#compdef sapwood
_sapwood() {{
    local command="" at
    local -a offered
    for ((at = 2; at < CURRENT; at++)); do
        case "$command ${{words[at]}}" in
            ({_any(tree)}) command="$command ${{words[at]}}" ;;
        esac
    done
    case "$command:${{words[CURRENT-1]}}" in
{_lines(f"        ({_quoted(at)}) compadd -- {' '.join(offered)}; return ;;" for at, offered in values.items())}
        ({_any(free)}) _files; return ;;
    esac
    case "$command" in
{_lines(f"        ({_quoted(at)}) offered=({each}) ;;" for at, each in described.items())}
    esac
    _describe sapwood offered || _files
}}
if [[ $funcstack[1] == _sapwood ]]; then _sapwood "$@"; else compdef _sapwood sapwood; fi
"""


def fish(tree: Tree) -> str:
    return f"""\
# fish completion of sapwood
function __sapwood_at
    set -l command ""
    for word in (commandline -opc)[2..-1]
        switch "$command $word"
            case {" ".join(_quoted(at) for at in tree)}
                set command "$command $word"
        end
    end
    test "$command" = "$argv[1]"
end
{_lines(_fish_line(at, word) for at, words in tree.items() for word in words)}
"""


def _fish_line(at: str, word: Word) -> str:
    if not word.name.startswith("-"):
        flags = f"-f -a {word.name}"
    elif not word.name.startswith("--"):
        flags = f"-s {word.name[1:]}"
    elif word.values:
        flags = f"-l {word.name[2:]} -x -a {_quoted(' '.join(word.values))}"
    else:
        flags = f"-l {word.name[2:]}" + (" -r" if word.takes_value else "")
    help = word.help.replace("\\", "\\\\").replace("'", "\\'")
    return f"complete -c sapwood -n '__sapwood_at \"{at}\"' {flags} -d '{help}'"


def _options(tree: Tree) -> tuple[dict[str, tuple[str, ...]], list[str]]:
    """Options with values to choose from, and those that take another value, as "command:option"."""
    each = [(f"{at}:{word.name}", word) for at, words in tree.items() for word in words if word.takes_value]
    return {name: word.values for name, word in each if word.values}, [name for name, word in each if not word.values]


def _names(words: Sequence[Word]) -> str:
    return " ".join(word.name for word in words)


def _any(patterns: Iterable[str]) -> str:
    """A pattern of a shell's `case` for any of these."""
    return "|".join(map(_quoted, patterns)) or "''"


def _lines(lines: Iterable[str]) -> str:
    return "\n".join(lines)


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


SHELLS = {"bash": bash, "zsh": zsh, "fish": fish}
