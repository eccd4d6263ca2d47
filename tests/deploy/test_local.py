"""The plan of `tandem up`: which processes, at which addresses, on which cores, with which settings."""

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from rich.console import Console

from common.errors import ConfigError
from common.processes import Command
from deploy import local
from deploy.local import DEMO_MODEL, LocalStack, Plan, UpSettings, check_port, free_port, plan


def planned(tmp_path: Path, **settings: Any) -> Plan:
    return plan(UpSettings(model="/m/tiny", port=free_port(), **settings), tmp_path, tmp_path)


def values(command: Command, flag: str) -> list[str]:
    """What a flag is given, in order."""
    words = list(command.arguments)
    return [words[index + 1] for index, word in enumerate(words) if word == flag]


def by_name(found: Plan) -> dict[str, Command]:
    return {command.name: command for command in found.services}


def test_one_of_each_by_default_and_a_cache(tmp_path: Path) -> None:
    found = planned(tmp_path)
    assert list(by_name(found)) == ["encoder-0", "decoder-0", "gateway-0"]
    assert found.cache is not None
    assert list(found.ready_urls) == ["encoder-0", "decoder-0", "gateway-0"]


def test_everyone_is_told_of_everyone_that_it_talks_to(tmp_path: Path) -> None:
    found = planned(tmp_path, encoders=2, decoders=3, gateways=2)
    commands = by_name(found)
    assert len(commands) == 7
    encoders = [
        (*values(commands[f"encoder-{i}"], "--control-endpoint"), *values(commands[f"encoder-{i}"], "--data-endpoint"))
        for i in range(2)
    ]
    decoders = [values(commands[f"decoder-{i}"], "--control-endpoint")[0] for i in range(3)]
    assert len({address for pair in encoders for address in pair} | set(decoders)) == 7
    for i in range(3):
        assert values(commands[f"decoder-{i}"], "--encoders") == [",".join(pair) for pair in encoders]
    for i in range(2):
        assert values(commands[f"gateway-{i}"], "--encoders") == [",".join(pair) for pair in encoders]
        assert values(commands[f"gateway-{i}"], "--decoders") == decoders
    assert len(set(found.ready_urls.values())) == 7


def test_all_services_share_the_model_its_name_and_the_cache(tmp_path: Path) -> None:
    found = planned(tmp_path, dtype="bfloat16", device="cpu", max_model_len=99, limit_mm_per_prompt={"image": 2})
    commands = by_name(found)
    for command in commands.values():
        assert command.environment["TANDEM_MODEL"] == "/m/tiny"
        assert command.environment["TANDEM_SERVED_MODEL_NAME"] == "tiny"
        assert command.environment["TANDEM_REDIS"].startswith("unix://")
    for name in ("encoder-0", "decoder-0"):
        assert values(commands[name], "--dtype") == ["bfloat16"]
        assert values(commands[name], "--device") == ["cpu"]
    assert values(commands["decoder-0"], "--max-model-len") == ["99"]
    assert values(commands["gateway-0"], "--limit-mm-per-prompt.image") == ["2"]


def test_a_redis_that_is_given_is_used_and_none_is_started(tmp_path: Path) -> None:
    found = planned(tmp_path, redis="redis://elsewhere")
    assert found.cache is None
    assert {command.environment["TANDEM_REDIS"] for command in found.services} == {"redis://elsewhere"}


def test_compute_processes_get_cores_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    commands = by_name(planned(tmp_path, encoders=1, decoders=1))
    assert (commands["encoder-0"].cores, commands["decoder-0"].cores) == ({0, 1}, {2, 3})
    assert commands["gateway-0"].cores == frozenset()


def test_gateways_take_the_ports_that_follow(tmp_path: Path) -> None:
    port = consecutive_ports()
    found = plan(UpSettings(model="m", port=port, gateways=2), tmp_path, tmp_path)
    assert found.urls == [f"http://127.0.0.1:{port}", f"http://127.0.0.1:{port + 1}"]
    assert found.ready_urls["gateway-1"] == f"http://127.0.0.1:{port + 1}/ready"


def consecutive_ports() -> int:
    for _ in range(50):
        port = free_port()
        try:
            check_port("127.0.0.1", port + 1)
        except ConfigError:
            continue
        return port
    raise AssertionError("no two free ports in a row")


@pytest.mark.parametrize(
    ("host", "url"), [("127.0.0.2", "127.0.0.2"), ("0.0.0.0", "127.0.0.1"), ("::1", "[::1]"), ("::", "[::1]")]
)
def test_a_gateway_is_asked_where_it_listens(tmp_path: Path, host: str, url: str) -> None:
    port = free_port()
    try:
        found = plan(UpSettings(model="m", host=host, port=port), tmp_path, tmp_path)
    except ConfigError:
        pytest.skip(f"this machine has no {host}")
    assert found.ready_urls["gateway-0"] == f"http://{url}:{port}/ready"


def test_a_port_in_use_is_named_with_the_remedy(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} of 127\.0\.0\.1 .*TANDEM_PORT or --port"):
            plan(UpSettings(model="m", port=port), tmp_path, tmp_path)


@pytest.mark.parametrize(
    ("counts", "name"), [({"decoders": 0}, "decoders"), ({"gateways": 0}, "gateways"), ({"encoders": -1}, "encoders")]
)
def test_too_few_processes_are_refused(tmp_path: Path, counts: dict[str, int], name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--{name} -?\d is too few"):
        planned(tmp_path, **counts)


def test_a_system_without_encoders_serves_text(tmp_path: Path) -> None:
    assert list(by_name(planned(tmp_path, encoders=0))) == ["decoder-0", "gateway-0"]


def test_a_folder_with_odd_characters_makes_a_redis_url_that_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "my #1 50% folder?"
    folder.mkdir()
    found = plan(UpSettings(model="m", port=free_port()), folder, folder)
    url = found.services[0].environment["TANDEM_REDIS"]
    assert not set("#? ") & set(url)
    assert unquote(url) == f"unix://{folder}/valkey"


def test_the_demo_model_has_its_name() -> None:
    assert UpSettings().model_name == "tandem-demo"
    assert UpSettings(served_model_name="mine").model_name == "mine"
    assert UpSettings(model="org/Some-Model").model_name == "Some-Model"
    assert UpSettings(model=f"{DEMO_MODEL}/").model_name == "tandem-demo"


def test_sockets_go_elsewhere_when_the_folder_s_path_is_too_long(tmp_path: Path) -> None:
    with local._run_dir(tmp_path) as near:
        assert near.is_dir()
    assert not near.exists()
    with local._run_dir(tmp_path / ("x" * 100)) as elsewhere:
        assert elsewhere.is_dir()
        assert len(str(elsewhere)) < 90
    assert not elsewhere.exists()


async def test_a_service_that_ends_while_it_starts_is_shown_with_its_log(tmp_path: Path) -> None:
    command = Command("encoder-0", ["/bin/sh", "-c", "echo the weights are missing; exit 2"], {}, tmp_path / "log")
    stack = LocalStack(Plan(None, [command], {"encoder-0": f"http://127.0.0.1:{free_port()}/ready"}, []))
    await stack.start()
    with pytest.raises(ConfigError, match=r"encoder-0 ended while it started.*\nthe weights are missing"):
        await stack.wait_ready(Console(quiet=True))
    await stack.stop()


async def test_services_that_are_never_ready_are_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "READY_TIMEOUT_S", 0.3)
    command = Command("encoder-0", ["/bin/sleep", "100"], {}, tmp_path / "log")
    stack = LocalStack(Plan(None, [command], {"encoder-0": f"http://127.0.0.1:{free_port()}/ready"}, []))
    await stack.start()
    with pytest.raises(ConfigError, match="not ready within"):
        await stack.wait_ready(Console(quiet=True))
    await stack.stop()
    assert stack.children["encoder-0"].pid is None
