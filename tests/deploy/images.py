"""Build the images and start what is in them, without a registry and without Docker: `make images-test`.

Owns a base made by debootstrap, the builds by buildah, and what has to hold of each image: no root, no shell in front
of the service, SIGTERM heard by it, no torch in the gateway's. Needs root on a Debian machine; says so and ends with
exit code 77 (skipped) where it cannot run. Not part of `make test`: it takes minutes and some gigabytes.
"""

import ast
import configparser
import contextlib
import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent.parent
WORK = REPOSITORY / ".tandem" / "images"
BASE_IMAGE = "localhost/tandem-base"
PACKAGES = ("python3", "python3-venv", "python3-dev", "g++", "ca-certificates")
EXIT_SKIPPED = 77
# Where each service answers, and what it needs to start alone.
PORTS = {"gateway": 8000, "encoder": 7100, "decoder": 7200}
DEMO_MODEL = "/opt/tandem/app/demo/model"
START_TIMEOUT_S = 120.0
# As a container has them: torch asks /proc and /sys what the processor can. Nobody else sees these mounts.
ENTER = (
    'for d in proc sys dev; do mount --rbind "/$d" "$0/$d" || exit; done; exec chroot --userspec=10001:10001 "$0" "$@"'
)


def main() -> None:
    """Build and try the images that are named on the command line, or all."""
    targets = sys.argv[1:] or list(PORTS)
    for missing in missing_tools():
        print(f"skipped: {missing}")
        raise SystemExit(EXIT_SKIPPED)
    WORK.mkdir(parents=True, exist_ok=True)
    make_base()
    for target in targets:
        image = build(target)
        check_configuration(target, image)
        with mounted(image) as root:
            check_contents(target, root)
            check_life(target, root)
        print(f"{target}: built, {size_of(image)}, starts without root, ends on SIGTERM with 0")


def missing_tools() -> Iterator[str]:
    """What keeps this machine from building."""
    if os.name != "posix" or not hasattr(os, "geteuid") or os.geteuid() != 0:
        yield "buildah with chroot isolation, and debootstrap, need root"
        return
    for tool in ("buildah", "debootstrap"):
        if shutil.which(tool) is None:
            yield f"{tool} is not there: apt-get install --no-install-recommends buildah debootstrap"


def buildah(*arguments: str, quiet: bool = True) -> str:
    """Run buildah with a store of its own, and return what it printed."""
    command = [*_storage(storage_driver()), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE if quiet else None, text=True, check=True)
    return (done.stdout or "").strip()


def _storage(driver: str) -> list[str]:
    folder = WORK / driver
    return ["buildah", "--storage-driver", driver, "--root", str(folder / "store"), "--runroot", str(folder / "run")]


@functools.cache
def storage_driver() -> str:
    """`overlay` where the kernel has it: with `vfs` every layer is a whole copy, 45 GB for the encoder's image."""
    done = subprocess.run([*_storage("overlay"), "info"], capture_output=True, check=False)
    return "overlay" if done.returncode == 0 else "vfs"


def make_base() -> None:
    """An image with Debian and Python, of the packages that this machine installs from."""
    if BASE_IMAGE in buildah("images", "--format", "{{.Name}}").split():
        return
    root = WORK / "base"
    if not (root / "usr" / "bin" / "python3").exists():
        shutil.rmtree(root, ignore_errors=True)
        subprocess.run(
            ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", codename(), str(root), mirror()],
            check=True,
            stdout=subprocess.DEVNULL,
        )
        shutil.rmtree(root / "var" / "cache" / "apt", ignore_errors=True)
    container = buildah("from", "scratch")
    buildah("add", container, str(root), "/")
    buildah("commit", "--rm", container, BASE_IMAGE)
    shutil.rmtree(root)


def codename() -> str:
    """Of this machine's Debian."""
    facts = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    return facts["VERSION_CODENAME"]


def mirror() -> str:
    """The address that this machine's apt takes Debian from."""
    done = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)"], capture_output=True, text=True, check=True
    )
    return next(line for line in done.stdout.splitlines() if not line.endswith("security"))


def build(target: str) -> str:
    """Build one image, with pip set up as on this machine."""
    image = f"localhost/tandem-{target}"
    arguments = ["bud", "--isolation", "chroot", "--format", "docker"]
    arguments += ["--layers"] if storage_driver() == "overlay" else []
    arguments += ["--file", str(REPOSITORY / "deploy" / "Dockerfile")]
    arguments += ["--target", target, "--tag", image, "--build-arg", f"BASE_IMAGE={BASE_IMAGE}"]
    arguments += ["--build-arg", f"BUILD_IMAGE={BASE_IMAGE}"]
    arguments += [f"--volume={volume}" for volume in pip_volumes()]
    buildah(*arguments, str(REPOSITORY), quiet=False)
    return image


def pip_settings() -> dict[str, str]:
    """How this machine's pip is set up, by files and by its environment, as its configuration file would say it."""
    done = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    found: dict[str, dict[str, str]] = {"global": {}, ":env:": {}}
    for line in done.stdout.splitlines():
        name, _, value = line.partition("=")
        level, _, key = name.rpartition(".")
        found.setdefault(level, {})[key] = str(ast.literal_eval(value))
    return found["global"] | found[":env:"]


def pip_volumes() -> list[str]:
    """What the builds' pip needs of this machine: its settings, and the files and folders that they name."""
    settings = pip_settings()
    parser = configparser.ConfigParser(interpolation=None)
    parser["global"] = settings
    with (WORK / "pip.conf").open("w") as file:
        parser.write(file)
    words = " ".join(settings.values()).split()
    # The files of an index lie beside it.
    indexes = {str(Path(word.removeprefix("file://")).parent) for word in words if word.startswith("file://")}
    paths = {word for word in words if word.startswith("/")} | indexes | {"/etc/ssl/certs"}
    there = {path for path in paths if Path(path).exists()}
    # A file inside a folder that is mounted is there already.
    outer = sorted(path for path in there if not any(path != other and path.startswith(f"{other}/") for other in there))
    return [f"{WORK / 'pip.conf'}:/etc/pip.conf:ro", *(f"{path}:{path}:ro" for path in outer)]


def check_configuration(target: str, image: str) -> None:
    """Not root, and the service itself as the first process."""
    config = json.loads(buildah("inspect", "--type", "image", image))["Docker"]["config"]
    assert config["User"] == "10001:10001", config["User"]
    assert config["Entrypoint"] == ["tandem", target], config["Entrypoint"]
    assert not config.get("Cmd"), config["Cmd"]


@contextlib.contextmanager
def mounted(image: str) -> Iterator[Path]:
    """The image's files."""
    container = buildah("from", image)
    try:
        yield Path(buildah("mount", container))
    finally:
        buildah("rm", container)


def check_contents(target: str, root: Path) -> None:
    """Only what the role needs."""
    packages = next((root / "opt/tandem/venv/lib").glob("python3.*/site-packages"))
    assert (packages / "torch").exists() == (target != "gateway"), "torch"
    code = {path.name for path in (root / "opt/tandem/app").iterdir()}
    assert code == {"common", "deploy", "demo", f"{target}_svc"}, code
    writable = [path for path in (root / "opt/tandem/app").rglob("*.py") if path.stat().st_mode & 0o022]
    assert not writable, writable


def check_life(target: str, root: Path) -> None:
    """Start it as the image does, wait until it answers, and send SIGTERM to its first process.

    A chroot stands for the container: buildah's own run puts a process of its own in front.
    """
    enter = ["unshare", "--mount", "sh", "-c", ENTER, str(root)]
    command = [
        *enter,
        "/opt/tandem/venv/bin/tandem",
        target,
        "--model",
        DEMO_MODEL,
        "--served-model-name",
        "tandem-demo",
    ]
    environment = {
        "HOME": "/tmp",
        "PYTHONPATH": "/opt/tandem/app",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PATH": "/opt/tandem/venv/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    }
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        path = "health" if target == "gateway" else "ready"
        wait_for(f"http://127.0.0.1:{PORTS[target]}/{path}", process)
        process.send_signal(signal.SIGTERM)
        code = process.wait(30)
        assert code == 0, f"exit code {code}"
    finally:
        process.kill()
        process.wait()


def wait_for(url: str, process: "subprocess.Popen[str]") -> None:
    """Return once the URL answers 200."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            assert process.stderr is not None
            raise SystemExit(f"the service ended with {process.returncode}:\n{process.stderr.read()}")
        try:
            with opener.open(url, timeout=5):
                return
        except OSError:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.2)
    raise SystemExit(f"{url} did not answer within {START_TIMEOUT_S:.0f} s")


def size_of(image: str) -> str:
    """What the image takes, unpacked, in words."""
    size: str = json.loads(buildah("images", "--json", image))[0]["size"]
    return size


if __name__ == "__main__":
    main()
