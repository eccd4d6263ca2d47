"""Settings: one precedence for every service, help that names every option, and errors that a person can read."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import pytest
from cyclopts import Parameter

from common.errors import CheckpointError, ConfigError
from common.settings import command_line, environment_of
from decoder_svc.config import DecoderSettings
from deploy.local import UpSettings
from encoder_svc.config import EncoderSettings
from gateway_svc.config import GatewaySettings

SETTINGS: dict[str, type[Any]] = {
    "encoder": EncoderSettings,
    "decoder": DecoderSettings,
    "gateway": GatewaySettings,
    "up": UpSettings,
}
every_command = pytest.mark.parametrize("name", list(SETTINGS))


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No setting of the machine that runs the tests, and no settings file."""
    for name in ("TANDEM_CONFIG", "TANDEM_MODEL", "TANDEM_REDIS", "REDIS_URL", "TANDEM_LOG_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)


def app_of(name: str, found: list[Any]) -> Any:
    """The command of a service, which only keeps the settings that it gets."""

    def run(settings: Any) -> None:
        """Run."""
        found.append(settings)

    run.__annotations__ = {"settings": Annotated[SETTINGS[name], Parameter(name="*")], "return": None}
    if name == "up":
        run.__defaults__ = (UpSettings(),)
    return command_line(name, run)


def parse(name: str, arguments: list[str]) -> Any:
    """The settings that a command gets."""
    found: list[Any] = []
    call(app_of(name, found), arguments)
    return found[0]


def call(app: Any, arguments: list[str]) -> None:
    try:
        app.meta(arguments)
    except SystemExit as exc:
        if exc.code:
            raise


@every_command
def test_flags_beat_the_environment_which_beats_the_file_which_beats_the_default(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def level(*flags: str) -> str:
        return str(parse(name, ["--model", "m", *flags]).log_level)

    assert level() == "info"
    Path("tandem.toml").write_text('log_level = "warning"')
    assert level() == "warning"
    other = tmp_path / "other.toml"
    other.write_text('log_level = "error"\nof_another_service = 1')
    monkeypatch.setenv("TANDEM_CONFIG", str(other))
    assert level() == "error"
    assert level("--config", "tandem.toml") == "warning"
    monkeypatch.setenv("TANDEM_LOG_LEVEL", "debug")
    assert level() == "debug"
    assert level("--log-level", "info") == "info"


@every_command
def test_a_command_s_own_table_of_the_file_beats_what_stands_above_all_tables(name: str) -> None:
    others = "".join(f'[{other}]\nlog_level = "error"\n' for other in SETTINGS if other != name)
    Path("tandem.toml").write_text(
        f'log_level = "debug"\nredis = "redis://file"\n[{name}]\nlog_level = "warning"\n{others}'
    )
    settings = parse(name, ["--model", "m"])
    assert (settings.log_level, settings.redis) == ("warning", "redis://file")
    Path("tandem.toml").write_text(f'log_level = "debug"\n{others}')
    assert parse(name, ["--model", "m"]).log_level == "debug"


@every_command
def test_redis_url_is_understood(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse(name, ["--model", "m"]).redis is None
    monkeypatch.setenv("REDIS_URL", "redis://common")
    assert parse(name, ["--model", "m"]).redis == "redis://common"
    monkeypatch.setenv("TANDEM_REDIS", "redis://ours")
    assert parse(name, ["--model", "m"]).redis == "redis://ours"
    assert parse(name, ["--model", "m", "--redis", "redis://flag"]).redis == "redis://flag"


@every_command
def test_every_setting_is_in_the_help_with_words_that_explain_it(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    call(app_of(name, []), ["--help"])
    options = " ".join(capsys.readouterr().out.partition("Parameters")[2].replace("│", " ").split())
    for field in dataclasses.fields(SETTINGS[name]):
        flag = "--" + field.name.replace("_", "-")
        assert f" {flag} " in options
        explanation = options.split(f" {flag} ", 1)[1].split("[env var", 1)[0]
        assert sum(word.strip(",.:;()").islower() for word in explanation.split()) >= 1, flag
        assert f"TANDEM_{field.name.upper()}" in options


def test_lists_are_given_by_repeating_and_mappings_by_name() -> None:
    gateway = parse(
        "gateway",
        [
            "--model",
            "m",
            "--encoders",
            "a,b",
            "--encoders",
            "c,d",
            "--decoders",
            "e",
            "--limit-mm-per-prompt.image",
            "4",
        ],
    )
    assert gateway.encoders == ("a,b", "c,d")
    assert gateway.decoders == ("e",)
    assert gateway.limit_mm_per_prompt == {"image": 4}


@pytest.mark.parametrize("name", ["encoder", "decoder"])
def test_settings_go_to_another_process_by_its_environment(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("tandem.toml").write_text('log_level = "error"\nhttp_host = "::1"')
    given = parse(name, ["--model", "m", "--http-port", "7777", "--allow-insecure-bind", "--redis", "redis://:s@h"])
    if name == "decoder":
        given = dataclasses.replace(given, encoders=("tcp://a:1,tcp://a:2", "tcp://b:1,tcp://b:2"))
    for variable, value in environment_of(given).items():
        monkeypatch.setenv(variable, value)
    Path("tandem.toml").write_text('log_level = "debug"\nhttp_port = 1')
    assert parse(name, []) == given


def test_a_mapping_fits_no_variable() -> None:
    with pytest.raises(TypeError, match="limit_mm_per_prompt"):
        environment_of(GatewaySettings(model="m", limit_mm_per_prompt={"image": 2}))


@pytest.mark.parametrize(
    ("model", "served", "name"),
    [("/models/Qwen3-VL/", None, "Qwen3-VL"), ("Qwen/Qwen3-VL-2B", None, "Qwen3-VL-2B"), ("m", "mine", "mine")],
)
def test_the_model_s_name_is_the_last_part_of_its_path(model: str, served: str | None, name: str) -> None:
    assert EncoderSettings(model=model, served_model_name=served).model_name == name


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--model", "m", "--http-port", "abc"], "abc"),
        (["--model", "m", "--no-such-option", "1"], "no-such-option"),
        (["--model", "m", "--log-level", "loud"], "loud"),
        ([], "model"),
    ],
)
def test_a_value_that_is_none_is_named_without_a_traceback(
    arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse("encoder", arguments)
    assert caught.value.code
    output = capsys.readouterr()
    assert reason in output.out + output.err
    assert "Traceback" not in output.out + output.err


@pytest.mark.parametrize("content", [None, "a = [", "\xff\xfe"])
def test_a_settings_file_that_cannot_be_read_is_one_line(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.toml"
    if content is not None:
        path.write_bytes(content.encode("latin-1"))
    for arguments in (["--config", str(path)], []):
        with pytest.raises(SystemExit) as caught:
            parse("encoder", ["--model", "m", *arguments])
        assert caught.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith(f"tandem encoder: the settings file {path} cannot be read")
        assert error.count("\n") <= 2
        monkeypatch.setenv("TANDEM_CONFIG", str(path))


def failing(error: Exception) -> Callable[[], None]:
    def run() -> None:
        """Run."""
        raise error

    return run


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("the port is taken"),
        CheckpointError("the port is taken"),
        ExceptionGroup("tasks", [ConfigError("the port is taken")]),
        ExceptionGroup("tasks", [ExceptionGroup("inner", [ConfigError("the port is taken")])]),
    ],
)
def test_a_mendable_error_is_one_line_and_exit_code_2(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        command_line("encoder", failing(error)).meta([])
    assert caught.value.code == 2
    assert capsys.readouterr().err == "tandem encoder: the port is taken\n"


def test_a_bug_is_not_hidden() -> None:
    with pytest.raises(ExceptionGroup, match="tasks"):
        command_line("encoder", failing(ExceptionGroup("tasks", [KeyError("bug")]))).meta([])
