"""The API keys that a gateway knows: from its settings and from a file that may change while it runs.

Keys are kept and compared as SHA-256 digests, so that neither memory nor the time of a comparison tells one. A file
that changes is read anew within a second or two; one that has become unreadable leaves the last good list in place.
Knows nothing of HTTP beyond the Authorization header's value. Runs on the event loop.
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from common.errors import ConfigError, Unauthorized
from common.metrics import Counter

logger = structlog.get_logger(__name__)

RELOADS = Counter("tandem_gateway_api_key_reloads_total", "Times that the file of API keys was read anew", ["outcome"])
LOOK_EVERY_S = 1.0
MIN_KEY_CHARACTERS = 8
MAX_FILE_BYTES = 8 << 20
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LIMIT = re.compile(r"[a-z_]+=\S+")


@dataclass(frozen=True)
class KeyLimits:
    """What one key may use; 0 is no limit."""

    requests_per_minute: float = 0.0
    max_inflight: int = 0


@dataclass(frozen=True)
class ApiKey:
    """A key without the key: what logs may call it, and its limits."""

    name: str
    limits: KeyLimits


class ApiKeys:
    """All keys. Raises ConfigError when one cannot be used."""

    def __init__(
        self,
        values: Iterable[str] = (),
        file: Path | None = None,
        *,
        limits: KeyLimits | None = None,
        time_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`values` are keys or `sha256:` digests of keys; `limits` are those of keys that have none of their own."""
        self._limits = limits or KeyLimits()
        self._fixed = dict(self._parse_line(value, "--api-keys", number) for number, value in enumerate(values, 1))
        self._file = file
        self._time_s = time_s
        self._looked_at = time_s()
        self._stamp = _stamp(file)
        self._from_file = self._read() if file is not None else {}

    @property
    def is_required(self) -> bool:
        """Whether requests need a key."""
        return bool(self._fixed) or self._file is not None

    def authenticate(self, authorization: str | None) -> ApiKey:
        """The key of an Authorization header. Raises Unauthorized."""
        self._look()
        scheme, _, presented = (authorization or "").strip().partition(" ")
        if not presented:
            raise Unauthorized("there is no API key: send the header 'Authorization: Bearer KEY'")
        digest = hashlib.sha256(presented.strip().encode("utf-8", "surrogateescape")).hexdigest()
        # What the time of a look-up tells of a digest says nothing of the keys that might have it.
        key = self._fixed.get(digest) or self._from_file.get(digest)
        if scheme.lower() != "bearer" or key is None:
            raise Unauthorized("the API key is not known here: check it for missing characters, or ask for a new one")
        return key

    def _look(self) -> None:
        """Read the file anew when it has changed."""
        now = self._time_s()
        if self._file is None or now - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = now
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._from_file = self._read()
        except ConfigError as error:
            RELOADS.labels("failed").inc()
            logger.error("the file of API keys cannot be used; the keys known before stay valid", reason=error.message)
        else:
            RELOADS.labels("ok").inc()
            logger.info("API keys were read anew", keys=len(self._from_file))

    def _read(self) -> dict[str, ApiKey]:
        assert self._file is not None
        try:
            with self._file.open("rb") as file:
                text = file.read(MAX_FILE_BYTES + 1).decode()
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"the API key file {self._file} cannot be read ({type(exc).__name__})") from exc
        if len(text) > MAX_FILE_BYTES:
            raise ConfigError(f"the API key file {self._file} is larger than {MAX_FILE_BYTES} bytes")
        lines = [(number, line.partition("#")[0].strip()) for number, line in enumerate(text.splitlines(), 1)]
        keys = dict(self._parse_line(line, str(self._file), number) for number, line in lines if line)
        if not keys:  # also a file that is just being written
            raise ConfigError(f"the API key file {self._file} holds no key: write one a line")
        return keys

    def _parse_line(self, line: str, source: str, number: int) -> tuple[str, ApiKey]:
        """`KEY`, or `NAME KEY`, then any of `requests_per_minute=N` and `max_inflight=N`."""
        place = f"line {number} of {source}"
        words = line.split()
        limits = [word for word in words[1:] if _LIMIT.fullmatch(word)]
        plain = words[: len(words) - len(limits)]
        if not 1 <= len(plain) <= 2 or words[len(plain) :] != limits:
            raise ConfigError(f"{place} is not 'KEY', or 'NAME KEY', with limits such as requests_per_minute=60")
        digest = _digest_of(plain[-1], place)
        name = plain[0] if len(plain) == 2 else f"key-{digest[:8]}"
        if _NAME.fullmatch(name) is None:
            raise ConfigError(f"{place} has a name that is not of 1 to 64 letters, digits, dots, dashes or underscores")
        return digest, ApiKey(name, self._parse_limits(limits, place))

    def _parse_limits(self, words: list[str], place: str) -> KeyLimits:
        given = dict(word.split("=", 1) for word in words)
        if unknown := given.keys() - {"requests_per_minute", "max_inflight"}:
            raise ConfigError(f"{place} has a limit {min(unknown)!r} that does not exist")
        try:
            limits = KeyLimits(
                requests_per_minute=float(given.get("requests_per_minute", self._limits.requests_per_minute)),
                max_inflight=int(given.get("max_inflight", self._limits.max_inflight)),
            )
        except ValueError as exc:
            raise ConfigError(f"{place} has a limit that is not a number") from exc
        if not (0 <= limits.requests_per_minute < 1e9 and 0 <= limits.max_inflight < 1e9):
            raise ConfigError(f"{place} has a limit that is negative or too large: 0 is no limit")
        return limits


def _digest_of(key: str, place: str) -> str:
    if key.startswith("sha256:"):
        digest = _DIGEST.fullmatch(key.lower())
        if digest is None:
            raise ConfigError(f"{place} has a digest that is not 'sha256:' and 64 hexadecimal digits")
        return digest[1]
    if len(key) < MIN_KEY_CHARACTERS:
        raise ConfigError(f"{place} has a key of {len(key)} characters: use {MIN_KEY_CHARACTERS} at least")
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _stamp(file: Path | None) -> tuple[int, int, int] | None:
    """What changes when a file does, also when a link to it is turned elsewhere, as Kubernetes does with secrets."""
    try:
        status = file.stat() if file is not None else None
    except OSError:
        return None
    return None if status is None else (status.st_mtime_ns, status.st_size, status.st_ino)
