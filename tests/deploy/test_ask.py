"""`tandem ask` against a small server that speaks OpenAI's stream."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deploy.ask import app
from deploy.local import free_port
from tests.media_samples import png


class FakeServer:
    """Answers `events` to every chat request, and remembers the requests."""

    def __init__(self) -> None:
        self.requests: list[dict[str, Any]] = []
        self.models = ["tandem-demo"]
        self.status = 200
        self.events: list[dict[str, Any]] = [
            {"choices": [{"index": 0, "delta": {"content": text}}]} for text in ("a red ", "circle", None)
        ] + [{"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.send(self, 200, {"object": "list", "data": [{"id": name} for name in outer.models]})

            def do_POST(self) -> None:
                outer.requests.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                if outer.status != 200:
                    outer.send(self, outer.status, {"error": {"message": "the picture is too large"}})
                    return
                self.send_response(200)
                self.send_header("content-type", "text/event-stream")
                self.end_headers()
                for event in [*map(json.dumps, outer.events), "[DONE]"]:
                    self.wfile.write(f"data: {event}\n\n".encode())

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def send(self, handler: BaseHTTPRequestHandler, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("content-type", "application/json")
        handler.send_header("content-length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    @property
    def content(self) -> list[dict[str, Any]]:
        content: list[dict[str, Any]] = self.requests[-1]["messages"][0]["content"]
        return content


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeServer]:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY", "TANDEM_CONFIG", "TANDEM_SERVED_MODEL_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    server = FakeServer()
    thread = threading.Thread(target=server.http.serve_forever, daemon=True)
    thread.start()
    yield server
    server.http.shutdown()
    server.http.server_close()
    thread.join()


def ask(*words: str) -> int:
    """The exit code."""
    try:
        app.meta(list(words))
    except SystemExit as exc:
        return int(exc.code or 0)
    return 0


def test_the_answer_is_streamed_and_the_pictures_go_in_order(
    server: FakeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").write_bytes(png(8, 8))
    (tmp_path / "b.mp4").write_bytes(b"video")
    words = ["a.png", "https://host/c.jpg?x=1", "b.mp4", "data:video/mp4;base64,AAAA", "What is it?"]
    assert ask(*words, "--url", server.url, "--max-tokens", "9") == 0
    assert capsys.readouterr().out == "a red circle\n"
    encoded = base64.b64encode(png(8, 8)).decode()
    assert server.content == [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "image_url", "image_url": {"url": "https://host/c.jpg?x=1"}},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{base64.b64encode(b'video').decode()}"}},
        {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}},
        {"type": "text", "text": "What is it?"},
    ]
    request = server.requests[0]
    assert (request["model"], request["stream"], request["max_completion_tokens"]) == ("tandem-demo", True, 9)


def test_a_model_s_name_is_taken_as_the_services_take_it(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tandem.toml").write_text('model = "/some/checkpoint"')
    monkeypatch.setenv("TANDEM_MODEL", "/some/checkpoint")
    ask("hi", "--url", server.url)
    assert server.requests[-1]["model"] == "tandem-demo"
    monkeypatch.setenv("TANDEM_SERVED_MODEL_NAME", "named")
    ask("hi", "--url", server.url)
    assert server.requests[-1]["model"] == "named"
    ask("hi", "--url", server.url, "--served-model-name", "flagged")
    assert server.requests[-1]["model"] == "flagged"


def fails_with_one_line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert ask(*words) == 2
    error = capsys.readouterr().err
    assert error.startswith("tandem ask: ")
    assert error.count("\n") == 1
    return error


def test_what_goes_wrong_is_one_line(server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no question was given" in fails_with_one_line(capsys)
    error = fails_with_one_line(capsys, "missing.png", "What?", "--url", server.url)
    assert "missing.png cannot be read (No such file or directory)" in error
    server.status = 400
    assert "answered 400" in fails_with_one_line(capsys, "hi", "--url", server.url)
    server.models = []
    assert "lists no model" in fails_with_one_line(capsys, "hi", "--url", server.url)


def test_an_error_in_the_middle_of_the_stream_is_one_line(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.events = [server.events[0], {"error": {"message": "the decoder is gone", "code": "decoder_unavailable"}}]
    assert ask("hi", "--url", server.url) == 2
    output = capsys.readouterr()
    assert output.out == "a red "
    assert "the answer broke off: the decoder is gone" in output.err
    assert "Traceback" not in output.err


def test_no_server_is_named_with_the_remedy(capsys: pytest.CaptureFixture[str], server: FakeServer) -> None:
    error = fails_with_one_line(capsys, "hi", "--url", f"http://127.0.0.1:{free_port()}/v1")
    assert "start one with `make up`" in error
