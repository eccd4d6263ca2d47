"""Who belongs to a tier: addresses, and whether each takes new work. And where such a list comes from.

A source tells the whole list whenever it changes: a static one once, DNS and Kubernetes for as long as they run. Who
listens need not know which of them it is. Pure; knows nothing of connections.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Member:
    """One service of a tier. Its endpoints are its identity: one for a decoder, control and data for an encoder.

    A member that does not take new work is still connected to: what runs there ends there.
    """

    endpoints: tuple[str, ...]
    takes_new_work: bool = True
    name: str = ""


OnMembers = Callable[[Sequence[Member]], None]


class MemberSource(Protocol):
    """Where the members of a tier are learnt from."""

    async def run(self, on_members: OnMembers) -> None:
        """Tell the list, now and whenever it changes, until cancelled. `on_members` is called on the event loop."""
        ...

    def status(self) -> dict[str, object]:
        """How current the list is, for `/ready`."""
        ...


class StaticMembers:
    """Members that were written down."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = list(members)

    async def run(self, on_members: OnMembers) -> None:
        """Tell the list once."""
        on_members(self._members)

    def status(self) -> dict[str, object]:
        """Always current."""
        return {"source": "static", "members": len(self._members)}
