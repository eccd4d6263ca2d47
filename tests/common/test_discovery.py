"""How sources of members are written, and names that are looked up again and again."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from common.discovery import (
    DECODERS,
    ENCODERS,
    GATEWAYS,
    DnsMembers,
    KubernetesOptions,
    Tier,
    UnitedMembers,
    addresses_of,
    member_source,
)
from common.errors import ConfigError
from common.members import Member, StaticMembers
from tests.common.sockets import background, eventually

OPTIONS = KubernetesOptions("http://127.0.0.1:1")


async def told(source: Any, count: int = 1) -> Sequence[Member]:
    """The `count`-th list that a source tells."""
    lists: list[Sequence[Member]] = []
    async with background(source.run(lists.append)):
        await eventually(lambda: len(lists) >= count)
    return lists[count - 1]


async def test_addresses_are_members_as_they_are_written() -> None:
    source = member_source(["tcp://a:1,tcp://a:2", "tcp://b:1,tcp://b:2"], ENCODERS, OPTIONS)
    assert await told(source) == [Member(("tcp://a:1", "tcp://a:2")), Member(("tcp://b:1", "tcp://b:2"))]


async def test_no_source_has_no_members() -> None:
    async with background(member_source([], ENCODERS, OPTIONS).run(lambda members: pytest.fail("told something"))):
        await asyncio.sleep(0.02)


async def test_sources_of_several_kinds_make_one_list() -> None:
    source = member_source(["tcp://a:1", "dns:localhost:7201", "kubernetes:shop/decoder"], DECODERS, OPTIONS)
    assert "tcp://127.0.0.1:7201" in [member.endpoints[0] for member in await told(source, 2)]
    kinds = [part["source"] for part in source.status()["sources"]]  # type: ignore[attr-defined, index, union-attr]
    assert kinds == ["static", "dns:localhost", "kubernetes:shop/decoder"]


@pytest.mark.parametrize(
    ("value", "tier", "words"),
    [
        ("tcp://host:7101", ENCODERS, "two addresses"),
        ("tcp://a:1,tcp://a:2,tcp://a:3", ENCODERS, "two addresses"),
        ("tcp://host:7201,", DECODERS, "one address"),
        ("dns:host", ENCODERS, "dns:HOST:CONTROL_PORT,DATA_PORT"),
        ("dns:host:7101", ENCODERS, "dns:HOST:CONTROL_PORT,DATA_PORT"),
        ("dns:host:0", DECODERS, "65535"),
        ("dns:host:65536", DECODERS, "65535"),
        ("dns::7201", DECODERS, "dns:HOST:CONTROL_PORT"),
        ("kubernetes:", DECODERS, "kubernetes:SERVICE"),
        ("kubernetes:a/b/c", DECODERS, "kubernetes:NAMESPACE/SERVICE"),
        ("kubernetes:../secrets", DECODERS, "kubernetes:SERVICE"),
        ("kubernetes:a?watch=1", DECODERS, "kubernetes:SERVICE"),
    ],
)
def test_a_source_that_cannot_be_is_refused_with_how_it_is_written(value: str, tier: Tier, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^{tier.flag} '") as caught:
        member_source([value], tier, OPTIONS)
    assert words in str(caught.value)


async def test_a_name_gives_a_member_for_each_address_and_follows_changes() -> None:
    answers: list[Any] = [["10.0.0.2", "10.0.0.1", "10.0.0.2"], ["fd00::1"]]
    source = DnsMembers("tier", [7101, 7102], every_s=0.01, look_up=lambda host: answers[0])
    lists: list[Sequence[Member]] = []
    async with background(source.run(lists.append)):
        await eventually(lambda: lists)
        assert [member.endpoints[1] for member in lists[-1]] == ["tcp://10.0.0.1:7102", "tcp://10.0.0.2:7102"]
        answers.pop(0)
        await eventually(lambda: len(lists) == 2)
        assert lists[-1] == [Member(("tcp://[fd00::1]:7101", "tcp://[fd00::1]:7102"))]


async def test_a_look_up_that_fails_leaves_the_last_known_members() -> None:
    """Also one that hands out another address afterwards: K8S-08, a peer that restarts elsewhere behind its name."""
    answers: list[Any] = [["10.0.0.1"]]

    def look_up(host: str) -> Sequence[str]:
        if isinstance(answers[-1], Exception):
            raise answers[-1]
        found: Sequence[str] = answers[-1]
        return found

    source = DnsMembers("tier", [7201], every_s=0.01, look_up=look_up)
    lists: list[Sequence[Member]] = []
    async with background(source.run(lists.append)):
        await eventually(lambda: lists)
        answers.append(OSError("no such name"))
        await eventually(lambda: source.status()["failing"])
        assert source.status()["members"] == 1
        answers.append(["10.0.0.9"])
        await eventually(lambda: len(lists) == 2)
    assert [member.endpoints[0] for member in lists[-1]] == ["tcp://10.0.0.9:7201"]
    assert source.status()["failing"] is False


async def test_a_union_has_each_member_once_and_welcomes_whom_any_source_welcomes() -> None:
    one, two = Member(("a",), takes_new_work=False), Member(("a",))
    source = UnitedMembers([StaticMembers([one, Member(("b",))]), StaticMembers([two])])
    assert await told(source, 2) == [two, Member(("b",))]


def test_gateways_are_addressed_by_http() -> None:
    source = member_source(["dns:localhost:8000"], GATEWAYS, OPTIONS)
    assert source._scheme == "http"  # type: ignore[attr-defined]


def test_what_is_no_host_name_is_an_error_of_the_system() -> None:
    with pytest.raises(OSError, match="no host name"):
        addresses_of("a" * 70 + ".b")
