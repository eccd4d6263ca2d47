"""Every command in the README, run: the ones that need a running system against one that `make up` started."""

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from deploy.local import free_port
from tests.paths import DEMO_MODEL, REPOSITORY

README = (REPOSITORY / "README.md").read_text()
URL = "http://127.0.0.1:8000"
READY_FILE = ".venv/.ready"
START_S, STOP_S = 180, 30
# Starts a system, runs the whole test suite, or needs the repository's own address: each has a test of its own.
NOT_RUN_AS_THEY_ARE = ("git clone", "make test")
TANDEM = REPOSITORY / ".venv" / "bin" / "tandem"

has_environment = pytest.mark.skipif(not TANDEM.exists(), reason="the environment that make sets up is not there")
has_demo_model = pytest.mark.skipif(not (DEMO_MODEL / "config.json").is_file(), reason="the demo model is not there")


@dataclass(frozen=True)
class Block:
    """A fenced block, and the language that it names."""

    language: str
    text: str


def blocks() -> list[Block]:
    return [Block(m[1], m[2]) for m in re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)]


@pytest.fixture(autouse=True, scope="module")
def outside_of_make() -> Iterator[None]:
    """As a reader who types the commands: `make test`, which may run this, would change what a nested make prints."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("MAKEFLAGS", "MAKELEVEL", "MFLAGS"):
            patch.delenv(name, raising=False)
        yield


def runnable() -> list[Block]:
    return [
        block
        for block in blocks()
        if block.language in ("sh", "python") and not block.text.startswith(NOT_RUN_AS_THEY_ARE)
    ]


def words(text: str) -> list[str]:
    """An answer without case and punctuation."""
    return re.findall(r"[a-z]+", text.lower())


@dataclass(frozen=True)
class Up:
    """A system that `make up` started, with what it has printed so far."""

    url: str
    make: "subprocess.Popen[bytes]"
    output: Path

    def printed(self) -> str:
        return self.output.read_text(errors="replace")

    def run(self, block: Block) -> str:
        """Run a block as a reader would, but at this system's port; returns what it prints."""
        text = block.text.replace(URL, self.url)
        shell = ["bash", "-euo", "pipefail", "-c", text]
        command = shell if block.language == "sh" else [sys.executable, "-c", text]
        # `tandem ask` looks at port 8000 unless it is told otherwise.
        environment = {**os.environ, "TANDEM_URL": f"{self.url}/v1", "NO_PROXY": "127.0.0.1"}
        done = subprocess.run(
            command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """`make up` on another port, with the environment as it is: nothing is installed."""
    folder = tmp_path_factory.mktemp("up")
    port, output = free_port(), folder / "output"
    environment = {**os.environ, "TANDEM_PORT": str(port), "TANDEM_DATA_DIR": str(folder / "data")}
    with output.open("wb") as sink:
        make = subprocess.Popen(
            ["make", "--old-file", READY_FILE, "up"],
            cwd=REPOSITORY,
            env=environment,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    system = Up(f"http://127.0.0.1:{port}", make, output)
    try:
        wait_until_up(system)
        yield system
    finally:
        interrupt(make)


def wait_until_up(system: Up) -> None:
    deadline = time.monotonic() + START_S
    while "Ctrl-C stops everything" not in system.printed():
        assert system.make.poll() is None, system.printed()
        assert time.monotonic() < deadline, f"not up after {START_S} s: {system.printed()}"
        with suppress(subprocess.TimeoutExpired):
            system.make.wait(0.1)


def interrupt(make: "subprocess.Popen[bytes]") -> None:
    """What Ctrl-C does: SIGINT to the whole foreground group."""
    if make.poll() is None:
        os.killpg(make.pid, signal.SIGINT)
    make.wait(STOP_S)


def test_every_fenced_block_is_run_or_is_no_command() -> None:
    languages = {block.language for block in blocks()}
    assert languages == {"sh", "python", "text", "mermaid"}
    held_back = [b for b in blocks() if b.language == "sh" and b not in runnable()]
    assert [block.text.split("\n")[0].split(" URL")[0] for block in held_back] == list(NOT_RUN_AS_THEY_ARE)
    assert len(runnable()) >= 3


def test_the_clone_command_gives_a_checkout_in_which_make_up_would_start(tmp_path: Path) -> None:
    if not (REPOSITORY / ".git").exists():
        pytest.skip("this is not a git checkout")
    clone, up_command = blocks()[1].text.strip().split("\n")
    assert up_command == "make up"
    script = f"{clone.replace('URL_OF_THIS_REPOSITORY', shlex.quote(str(REPOSITORY)))} && make --dry-run up"
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "tandem" / "pyproject.toml").is_file()
    assert done.stdout.rstrip().endswith(".venv/bin/tandem up")


def test_torch_index_reaches_pip() -> None:
    assert "make up TORCH_INDEX=ADDRESS" in README
    dry_run = ["make", "--dry-run", "--what-if", "pyproject.toml", "up", "TORCH_INDEX=ADDRESS"]
    printed = subprocess.run(dry_run, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert "--extra-index-url ADDRESS" in printed


@pytest.mark.parametrize("target", ["test", "check"])
def test_the_targets_that_the_readme_names_exist(target: str) -> None:
    assert f"make {target}" in README
    dry_run = ["make", "--dry-run", "--old-file", READY_FILE, target]
    printed = subprocess.run(dry_run, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    assert {"test": "-m pytest", "check": "lint-imports"}[target] in printed


@has_environment
def test_the_flags_that_the_readme_names_are_flags_of_tandem_up() -> None:
    printed = subprocess.run([TANDEM, "up", "--help"], capture_output=True, text=True, check=True).stdout
    named = set(re.findall(r"`(--[a-z]+)", README)) | {"--model"}
    assert len(named) >= 5
    assert named <= set(re.findall(r"--[a-z-]+", printed)) | {"--help"}


@pytest.mark.slow
@has_environment
@has_demo_model
class TestWithARunningSystem:
    """In one class, so that one worker runs them against one system."""

    @pytest.mark.timeout(START_S + 60)
    @pytest.mark.parametrize("block", runnable(), ids=lambda block: block.text.split("\n")[0][:40])
    def test_a_block_runs(self, up: Up, block: Block) -> None:
        assert up.run(block).strip()

    def test_the_answer_is_the_one_that_the_readme_shows(self, up: Up) -> None:
        ask = next(block for block in runnable() if "tandem ask" in block.text)
        shown = blocks()[blocks().index(ask) + 1]
        assert shown.language == "text"
        assert words(up.run(ask)) == words(shown.text)

    def test_a_repeated_picture_is_told_as_cached(self, up: Up) -> None:
        block = next(block for block in runnable() if block.language == "python")
        up.run(block)
        details = up.run(block).strip().split("\n")[-1]
        assert "encoded_media_tokens=0" in details
        assert re.search(r"cached_media_tokens=[1-9]", details)

    def test_the_three_things_to_try_work_as_they_are_printed(self, up: Up) -> None:
        commands = re.findall(r"^  (.+)$", up.printed(), re.MULTILINE)
        assert len(commands) == 3
        for command in commands:
            done = subprocess.run(
                ["bash", "-euc", command], cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, done.stderr
            assert done.stdout.strip()

    def test_the_interrupt_stops_everything_and_leaves_no_process_behind(self, up: Up) -> None:
        """The last of the class: there is no system after it."""
        processes = psutil.Process(up.make.pid).children(recursive=True)
        assert len(processes) >= 5  # tandem up, the cache, and one of each service
        interrupt(up.make)
        gone, alive = psutil.wait_procs(processes, timeout=STOP_S)
        assert not alive
        assert len(gone) == len(processes)
        with pytest.raises(httpx.TransportError):
            httpx.get(f"{up.url}/health", trust_env=False)
