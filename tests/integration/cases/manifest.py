"""The cases that broke other servers, as `../shared/cases` lists them, and which of them need no more than requests.

A case is a folder of request bodies: `request.json` (or `raw_body.json`, sent as it is), `same_*` that must be answered
alike, `other_*` that must not, `more_*` that expect the same status, and `then`, which must work afterwards.
"""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.paths import SHARED

FOLDER = SHARED / "cases"

# These need more than requests: a media host, a small pool, or peers that are killed. They have tests of their own.
NOT_PLAIN = frozenset(
    [
        "IMG-34",
        "IMG-37",
        "SEC-02",
        "SEC-08",
        "SCH-01",
        "SCH-07",
        "DIS-03",
        "DIS-04",
        "DIS-09",
        "DIS-19",
        "K8S-03",
        "API-32",
    ]
)


@dataclass(frozen=True)
class Case:
    """One entry of the manifest."""

    id: str
    endpoint: str
    input: str
    statuses: frozenset[int]
    error_type: str | None
    vision_tokens: int | None

    def body(self, name: str = "request") -> bytes:
        """A request body as it is in its file."""
        return (FOLDER / self.id / f"{name}.json").read_bytes()

    def request(self, name: str = "request") -> dict[str, Any]:
        """A request body, to be changed."""
        body: dict[str, Any] = json.loads(self.body(name))
        return body

    def names(self, prefix: str) -> list[str]:
        """The bodies whose names begin so, in order."""
        return sorted(path.stem for path in (FOLDER / self.id).glob(f"{prefix}*.json"))

    @property
    def path(self) -> str:
        """The route of its requests."""
        return self.endpoint.partition(" ")[2]


def all_cases() -> list[Case]:
    """The manifest; empty where it is absent."""
    if not FOLDER.is_dir():
        return []
    return [
        Case(
            id=entry["id"],
            endpoint=entry["endpoint"],
            input=entry["input"],
            statuses=frozenset(entry["expect"]["status"] or ()),
            error_type=entry["expect"]["error_type"],
            vision_tokens=entry["expect"].get("vision_tokens"),
        )
        for entry in json.loads((FOLDER / "manifest.json").read_text())
    ]


def case(case_id: str) -> Case:
    """One case."""
    return next(found for found in all_cases() if found.id == case_id)


def plain_cases(*groups: str) -> list[Any]:
    """Parameters: the cases of some groups that are told by their requests alone."""
    found = [
        pytest.param(entry, id=f"{entry.id}: {entry.input}".encode("ascii", "replace").decode())
        for entry in all_cases()
        if entry.id[:3] in groups
        and entry.id not in NOT_PLAIN
        and (FOLDER / entry.id).is_dir()
        and (entry.names("request") or entry.names("raw_body"))
    ]
    skip = pytest.mark.skip(reason="the shared reference material is not beside the repository")
    return found or [pytest.param(None, id="no cases", marks=skip)]
