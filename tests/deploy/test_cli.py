"""The `tandem` command itself: light to start, and every word of it has its help."""

import subprocess
import sys

import pytest

from deploy import cli
from tests.paths import REPOSITORY

COMMANDS = ["up", "ask", "gateway", "encoder", "decoder", "autoscaler", "fetch"]


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    cli.app(["--help"], exit_on_error=False, result_action="return_value")
    shown = capsys.readouterr().out
    assert all(f" {command} " in shown for command in COMMANDS)


@pytest.mark.parametrize("command", ["up", "ask", "gateway", "autoscaler"])
def test_each_command_has_its_own_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.app([command, "--help"])
    assert not caught.value.code
    shown = capsys.readouterr().out
    assert "--config" in shown
    assert shown.count("--") > 5


def test_asking_loads_neither_torch_nor_a_service() -> None:
    program = (
        "import sys; from deploy import cli, ask; "
        "bad = {'torch', 'transformers', 'encoder_svc', 'decoder_svc', 'gateway_svc'} & set(sys.modules); "
        "sys.exit(f'loaded {bad}' if bad else 0)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)


def test_a_service_that_is_told_to_stop_while_it_imports_ends_with_0() -> None:
    """The first process of a container would not even get the signal without a handler of its own."""
    program = (
        "import os, signal, sys, threading\n"
        "from deploy import cli\n"
        "cli._run = lambda module, tokens: (os.kill(os.getpid(), signal.SIGTERM), threading.Event().wait(30))\n"
        "sys.argv = ['tandem', 'encoder']\n"
        "cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, timeout=60, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")
