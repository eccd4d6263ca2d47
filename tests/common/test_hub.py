"""Resolving a checkpoint: local directories as they are; from a hub, only the files of the role are asked for.

A small hub server on loopback, named by `HF_ENDPOINT`, records the files that a client fetches.
"""

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.hub import resolve_checkpoint
from tests.paths import REPOSITORY

COMMIT = "c" * 40
SMALL_FILES = ["config.json", "generation_config.json", "preprocessor_config.json", "video_preprocessor_config.json"]
TEXT_FILES = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "chat_template.json"]
OTHER_FILES = ["README.md", "model.bin", "assets/picture.png"]
WEIGHT_MAP = {
    "model.visual.pos_embed.weight": "model-00001-of-00003.safetensors",
    "model.visual.merger.norm.weight": "model-00002-of-00003.safetensors",
    "model.language_model.norm.weight": "model-00002-of-00003.safetensors",
    "lm_head.weight": "model-00003-of-00003.safetensors",
}


def git_digest(data: bytes) -> str:
    """The name that git, and so the hub, gives to a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Hub:
    """Serves repositories of files; `fetched` lists what was downloaded, in order."""

    def __init__(self, repositories: dict[str, dict[str, bytes]]) -> None:
        self.repositories = repositories
        self.fetched: list[str] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.thread = threading.Thread(target=self.server.serve_forever)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body for a path without its query."""
        for name, files in self.repositories.items():
            if path.startswith(f"/api/models/{name}/revision/"):
                if path.rpartition("/")[2] not in ("main", COMMIT):
                    return 404, {"X-Error-Code": "RevisionNotFound"}, b""
                siblings = [{"rfilename": file} for file in files]
                return 200, {}, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode()
            if path.startswith(f"/api/models/{name}/tree/"):
                entries = [
                    {"type": "file", "path": file, "size": len(data), "oid": git_digest(data)}
                    for file, data in files.items()
                ]
                return 200, {}, json.dumps(entries).encode()
            prefix = f"/{name}/resolve/{COMMIT}/"
            if path.startswith(prefix) and path.removeprefix(prefix) in files:
                file = path.removeprefix(prefix)
                if method == "GET":
                    self.fetched.append(file)
                etag = git_digest(files[file])
                return 200, {"ETag": f'"{etag}"', "X-Repo-Commit": COMMIT}, files[file]
        return 404, {"X-Error-Code": "RepoNotFound"}, b""

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def respond(self) -> None:
                status, headers, body = hub.answer(self.command, self.path.partition("?")[0])
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(body))}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_GET = do_HEAD = respond

            def log_message(self, *args: object) -> None:
                """Keep the test's output clean."""

        return Handler


@pytest.fixture
def hub() -> Iterator[Hub]:
    small = {name: json.dumps(name).encode() for name in [*SMALL_FILES, *TEXT_FILES, *OTHER_FILES]}
    shards = {name: name.encode() for name in set(WEIGHT_MAP.values())}
    index = {"model.safetensors.index.json": json.dumps({"weight_map": WEIGHT_MAP}).encode()}
    hub = Hub(
        {
            "owner/sharded": {**small, **index, **shards},
            "owner/single": {**small, "model.safetensors": b"all"},
            "owner/weightless": small,
        }
    )
    hub.thread.start()
    yield hub
    hub.server.shutdown()
    hub.thread.join()
    hub.server.server_close()


def resolve(hub: Hub, tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `resolve_checkpoint` in a process of its own: the client reads its endpoint when it is imported."""
    script = (
        "import sys; from common.errors import ConfigError; from common.hub import resolve_checkpoint\n"
        "try: print(resolve_checkpoint(*sys.argv[1:]))\n"
        "except ConfigError as exc: sys.exit(f'{type(exc).__name__}: {exc.message}')\n"
        "assert 'torch' not in sys.modules"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hub"), "NO_PROXY": "127.0.0.1"}
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], cwd=REPOSITORY, env=environment, capture_output=True, text=True
    )


@pytest.mark.parametrize(
    ("role", "expected"),
    [
        (
            "encoder",
            {
                "config.json",
                "preprocessor_config.json",
                "video_preprocessor_config.json",
                "model.safetensors.index.json",
                "model-00001-of-00003.safetensors",
                "model-00002-of-00003.safetensors",
            },
        ),
        (
            "decoder",
            {
                "config.json",
                "generation_config.json",
                "tokenizer.json",
                "model.safetensors.index.json",
                "model-00002-of-00003.safetensors",
                "model-00003-of-00003.safetensors",
            },
        ),
        ("gateway", {*SMALL_FILES, *TEXT_FILES}),
    ],
)
def test_only_the_files_of_the_role_are_downloaded(hub: Hub, tmp_path: Path, role: str, expected: set[str]) -> None:
    done = resolve(hub, tmp_path, "owner/sharded", role)
    assert done.returncode == 0, done.stderr
    assert set(hub.fetched) == expected
    assert len(hub.fetched) == len(expected)
    assert {path.name for path in Path(done.stdout.strip()).iterdir()} == expected


def test_single_file_checkpoint_is_downloaded_whole(hub: Hub, tmp_path: Path) -> None:
    done = resolve(hub, tmp_path, "owner/single", "decoder")
    assert done.returncode == 0, done.stderr
    assert set(hub.fetched) == {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors"}


def test_second_start_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    first = resolve(hub, tmp_path, "owner/sharded", "encoder")
    hub.fetched.clear()
    second = resolve(hub, tmp_path, "owner/sharded", "encoder", COMMIT)
    assert second.stdout == first.stdout
    assert hub.fetched == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("owner/absent", "encoder"), "ConfigError: the model 'owner/absent' is neither a local directory nor found"),
        (("owner/sharded", "encoder", "v9"), "ConfigError: the hub's 'owner/sharded' has no revision 'v9'"),
        (("owner/weightless", "encoder"), "CheckpointError: the hub's 'owner/weightless' lacks model.safetensors"),
    ],
)
def test_what_the_hub_does_not_have_is_named(hub: Hub, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
    done = resolve(hub, tmp_path, *arguments)
    assert done.returncode == 1
    assert words in done.stderr


def test_unreachable_hub_is_a_configuration_error(hub: Hub, tmp_path: Path) -> None:
    hub.server.shutdown()
    hub.server.server_close()
    done = resolve(hub, tmp_path, "owner/sharded", "encoder")
    assert done.returncode == 1
    assert "ConfigError: the model 'owner/sharded' could not be downloaded" in done.stderr


def test_local_directory_is_taken_as_it_is(tmp_path: Path) -> None:
    assert resolve_checkpoint(str(tmp_path), "encoder") == tmp_path


@pytest.mark.parametrize("model", ["/no/such/directory", "./absent", "../x", "a/b/c", "", "owner/..", "https://host/x"])
def test_what_is_neither_a_directory_nor_a_hub_id_is_refused(model: str) -> None:
    with pytest.raises(ConfigError, match="neither a directory nor a hub id"):
        resolve_checkpoint(model, "encoder")
