"""What was downloaded is checked once, and what is not whole is found and removed."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from common.errors import CheckpointError
from deploy import cli
from deploy.fetch import CHECKED_SUFFIX, blobs_of, check_blob
from tests.common.test_hub import Hub, git_digest, hub  # noqa: F401 - a fixture
from tests.paths import REPOSITORY

CONTENT = b"weights" * 1000


def blob_in(folder: Path, name: str, content: bytes = CONTENT) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


def names() -> list[str]:
    """A large file's digest, and a small one's as git makes it."""
    return [hashlib.sha256(CONTENT).hexdigest(), git_digest(CONTENT)]


@pytest.mark.parametrize("name", names())
def test_a_whole_blob_is_read_once(tmp_path: Path, name: str) -> None:
    blob = blob_in(tmp_path, name)
    assert [check_blob(blob), check_blob(blob)] == [True, False]


@pytest.mark.parametrize("name", names())
def test_a_damaged_blob_is_refused_and_removed(tmp_path: Path, name: str) -> None:
    blob = blob_in(tmp_path, name, CONTENT[:-1] + b"!")
    with pytest.raises(CheckpointError, match=f"{name}.*start again"):
        check_blob(blob)
    assert list(tmp_path.iterdir()) == []


def test_a_blob_that_changed_since_it_was_checked_is_read_again(tmp_path: Path) -> None:
    blob = blob_in(tmp_path, names()[0])
    check_blob(blob)
    blob.write_bytes(CONTENT[:-1])
    with pytest.raises(CheckpointError):
        check_blob(blob)


def test_a_file_whose_name_is_no_digest_is_left_alone(tmp_path: Path) -> None:
    assert not check_blob(blob_in(tmp_path, "etag-of-a-mirror"))
    assert not (tmp_path / f"etag-of-a-mirror{CHECKED_SUFFIX}").exists()


def test_a_snapshot_names_its_blobs_and_a_plain_folder_none(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "main"
    snapshot.mkdir(parents=True)
    blob = blob_in(tmp_path / "blobs", names()[0])
    (snapshot / "model.safetensors").symlink_to(blob)
    (snapshot / "notes.txt").write_text("not of the hub")
    assert list(blobs_of(snapshot)) == [blob]
    assert list(blobs_of(tmp_path / "blobs")) == []


def test_the_command_takes_a_folder_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.app(["fetch", "--model", str(tmp_path), "--role", "encoder"])
    assert not caught.value.code
    assert "files_checked=0" in capsys.readouterr().err


def test_the_command_refuses_what_is_neither_a_folder_nor_a_hub_id(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.app(["fetch", "--model", "no/such/folder/here", "--role", "encoder"])
    assert caught.value.code == 2
    assert "neither a directory nor a hub id" in capsys.readouterr().err


def fetched(hub: Hub, home: Path, *, offline: bool = False) -> "subprocess.CompletedProcess[str]":  # noqa: F811
    """`tandem fetch` of the encoder's half, in a process of its own, or its start without a hub."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    command = ["-m", "deploy.cli", "fetch", "--model", "owner/sharded", "--role", "encoder"]
    if offline:
        environment["HF_HUB_OFFLINE"] = "1"
        program = (
            "from common.hub import resolve_checkpoint as r; print(len(list(r('owner/sharded', 'encoder').iterdir())))"
        )
        command = ["-c", program]
    return subprocess.run([sys.executable, *command], cwd=REPOSITORY, env=environment, capture_output=True, text=True)


def test_a_half_is_fetched_and_checked_then_a_service_starts_without_the_hub(hub: Hub, tmp_path: Path) -> None:  # noqa: F811
    done = fetched(hub, tmp_path)
    assert "files_checked=6" in done.stderr, done.stderr
    assert "model-00003-of-00003.safetensors" not in hub.fetched
    hub.fetched.clear()
    assert fetched(hub, tmp_path, offline=True).stdout == "6\n"
    assert hub.fetched == []


def test_a_blob_that_rots_on_the_disk_is_found_and_downloaded_anew(hub: Hub, tmp_path: Path) -> None:  # noqa: F811
    fetched(hub, tmp_path)
    shard = next(tmp_path.rglob("model-00001-of-00003.safetensors")).resolve()
    shard.write_bytes(b"rotten")
    done = fetched(hub, tmp_path)
    assert done.returncode == 2
    assert "was removed: start again" in done.stderr
    hub.fetched.clear()
    assert "files_checked=1" in fetched(hub, tmp_path).stderr
    assert hub.fetched == ["model-00001-of-00003.safetensors"]
