"""`tandem encoder --devices`: which process gets what, and what becomes of all when one ends."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from common import processes
from common.errors import ConfigError
from common.processes import Command
from common.settings import environment_of
from deploy.local import free_port
from encoder_svc import __main__ as encoder_main
from encoder_svc import devices
from encoder_svc.config import EncoderSettings
from encoder_svc.devices import DeviceProcesses, commands_of, device_names, settings_of_each
from tests.common.sockets import eventually


def settings(**own: Any) -> EncoderSettings:
    return EncoderSettings(**{"model": "m", "devices": ("cuda:0,cuda:1,cuda:2",), **own})


@pytest.mark.parametrize("given", [("a,b", "c"), ("a", "b", "c"), ("a,b,c,",)])
def test_devices_are_separated_by_commas_or_given_several_times(given: tuple[str, ...]) -> None:
    assert device_names(settings(devices=given)) == ["a", "b", "c"]


def test_each_process_has_a_device_and_ports_that_follow_from_the_first_ones() -> None:
    each = settings_of_each(settings(control_endpoint="tcp://[::1]:7101", data_endpoint="ipc:///run/e"))
    assert [own.device for own in each] == ["cuda:0", "cuda:1", "cuda:2"]
    assert [own.control_endpoint for own in each] == [f"tcp://[::1]:{port}" for port in (7101, 7111, 7121)]
    assert [own.data_endpoint for own in each] == ["ipc:///run/e", "ipc:///run/e-1", "ipc:///run/e-2"]
    assert [own.http_port for own in each] == [7100, 7110, 7120]
    assert {own.devices for own in each} == {()}


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"control_endpoint": "tcp://127.0.0.1:65530"}, "port 65540"),
        ({"data_endpoint": "tcp://127.0.0.1:0"}, "port 10"),
        ({"data_endpoint": "tcp://127.0.0.1:*"}, "no port to count up from"),
        ({"device": "cpu"}, "--device cpu"),
        ({"instance_id": "e"}, "--instance-id e"),
    ],
)
def test_what_cannot_be_several_processes_is_refused(own: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        settings_of_each(settings(**own))


def test_the_cores_are_shared_among_processes_on_cpu_and_left_alone_by_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert [c.cores for c in commands_of(settings(devices=("cpu,cpu",)))] == [{0, 1, 2, 3}, {4, 5, 6, 7}]
    assert [c.cores for c in commands_of(settings(devices=("cuda:0,cuda:1",)))] == [frozenset(), frozenset()]
    assert {own.preprocess_threads for own in settings_of_each(settings(devices=("cpu,cpu",)))} == {2}
    assert {own.preprocess_threads for own in settings_of_each(settings(preprocess_threads=5))} == {5}


def test_a_process_gets_its_settings_by_its_environment_and_a_name_of_its_own() -> None:
    given = settings(redis="redis://:secret@host", served_model_name="mine")
    for command, own in zip(commands_of(given), settings_of_each(given), strict=True):
        assert "secret" not in " ".join(command.arguments)
        assert command.environment == {**environment_of(own), "TANDEM_INSTANCE_ID": ""}
        assert command.environment["TANDEM_DEVICE"] == own.device
        assert command.environment["TANDEM_DEVICES"] == ""


def test_a_device_that_is_not_there_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(encoder_main, "configure_logs", lambda *args: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        encoder_main.app.meta(["--model", "m", "--devices", "cpu,cuda:77"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("tandem encoder: there is no device cuda:77")


# What follows runs small programs in place of encoders.

SERVE = "import signal; signal.pause()"


def running(monkeypatch: pytest.MonkeyPatch, *programs: str, http_port: int = 7100) -> DeviceProcesses:
    commands = [Command(f"encoder-{i}", [sys.executable, "-c", text], {}) for i, text in enumerate(programs)]
    monkeypatch.setattr(devices, "commands_of", lambda settings: commands)
    monkeypatch.setattr(processes, "RESTART_AFTER_S", 0.05)
    names = ",".join("cpu" for _ in programs)
    return DeviceProcesses(EncoderSettings(model="m", devices=(names,), http_port=http_port, drain_timeout_s=5))


@contextlib.asynccontextmanager
async def result_of(group: DeviceProcesses) -> AsyncIterator["asyncio.Task[int]"]:
    loop = asyncio.get_running_loop()
    task = asyncio.create_task(group.run())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def test_a_process_that_dies_is_started_anew_and_the_other_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    group = running(monkeypatch, SERVE, SERVE)
    async with result_of(group) as result:
        await eventually(lambda: all(child.pid for child in group._children), 30)
        first, second = group._children
        kept, killed = first.pid, second.pid
        assert killed is not None
        os.kill(killed, signal.SIGKILL)
        await eventually(lambda: second.pid not in (None, killed), 30)
        assert first.pid == kept
        assert not result.done()


async def test_wrong_settings_end_all_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    group = running(monkeypatch, SERVE, "raise SystemExit(2)")
    async with result_of(group) as result, asyncio.timeout(30):
        assert await result == 2
        assert [child.pid for child in group._children] == [None, None]


async def test_when_no_process_runs_any_more_the_command_ends_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    group = running(monkeypatch, "raise SystemExit(3)", "raise SystemExit(3)")
    monkeypatch.setattr(processes, "RESTART_AFTER_S", 60.0)
    async with result_of(group) as result, asyncio.timeout(30):
        assert await result == 1


async def test_a_process_that_hangs_is_killed_and_started_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "ASK_EVERY_S", 0.05)
    monkeypatch.setattr(devices, "HUNG_AFTER_S", 0.5)
    port = free_port()
    serve_once = (
        "import http.server, signal\n"
        "class Handler(http.server.BaseHTTPRequestHandler):\n"
        "    num = 0\n"
        "    def do_GET(self):\n"
        "        Handler.num += 1\n"
        "        self.send_response(200 if Handler.num == 1 else 503)\n"
        "        self.end_headers()\n"
        f"http.server.HTTPServer(('127.0.0.1', {port}), Handler).serve_forever()\n"
    )
    group = running(monkeypatch, serve_once, SERVE, http_port=port)
    async with result_of(group):
        await eventually(lambda: group._children[0].num_starts == 2, 30)
        assert group._children[1].num_starts == 1
