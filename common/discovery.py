"""From what people write in `--encoders` and `--decoders` to a source of members: addresses, DNS names, Kubernetes.

Owns the spelling of sources and the DNS source, which looks a name up again and again and keeps what it knew while the
look-up fails. The Kubernetes source is a module of its own, imported when it is asked for. Runs on the event loop.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import structlog

from common.errors import ConfigError
from common.members import Member, MemberSource, OnMembers, StaticMembers

logger = structlog.get_logger(__name__)

KUBERNETES = "kubernetes:"
DNS = "dns:"
LOOK_UP_EVERY_S = 5.0
LOOK_UP_TIMEOUT_S = 10.0
_MAX_PORT = (1 << 16) - 1

LookUp = Callable[[str], Sequence[str]]


@dataclass(frozen=True)
class Tier:
    """How the members of a tier are addressed: the setting that names them, and the ports that make one."""

    flag: str
    port_names: tuple[str, ...]
    example: str
    scheme: str = "tcp"


ENCODERS = Tier("--encoders", ("control", "data"), "tcp://host:7101,tcp://host:7102")
DECODERS = Tier("--decoders", ("control",), "tcp://host:7201")
GATEWAYS = Tier("--gateways", ("http",), "http://host:8000", "http")


@dataclass(frozen=True)
class KubernetesOptions:
    """How the API server is reached, when a source asks for it."""

    url: str | None = None
    relist_s: float = 120.0


def member_source(values: Sequence[str], tier: Tier, options: KubernetesOptions) -> MemberSource:
    """The members that a setting's values name, together. Raises ConfigError."""
    addresses = [value for value in values if not value.startswith((KUBERNETES, DNS))]
    sources: list[MemberSource] = []
    if addresses:
        sources.append(StaticMembers([_static(value, tier) for value in addresses]))
    for value in values:
        if value.startswith(DNS):
            sources.append(_dns(value, tier))
        elif value.startswith(KUBERNETES):
            sources.append(_kubernetes(value, tier, options))
    return sources[0] if len(sources) == 1 else UnitedMembers(sources)


def _static(value: str, tier: Tier) -> Member:
    endpoints = tuple(value.split(","))
    if len(endpoints) != len(tier.port_names) or not all(endpoints):
        count = "two addresses" if len(tier.port_names) == 2 else "one address"
        raise ConfigError(
            f"{tier.flag} {value!r} must be {count} ({', '.join(tier.port_names)}), such as {tier.example}; or "
            f"kubernetes:SERVICE, or dns:HOST:{','.join('PORT' for _ in tier.port_names)}"
        )
    return Member(endpoints)


def _dns(value: str, tier: Tier) -> MemberSource:
    host, _, ports = value.removeprefix(DNS).rpartition(":")
    words = ports.split(",")
    if (
        not host
        or len(words) != len(tier.port_names)
        or not all(w.isdecimal() and 0 < int(w) <= _MAX_PORT for w in words)
    ):
        example = "dns:HOST:" + ",".join(name.upper() + "_PORT" for name in tier.port_names)
        raise ConfigError(f"{tier.flag} {value!r} must be {example}: a name, and a port from 1 to {_MAX_PORT} each")
    return DnsMembers(host, [int(word) for word in words], scheme=tier.scheme)


def _kubernetes(value: str, tier: Tier, options: KubernetesOptions) -> MemberSource:
    from common.discovery_kubernetes import KubernetesMembers
    from common.kubernetes_api import connect, own_namespace

    namespace, _, service = value.removeprefix(KUBERNETES).rpartition("/")
    if not all(_is_label(word) for word in (service, *([namespace] if namespace else []))):
        raise ConfigError(f"{tier.flag} {value!r} must be kubernetes:SERVICE or kubernetes:NAMESPACE/SERVICE")
    return KubernetesMembers(
        partial(connect, options.url),
        own_namespace(namespace),
        service,
        tier.port_names,
        scheme=tier.scheme,
        relist_s=options.relist_s,
    )


def _is_label(word: str) -> bool:
    """A DNS label, as Kubernetes names services and namespaces: what is none must not become part of a path."""
    return 0 < len(word) <= 63 and all(c.isascii() and (c.isalnum() or c == "-") for c in word)


class UnitedMembers:
    """The members of several sources together, in the order of the sources."""

    def __init__(self, sources: Sequence[MemberSource]) -> None:
        self._sources = list(sources)
        self._lists: list[Sequence[Member]] = [() for _ in sources]

    async def run(self, on_members: OnMembers) -> None:
        """Tell the union, until cancelled."""

        def listener(index: int) -> OnMembers:
            def on_list(members: Sequence[Member]) -> None:
                self._lists[index] = members
                on_members(self._union())

            return on_list

        async with asyncio.TaskGroup() as tasks:
            for index, source in enumerate(self._sources):
                tasks.create_task(source.run(listener(index)))

    def status(self) -> dict[str, object]:
        """That of each source."""
        return {"sources": [source.status() for source in self._sources]}

    def _union(self) -> list[Member]:
        """A member that any source welcomes takes new work."""
        found: dict[tuple[str, ...], Member] = {}
        for members in self._lists:
            for member in members:
                known = found.get(member.endpoints)
                if known is None or (member.takes_new_work and not known.takes_new_work):
                    found[member.endpoints] = member
        return list(found.values())


class DnsMembers:
    """Every address that a name has, such as that of a headless Service. A `MemberSource`."""

    def __init__(
        self,
        host: str,
        ports: Sequence[int],
        *,
        scheme: str = "tcp",
        every_s: float = LOOK_UP_EVERY_S,
        look_up: LookUp | None = None,
    ) -> None:
        self._host = host
        self._ports = list(ports)
        self._scheme = scheme
        self._every_s = every_s
        self._look_up = look_up or addresses_of
        self._members: list[Member] = []
        self._is_failing = False

    def status(self) -> dict[str, object]:
        """For `/ready`."""
        return {"source": f"dns:{self._host}", "members": len(self._members), "failing": self._is_failing}

    async def run(self, on_members: OnMembers) -> None:
        """Look the name up until cancelled; a look-up that fails changes nothing."""
        while True:
            try:
                async with asyncio.timeout(LOOK_UP_TIMEOUT_S):
                    found = await asyncio.to_thread(self._look_up, self._host)
            except (OSError, TimeoutError) as error:
                self._note_failure(error)
            else:
                self._is_failing = False
                members = [self._member(address) for address in sorted(set(found))]
                if members != self._members:
                    self._members = members
                    on_members(members)
            await asyncio.sleep(self._every_s)

    def _member(self, address: str) -> Member:
        host = f"[{address}]" if ":" in address else address
        return Member(tuple(f"{self._scheme}://{host}:{port}" for port in self._ports))

    def _note_failure(self, error: Exception) -> None:
        if not self._is_failing:
            logger.warning(
                "a name cannot be looked up; the last known members stay",
                host=self._host,
                reason=str(error) or type(error).__name__,
            )
        self._is_failing = True


def addresses_of(host: str) -> list[str]:
    """All addresses of a name. Blocks; raises OSError."""
    with contextlib.suppress(UnicodeError):
        return [str(entry[4][0]) for entry in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
    raise OSError(f"{host!r} is no host name")
