"""EndpointSlices of one Kubernetes Service as they are listed and watched, and the members that they name.

Pure: JSON objects in, members out. What cannot be used is counted and skipped: a malformed slice leaves the one of that
name as it was, a malformed endpoint costs only itself. Knows nothing of HTTP, threads or clocks.
"""

import ipaddress
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

from common.members import Member

State = Literal["ready", "serving", "terminating", "not_ready"]
STATES: tuple[State, ...] = ("ready", "serving", "terminating", "not_ready")
MAX_ENDPOINTS = 10_000
_RANK = {"ready": 0, "serving": 1, "not_ready": 2, "terminating": 3}


@dataclass(frozen=True)
class Endpoint:
    """One pod behind a Service.

    `ready`: takes new work. `serving`: terminating, and still answers. `terminating`: it no longer answers.
    `not_ready`: it does not answer yet, or not just now.
    """

    addresses: tuple[str, ...]
    state: State
    pod: str = ""


class MalformedSlice(Exception):
    """An object is not an EndpointSlice that can be used."""


class SliceCache:
    """The slices of a Service, by name, for the ports that are asked for by their names."""

    def __init__(self, port_names: Sequence[str], scheme: str = "tcp") -> None:
        self._port_names = tuple(port_names)
        self._scheme = scheme
        self._slices: dict[str, list[Endpoint]] = {}
        self.num_malformed = 0

    def replace(self, items: Sequence[Any]) -> None:
        """What a list gave is all there is: what is not in it is gone, whatever a watch told or failed to tell."""
        known, self._slices = self._slices, {}
        for item in items:
            name = _name(item)
            if name is None:
                self.num_malformed += 1
                continue
            try:
                self._slices[name] = self._endpoints(item)
            except MalformedSlice:
                self.num_malformed += 1
                if name in known:
                    self._slices[name] = known[name]

    def apply(self, kind: str, item: Any) -> bool:
        """One event of a watch; whether anything changed."""
        name = _name(item)
        if name is None:
            self.num_malformed += 1
            return False
        if kind == "DELETED":
            return self._slices.pop(name, None) is not None
        try:
            endpoints = self._endpoints(item)
        except MalformedSlice:
            self.num_malformed += 1
            return False
        is_change = self._slices.get(name) != endpoints
        self._slices[name] = endpoints
        return is_change

    def endpoints(self) -> list[Endpoint]:
        """All endpoints, each once: one that moves between slices is in two for a while; the better state counts."""
        found: dict[tuple[str, ...], Endpoint] = {}
        for name in sorted(self._slices):
            for endpoint in self._slices[name]:
                known = found.get(endpoint.addresses)
                if known is None or _RANK[endpoint.state] < _RANK[known.state]:
                    found[endpoint.addresses] = endpoint
        return list(found.values())[:MAX_ENDPOINTS]

    def members(self) -> list[Member]:
        """Those to connect to: ready ones for new work, terminating ones that still serve for what they have."""
        return [
            Member(endpoint.addresses, endpoint.state == "ready", endpoint.pod)
            for endpoint in self.endpoints()
            if endpoint.state in ("ready", "serving")
        ]

    def count_by_state(self) -> dict[State, int]:
        """How many endpoints are in each state, with zeros."""
        counts = Counter(endpoint.state for endpoint in self.endpoints())
        return {state: counts[state] for state in STATES}

    def _endpoints(self, item: Mapping[str, Any]) -> list[Endpoint]:
        family = item.get("addressType")
        if family not in ("IPv4", "IPv6"):
            raise MalformedSlice
        entries = item.get("endpoints") or []  # null stands for none
        if not isinstance(entries, list):
            raise MalformedSlice
        if not entries:
            return []
        ports = self._ports(item.get("ports"))
        found = []
        for entry in entries[:MAX_ENDPOINTS]:
            endpoint = self._endpoint(entry, ports)
            if endpoint is None:
                self.num_malformed += 1
            else:
                found.append(endpoint)
        return found

    def _ports(self, ports: Any) -> list[int]:
        if not isinstance(ports, list):
            raise MalformedSlice
        named = [port for port in ports if isinstance(port, dict) and isinstance(port.get("name"), str)]
        by_name = {port["name"]: port.get("port") for port in named}
        numbers = [by_name.get(name) for name in self._port_names]
        if not all(type(number) is int and 0 < number < 1 << 16 for number in numbers):
            raise MalformedSlice
        return cast("list[int]", numbers)

    def _endpoint(self, entry: Any, ports: Sequence[int]) -> Endpoint | None:
        if not isinstance(entry, dict):
            return None
        addresses, conditions, target = entry.get("addresses"), entry.get("conditions") or {}, entry.get("targetRef")
        if not isinstance(addresses, list) or not addresses or not isinstance(conditions, dict):
            return None  # a pod without an address, among others
        try:
            host = str(ipaddress.ip_address(str(addresses[0])))  # as text: a number is an address to that function
        except ValueError:
            return None
        if "%" in host:  # a zone: text of any kind, which means something to one node alone
            return None
        host = f"[{host}]" if ":" in host else host
        pod = target.get("name") if isinstance(target, dict) else None
        return Endpoint(
            tuple(f"{self._scheme}://{host}:{port}" for port in ports),
            _state(conditions),
            pod if isinstance(pod, str) else "",
        )


def _state(conditions: Mapping[str, Any]) -> State:
    """A condition that is absent or null reads as Kubernetes documents: ready, serving as ready, not terminating."""
    ready = conditions.get("ready")
    is_ready = ready if isinstance(ready, bool) else True
    serving = conditions.get("serving")
    is_serving = serving if isinstance(serving, bool) else is_ready
    if conditions.get("terminating") is True:
        return "serving" if is_serving else "terminating"
    return "ready" if is_ready else "not_ready"


def _name(item: Any) -> str | None:
    metadata = item.get("metadata") if isinstance(item, dict) else None
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return name if isinstance(name, str) else None
