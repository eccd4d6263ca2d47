"""`tandem encoder` as a process: ready, reachable with the fleet's key, and gone when told so."""

import asyncio
import contextlib
import signal
import sys
from pathlib import Path

import httpx
import pytest
import zmq.auth

from common.errors import PeerUnreachable
from common.messages import EncodeReply, EncodeRequest, Hello, Release
from common.transport import CurveKeys, Dealer
from deploy.local import free_port
from encoder_svc import __main__ as encoder_main
from tests.common.sockets import can_send, eventually, hello, ipc_address, received, zmq_context
from tests.encoder_svc.embeddings import key
from tests.media_samples import png
from tests.paths import REPOSITORY
from tests.servable import save_servable


@pytest.mark.slow
async def test_an_encoder_process_serves_the_fleet_and_ends_cleanly(tmp_path: Path) -> None:
    folder, _ = save_servable(tmp_path / "model")
    _, secret_file = zmq.auth.create_certificates(tmp_path, "fleet")
    keys, port = CurveKeys.load(Path(secret_file)), free_port()
    with zmq_context() as context, ipc_address() as control_at, ipc_address() as data_at:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "encoder_svc", "--model", str(folder), "--served-model-name", "tiny"),
            *("--control-endpoint", control_at, "--data-endpoint", data_at, "--http-port", str(port)),
            *("--curve-key-file", secret_file, "--threads", "1", "--log-format", "json"),
            stderr=asyncio.subprocess.PIPE,
            cwd=REPOSITORY,
        )
        try:
            await ready(f"http://127.0.0.1:{port}/ready")
            control, data = (Dealer(context, at, name="test-dealer", keys=keys) for at in (control_at, data_at))
            stranger = Dealer(context, control_at, name="stranger")
            await eventually(lambda: can_send(control, hello("gateway", "g")))
            greeting = (await received(control)).message
            assert isinstance(greeting, Hello)
            assert greeting.fingerprint is not None
            request = EncodeRequest(
                request_id="r1",
                key=key(1),
                modality="image",
                expected_grid=(1, 8, 8),
                fingerprint=greeting.fingerprint,
                time_left_s=30.0,
            )
            source = png(128, 128)
            await eventually(lambda: _send(data, request, source))
            reply = (await received(data, 30)).message
            assert isinstance(reply, EncodeReply)
            assert reply.error is None
            assert not can_send(stranger, hello("gateway", "s"))
            control.send(Release(request_id="r1"))  # without Redis a drain waits for it
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                _, err = await process.communicate()
            assert process.returncode == 0, err.decode()
            assert b"Traceback" not in err
        finally:
            if process.returncode is None:
                process.kill()
                await process.communicate()


def _send(dealer: Dealer, request: EncodeRequest, source: bytes) -> bool:
    with contextlib.suppress(PeerUnreachable):
        dealer.send(request, source)
        return True
    return False


async def ready(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(100):
        while True:
            with contextlib.suppress(httpx.TransportError):
                if (await client.get(url)).status_code == 200:
                    return
            await asyncio.sleep(0.05)


@pytest.fixture
def in_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the command in this process, whose logging stays as it is."""
    monkeypatch.setattr(encoder_main, "configure_logs", lambda *args: None)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("in_process")
def test_a_checkpoint_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        encoder_main.app.meta(
            ["--model", str(tmp_path / "none"), "--http-port", str(free_port()), "--log-level", "error"]
        )
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert [line for line in error.splitlines() if line.startswith("tandem encoder: ")] == [error.splitlines()[-1]]
    assert "Traceback" not in error


@pytest.mark.usefixtures("in_process")
def test_a_bind_that_strangers_reach_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = save_servable(tmp_path / "model")
    with pytest.raises(SystemExit) as caught:
        encoder_main.app.meta(
            [
                *("--model", str(folder), "--http-port", str(free_port()), "--log-level", "error", "--threads", "1"),
                *("--control-endpoint", "tcp://0.0.0.0:0"),
            ]
        )
    assert caught.value.code == 2
    assert "without CURVE keys" in capsys.readouterr().err
