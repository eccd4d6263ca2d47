"""The `tandem` command: one word for each thing to run. A command's module is imported only when it is asked for."""

import importlib
import sys
from typing import Annotated

import cyclopts
from cyclopts import Parameter

from common import __version__

app = cyclopts.App(
    name="tandem",
    help="Serve Qwen3-VL in two halves: encoders for pictures, decoders for text, and a gateway that speaks OpenAI.",
    version=__version__,
)

Tokens = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]


def _run(module: str, tokens: tuple[str, ...]) -> None:
    importlib.import_module(module).app.meta(tokens)


@app.command(help_flags=[], version_flags=[])
def up(*tokens: Tokens) -> None:
    """Serve a model on this machine, with all its processes, until Ctrl-C."""
    _run("deploy.local", tokens)


@app.command(help_flags=[], version_flags=[])
def ask(*tokens: Tokens) -> None:
    """Ask a running server about pictures and videos; the answer streams to the terminal."""
    _run("deploy.ask", tokens)


@app.command(help_flags=[], version_flags=[])
def gateway(*tokens: Tokens) -> None:
    """Run a gateway: the OpenAI API in front of encoders and decoders."""
    _run("gateway_svc.__main__", tokens)


@app.command(help_flags=[], version_flags=[])
def encoder(*tokens: Tokens) -> None:
    """Run an encoder: the vision tower and its DeepStack mergers."""
    _run("encoder_svc.__main__", tokens)


@app.command(help_flags=[], version_flags=[])
def decoder(*tokens: Tokens) -> None:
    """Run a decoder: the language model."""
    _run("decoder_svc.__main__", tokens)


def main() -> None:
    """Entry point of the `tandem` script."""
    app(sys.argv[1:])


if __name__ == "__main__":
    main()
