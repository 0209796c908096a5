"""`fairgate completion`: completion of commands and options by the shell."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ops.cli.base import Command, answer

INSTALL = {
    "bash": 'add to ~/.bashrc: eval "$(fairgate completion bash)"',
    "zsh": 'add to ~/.zshrc, after compinit: eval "$(fairgate completion zsh)"',
    "fish": "run: fairgate completion fish > ~/.config/fish/completions/fairgate.fish",
}


@click.command(cls=Command)
@click.argument("shell", type=click.Choice(list(INSTALL)))
def completion(shell: str) -> None:
    """Prints a script that completes commands in bash, zsh or fish.

    \b
      fairgate completion bash       the first line says how to install it
    --json answers:
      {"install": "add to ~/.bashrc: …", "script": "…"}
    """
    kind = get_completion_class(shell)
    assert kind is not None
    script = kind(
        click.get_current_context().find_root().command, {}, "fairgate", "_FAIRGATE_COMPLETE"
    ).source()
    answer({"install": INSTALL[shell], "script": script}, f"# To install, {INSTALL[shell]}\n{script}")
