"""Which members of a tier serve a gateway's model: those of others are connected and told to the operator, not used.

Runs on the event loop.
"""

from collections.abc import Iterable

import structlog

from common.link import Link

logger = structlog.get_logger(__name__)


class OwnModel:
    """The model of a gateway, as one tier's connections are judged by it."""

    def __init__(self, model: str, role: str) -> None:
        self._model = model
        self._role = role

    def is_served_by(self, link: Link) -> bool:
        """Whether the peer is up and serves it."""
        return link.peer is not None and link.peer.model == self._model

    def num_others(self, links: Iterable[Link]) -> int:
        """Peers that are up and serve something else."""
        return sum(link.is_up and not self.is_served_by(link) for link in links)

    def greet(self, link: Link) -> None:
        """Tell the operator of a peer that has come and is not used."""
        if link.peer is not None and not self.is_served_by(link):
            logger.warning(
                "a peer serves another model and is not used",
                role=self._role,
                endpoint=link.endpoint,
                model=link.peer.model,
            )
