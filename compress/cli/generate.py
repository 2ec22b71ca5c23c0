"""`compress generate`: the answer of a model to a prompt."""

from __future__ import annotations

import sys
from typing import Any

import click

from compress.cli.options import DEVICE, DTYPE
from compress.cli.show import echo


@click.command()
@click.argument("model")
@click.argument("prompt", required=False)
@click.option("--tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Most tokens to generate.")
@click.option("--plain", is_flag=True, help="Continue the prompt as it is, without the model's chat template.")
@click.option("--temperature", type=click.FloatRange(min=0), help="Temperature of sampling; 0: the most likely token.")
@click.option("--top-p", type=click.FloatRange(0, 1, min_open=True), help="Sample among tokens of this probability.")
@click.option("--top-k", type=click.IntRange(min=1), help="Sample among so many of the most likely tokens.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of sampling.")
@click.option("--stream/--no-stream", default=None, help="Print words as they come.  [default: on a terminal]")
@DTYPE
@DEVICE
@click.option("--activations", type=click.Choice(["int8"]), help="Round the inputs of layers of integer codes: faster.")
def generate(
    model: str,
    prompt: str | None,
    stream: bool | None,
    dtype: str,
    device: str,
    activations: str | None,
    **options: Any,
) -> None:
    """Print the answer of MODEL, a compressed checkpoint or any other model, to PROMPT.

    Without PROMPT, or for -, the prompt is read from standard input. Decoding is greedy unless an option of sampling is
    given.
    """
    from compress.pipeline.generate import Answering, generate_text
    from compress.pipeline.progress import Waiting

    streams, text = sys.stdout.isatty() if stream is None else stream, _prompt(prompt)
    with Waiting(f"opening {model}, and reading the prompt") as waiting:

        def show(part: str) -> None:
            waiting.end()
            echo(part, nl=False)

        receive = show if streams else None
        answer = generate_text(model, text, Answering(**options), dtype, device, activations, receive)
    echo("" if streams else answer)


def _prompt(prompt: str | None) -> str:
    """Return a prompt, or that on standard input."""
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise click.UsageError("write a PROMPT, or pipe it into standard input")
    data: bytes = sys.stdin.buffer.read()
    return data.decode("utf-8", "surrogateescape").removesuffix("\n")
