"""`compress completion`: the script by which a shell completes commands, options and names after TAB."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

SHELLS = "bash", "zsh", "fish"
VARIABLE = "_COMPRESS_COMPLETE"
"""The variable by which the script asks for completions, as click names it after the program."""


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script of SHELL.

    bash: add `eval "$(compress completion bash)"` to ~/.bashrc; zsh: the same with zsh, in ~/.zshrc; fish: write it to
    ~/.config/fish/completions/compress.fish.
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(context.find_root().command, {}, "compress", VARIABLE).source())
