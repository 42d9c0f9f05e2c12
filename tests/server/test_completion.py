"""`sapwood completion`: shells complete commands and options, from what the parsers have."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys

import pytest

from sapwood import cli
from sapwood.commands import completion


def parsers() -> dict[str, argparse.ArgumentParser]:
    """Those of all commands, and one whose help has in it what shells take for their own."""
    odd = argparse.ArgumentParser()
    odd.add_argument("--odd", help='it\'s 100%% "free" $HOME `x`')
    return {**cli.parsers(), "odd": odd}


def offers(line: str) -> list[str]:
    """What bash offers behind a line."""
    words = line.split(" ")
    asked = " ".join(f"'{word}'" for word in words)
    script = completion.bash(completion.tree_of(parsers()))
    code = (
        f"{script}\nCOMP_WORDS=({asked})\nCOMP_CWORD={len(words) - 1}\n_sapwood\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    assert not done.stderr
    return done.stdout.split()


def test_bash_takes_the_script():
    """It is valid, and it tells bash about `sapwood`.

    Mutation: `bash` leaves the last line out; `_any` puts spaces between its patterns.
    """
    script = completion.bash(completion.tree_of(parsers()))
    done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    done = subprocess.run(["bash", "-c", f"{script}\ncomplete -p sapwood"], capture_output=True, text=True, check=True)
    assert done.stdout == "complete -o default -F _sapwood sapwood\n"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("sapwood ser", ["serve"]),
        ("sapwood ", ["-h", "--help", "--version", *cli.COMMANDS]),
        ("sapwood serve --max-mo", ["--max-model-len"]),
        ("sapwood chat --sy", ["--system"]),
        ("sapwood bench la", ["latency"]),
        ("sapwood bench serve --random-in", ["--random-input-len"]),
        ("sapwood bench latency --batch", ["--batch-size"]),
        ("sapwood bench serve --dataset-name sh", ["shared-prefix"]),
        ("sapwood bench serve --base-url ", []),
        ("sapwood completion f", ["fish"]),
        ("sapwood chat --model serve --tem", ["--temperature"]),
        ("sapwood nonsense --max-mo", []),
    ],
)
def test_bash_completes(line, offered):
    """Commands, options of the command that the words before are in, and values to choose from; where anything may
    come, bash has its own way.

    Mutation: `_add` does not go into subcommands; `_options` has no values.
    """
    assert offers(line) == offered


def test_options_that_are_hidden_are_not_offered():
    """Those that a command refuses by name.

    Mutation: `_add` does not look for SUPPRESS.
    """
    assert "--tensor-parallel-size" not in offers("sapwood bench latency --t")
    assert offers("sapwood bench latency --tok") == ["--tokenizer"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells(shell, capsys):
    """Every option of every command is in the script, and the shell reads it, where there is one.

    Mutation: `_fish_line` or `_quoted` leaves quotes as they are; `zsh` leaves options out.
    """
    tree = completion.tree_of(parsers())
    script = completion.SHELLS[shell](tree)
    assert {"zsh": "it'\\''s 100% ", "fish": "it\\'s 100% "}[shell] in script
    for words in tree.values():
        for word in words:
            assert word.name.lstrip("-") in script
    if shutil.which(shell):
        done = subprocess.run([shell, "-n", "/dev/stdin"], input=script, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
    if shell == "fish" and shutil.which(shell):
        asks = f"{script}\ncomplete -C 'sapwood ser'; complete -C 'sapwood bench serve --dataset-name sh'"
        done = subprocess.run([shell], input=asks, capture_output=True, text=True, check=True)
        assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["serve", "shared-prefix"]
    assert cli.main(["completion", shell]) == 0
    assert "sapwood" in capsys.readouterr().out


def test_what_it_completes_needs_no_torch():
    """A script is made without the packages that a model needs.

    Mutation: the `parser` of a command imports the engine.
    """
    code = "import sys; from sapwood.cli import parsers; parsers(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
