"""How every service is configured: one frozen settings object, filled once from four sources with one precedence.

Command line, then environment (`TANDEM_...`), then a TOML file (`--config`, or `TANDEM_CONFIG`; the command's own table
before what stands above all tables), then the defaults.
A service's `config.py` extends `CommonSettings`; its `__main__.py` hands `command_line` a function that takes the
settings. Nothing else reads the environment.
"""

import dataclasses
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import cyclopts
from cyclopts import Parameter
from cyclopts.validators import Number

from common.errors import ConfigError, TandemError
from common.logs import LogFormat, LogLevel
from common.transport import CurveKeys

DtypeName = Literal["auto", "float32", "float16", "bfloat16"]
ENVIRONMENT_PREFIX = "TANDEM_"
Port = Annotated[int, Parameter(validator=Number(gte=1, lte=65_535))]
DEFAULT_FILE = "tandem.toml"
REDIS_ENVIRONMENT = Parameter(env_var=("TANDEM_REDIS", "REDIS_URL"))  # what other software calls it works too


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """What all services share."""

    model: str
    """Checkpoint: a folder in the Hugging Face layout, or a hub id, of which only this role's files are fetched."""

    revision: str | None = None
    """Revision of a hub id: branch, tag or commit."""

    served_model_name: str | None = None
    """Name that clients use for the model; by default the last part of --model. All services must agree."""

    redis: Annotated[str | None, REDIS_ENVIRONMENT] = None
    """URL of the Redis-protocol server that caches embeddings, such as redis://host:6379/0; rediss:// for TLS,
    redis+sentinel://host:26379,host:26379/service and redis+cluster://host:6379,host:6379 for several. Without it
    nothing is cached across processes."""

    cache_ttl_s: int = 86_400
    """Seconds that an unused entry stays in Redis."""

    cache_wait_s: float = 0.005
    """Seconds that a request waits to hear what Redis holds, before it goes on as if it were nothing."""

    http_host: str = "127.0.0.1"
    """Address of the HTTP port."""

    curve_key_file: Path | None = None
    """CURVE secret key file shared by the fleet (written by zmq.auth.create_certificates): encrypts and authenticates
    all ZMQ sockets."""

    allow_insecure_bind: bool = False
    """Bind ZMQ sockets to other addresses than loopback although no CURVE key is set: only on a network you trust."""

    instance_id: str | None = None
    """Name of this process among its peers; by default a random one. It must be new at each start."""

    drain_timeout_s: float = 30.0
    """Seconds that running work may take after SIGTERM."""

    log_level: LogLevel = "info"
    """Least severe level that is logged."""

    log_format: LogFormat = "text"
    """Lines for people, or JSON for collectors."""

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or self.model.rstrip("/").rpartition("/")[2]

    def curve_keys(self) -> CurveKeys | None:
        """The fleet's keys, when set."""
        return CurveKeys.load(self.curve_key_file) if self.curve_key_file is not None else None


def command_line(name: str, run: Callable[..., None], *, epilogue: str = "") -> cyclopts.App:
    """The command of a service. Its help is the docstring of `run`; its options are the fields of the settings.

    An error that a person can mend is one line on stderr and exit code 2.
    """
    app = cyclopts.App(name=name, help_epilogue=epilogue, config=[_environment()], version_flags=[])

    @app.meta.default
    def with_config(
        *tokens: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
        config: Annotated[Path | None, Parameter(help="TOML file with settings, below flags and environment.")] = None,
    ) -> None:
        try:
            app.config = [_environment(), *_file(config, name)]
            app(tokens)
        except ConfigError as error:
            print(f"tandem {name}: {error}", file=sys.stderr)
            raise SystemExit(2) from None

    def guarded(*args: Any, **kwargs: Any) -> None:
        try:
            run(*args, **kwargs)
        except* TandemError as group:
            for error in _leaves(group):
                print(f"tandem {name}: {error}", file=sys.stderr)
            raise SystemExit(2) from None

    guarded.__wrapped__ = run  # type: ignore[attr-defined]
    guarded.__doc__ = run.__doc__
    app.default(guarded)
    return app


def environment_of(settings: CommonSettings) -> dict[str, str]:
    """The variables that give another process of the same service these settings, whatever file it finds.

    Not the command line, which everybody on the machine may read: a URL may hold a password. Raises TypeError for a
    mapping, which no variable can hold.
    """
    found = {}
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, dict):
            raise TypeError(f"{field.name} is a mapping")
        if value is not None:
            text = " ".join(value) if isinstance(value, tuple) else str(value)
            found[f"{ENVIRONMENT_PREFIX}{field.name.upper()}"] = text
    return found


def _environment() -> cyclopts.config.Env:
    return cyclopts.config.Env(ENVIRONMENT_PREFIX, command=False)


def _file(given: Path | None, name: str) -> list[cyclopts.config.Toml]:
    """The file's table for this command, then what stands above all tables; a file may serve every command."""
    path = given or Path(DEFAULT_FILE)
    if given is not None or path.exists():
        try:
            tomllib.loads(path.read_text())
        except (OSError, ValueError) as exc:
            raise ConfigError(f"the settings file {path} cannot be read: {exc}") from exc
    return [
        cyclopts.config.Toml(path, root_keys=keys, must_exist=False, use_commands_as_keys=False, allow_unknown=True)
        for keys in ((name,), ())
    ]


def _leaves(group: BaseExceptionGroup[TandemError]) -> Iterator[TandemError]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
