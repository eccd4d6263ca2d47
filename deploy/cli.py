"""The `tandem` command: one word for each thing to run. A command's module is imported only when it is asked for."""

import importlib
import signal
import sys
from types import FrameType
from typing import Annotated, NoReturn

import cyclopts
from cyclopts import Parameter

from common import __version__

app = cyclopts.App(
    name="tandem",
    help="Serve Qwen3-VL in two halves: encoders for pictures, decoders for text, and a gateway that speaks OpenAI.",
    version=__version__,
)

SERVICES = ("gateway", "encoder", "decoder", "autoscaler")
Tokens = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


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


@app.command(help_flags=[], version_flags=[])
def fetch(*tokens: Tokens) -> None:
    """Download what one role needs of a model on the hub, and check it."""
    _run("deploy.fetch", tokens)


@app.command(help_flags=[], version_flags=[])
def autoscaler(*tokens: Tokens) -> None:
    """Scale encoders and decoders on Kubernetes by what gateways count."""
    _run("deploy.autoscaler.__main__", tokens)


def main() -> None:
    """Entry point of the `tandem` script.

    The first process of a container gets no signal that it has no handler for, and a service's imports take seconds: a
    SIGTERM meanwhile ends it, since there is nothing to finish.
    """
    if sys.argv[1:2] and sys.argv[1] in SERVICES:
        signal.signal(signal.SIGTERM, _end)
    app(sys.argv[1:])


if __name__ == "__main__":
    main()
