"""The `tandem` command itself: light to start, and every word of it has its help."""

import subprocess
import sys

import pytest

from deploy import cli
from tests.paths import REPOSITORY

COMMANDS = ["up", "ask", "gateway", "encoder", "decoder"]


def test_the_overview_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    cli.app(["--help"], exit_on_error=False, result_action="return_value")
    shown = capsys.readouterr().out
    assert all(f" {command} " in shown for command in COMMANDS)


@pytest.mark.parametrize("command", ["up", "ask", "gateway"])
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
