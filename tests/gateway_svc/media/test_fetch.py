"""Fetching from strangers' URLs: nothing private is contacted, and nothing takes longer or more than allowed."""

import asyncio
import gc
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from common.errors import InvalidRequest, MediaFetchFailed, MediaTooLarge, Overloaded
from gateway_svc.media.fetch import Address, Fetched, FetchLimits, MediaFetcher, NameLookup, is_public, parse_media_url
from gateway_svc.media.store import MediaStore
from tests.common.sockets import eventually
from tests.gateway_svc.fake_backend import harness
from tests.gateway_svc.media_host import BODY, media_host
from tests.paths import SHARED, needs_shared

PARAM = "messages[0].content[0]"
OPEN = FetchLimits(total_s=0.5, private_hosts=frozenset({"*"}))


async def bytes_of(fetched: Fetched) -> bytes:
    assert fetched.source is not None
    return await fetched.source.read()


async def fetch(url: str, max_bytes: int = 1 << 20, limits: FetchLimits = OPEN, **fields: Any) -> bytes:
    fetcher = MediaFetcher(limits, **fields)
    try:
        return await bytes_of(await fetcher.fetch(url, max_bytes, "messages[0].content[0]"))
    finally:
        await fetcher.aclose()


async def test_a_file_is_fetched_also_through_a_redirect() -> None:
    async with media_host() as host:
        assert await fetch(host.url("/ok")) == BODY
        assert await fetch(host.url("/redirect")) == BODY


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("/404", MediaFetchFailed, "status 404"),
        ("/empty", MediaFetchFailed, "empty file"),
        ("/loop", MediaFetchFailed, "more than 3 times"),
        ("/nowhere", MediaFetchFailed, "without saying where"),
        ("/to-file", InvalidRequest, "neither a data URI nor an http"),
        ("/cut", MediaFetchFailed, "broke off"),
        ("/nonsense", MediaFetchFailed, "broke off"),
        ("/lies", MediaTooLarge, "99999999 bytes, above the limit of 1048576"),
        ("/endless", MediaTooLarge, "more bytes, above the limit of 1048576"),
        ("/drip", MediaFetchFailed, "within 0.5 s"),
    ],
)
async def test_misbehaving_hosts_are_refused_by_name(path: str, kind: type[Exception], message: str) -> None:
    async with media_host() as host:
        started = time.monotonic()
        with pytest.raises(kind, match=message) as caught:
            await fetch(host.url(path))
        assert caught.value.param == "messages[0].content[0]"  # type: ignore[attr-defined]
        assert time.monotonic() - started < 5
        assert len(host.requests) <= 4


async def test_only_the_private_hosts_of_the_setting_may_be_contacted() -> None:
    async with media_host() as host, media_host() as other:
        limits = FetchLimits(total_s=2, private_hosts=frozenset({f"127.0.0.1:{host.port}"}))
        assert await fetch(host.url("/ok"), limits=limits) == BODY
        for url in (other.url("/ok"), host.url("/to-private"), f"http://localhost:{host.port}/ok"):
            with pytest.raises(InvalidRequest, match="private or reserved"):
                await fetch(url, limits=limits)
        assert other.requests == []


async def test_the_host_hears_its_own_name() -> None:
    async def resolver(host: str, port: int) -> list[Address]:
        return [ipaddress.ip_address("127.0.0.1")]

    async with media_host() as host:
        limits = FetchLimits(total_s=2, private_hosts=frozenset({"media.test"}))
        await fetch(f"http://user:pw@media.test:{host.port}/ok?a=b", limits=limits, resolver=resolver)
        assert f"host: media.test:{host.port}\r\n" in host.requests[0].lower()
        assert host.requests[0].startswith("GET /ok?a=b ")


async def test_a_name_that_changes_its_address_is_connected_to_the_checked_one() -> None:
    answers = iter(["93.184.216.34", "127.0.0.1"])

    async def rebinding(host: str, port: int) -> list[Address]:
        return [ipaddress.ip_address(next(answers))]

    async with media_host() as host:
        limits = FetchLimits(total_s=0.3, connect_s=0.2)
        with pytest.raises(MediaFetchFailed):
            await fetch(f"http://rebind.test:{host.port}/ok", limits=limits, resolver=rebinding)
        assert host.requests == []


async def test_one_private_address_among_public_ones_refuses_the_name() -> None:
    async def mixed(host: str, port: int) -> list[Address]:
        return [ipaddress.ip_address("93.184.216.34"), ipaddress.ip_address("10.0.0.1")]

    with pytest.raises(InvalidRequest, match="private or reserved"):
        await fetch("http://mixed.test/", limits=FetchLimits(total_s=1), resolver=mixed)


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "127.1", "2130706433", "0x7f.0.0.1", "localhost.", "[::1]", "[::ffff:127.0.0.1]", "0.0.0.0", "[::]"],
)
async def test_every_spelling_of_loopback_is_refused_without_a_packet(host: str) -> None:
    async with media_host() as listener:
        with pytest.raises((InvalidRequest, MediaFetchFailed)):
            await fetch(f"http://{host}:{listener.port}/ok", limits=FetchLimits(total_s=2))
        assert listener.requests == []


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("8.8.8.8", True),
        ("2606:4700::1111", True),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("100.64.0.1", False),
        ("169.254.169.254", False),
        ("224.0.0.1", False),
        ("240.0.0.1", False),
        ("fd00::1", False),
        ("fe80::1", False),
        ("::ffff:10.0.0.1", False),
        ("::ffff:8.8.8.8", True),
        ("64:ff9b::7f00:1", False),
        ("64:ff9b::808:808", True),
        ("2002:7f00:1::", False),
        ("2001:0:1::1", False),
    ],
)
def test_public_addresses_are_told_from_others(address: str, expected: bool) -> None:
    assert is_public(ipaddress.ip_address(address)) is expected


@pytest.mark.parametrize(
    "url",
    [
        "ftp://h/a",
        "gopher://h/",
        "ws://h/",
        "file:///etc/passwd",
        "/etc/passwd",
        "../x",
        "http://",
        "http:///x",
        "https://h:99999/",
        "http://[::1",
        "http://h/" + "a" * 9000,
        "HTTP:/h",
        "http://\x00/",
        "x",
        "",
    ],
)
def test_other_urls_are_refused(url: str) -> None:
    with pytest.raises(InvalidRequest):
        parse_media_url(url, "p")


class SlowDns:
    """A resolver that blocks its thread until it may go on, except for names of loopback."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.asked: list[str] = []

    def getaddrinfo(self, host: str, port: int, **kwargs: Any) -> Any:
        self.asked.append(host)
        if host != "localhost" and not self.go_on.wait(30):
            raise TimeoutError
        return socket.getaddrinfo("127.0.0.1", port, **kwargs)


@pytest.fixture
def dns() -> Iterator[SlowDns]:
    slow = SlowDns()
    yield slow
    slow.go_on.set()


async def test_names_that_are_looked_up_slowly_keep_no_other_request_waiting(dns: SlowDns) -> None:
    lookup = NameLookup(max_threads=2, wait_s=0.5, getaddrinfo=dns.getaddrinfo)
    fetcher = MediaFetcher(FetchLimits(total_s=0.5, private_hosts=frozenset({"*"})), resolver=lookup)
    setup = harness(fetcher=fetcher)
    parts = [{"type": "image_url", "image_url": {"url": f"http://slow.test/{n}.png"}} for n in range(12)]
    slow = [asyncio.create_task(setup.chat(messages=[{"role": "user", "content": parts}])) for _ in range(4)]
    await eventually(lambda: len(dns.asked) == 2)
    image = "data:image/png;base64," + "A" * 100_000
    for content in ("hi", [{"type": "image_url", "image_url": {"url": image}}]):
        quick = setup.chat(messages=[{"role": "user", "content": content}])
        assert (await asyncio.wait_for(quick, 0.4)).status_code in (200, 400)
    assert not any(task.done() for task in slow)
    assert {response.status_code for response in await asyncio.gather(*slow)} <= {400, 503}
    assert len(dns.asked) == 2
    lookup.close()
    await fetcher.aclose()


async def test_a_busy_thread_of_a_lookup_counts_until_it_comes_back(dns: SlowDns) -> None:
    lookup = NameLookup(max_threads=1, wait_s=0.05, getaddrinfo=dns.getaddrinfo)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(lookup("slow.test", 80), 0.05)
    with pytest.raises(Overloaded, match="all 1 look-ups"):
        await lookup("localhost", 80)
    assert await lookup("127.0.0.1", 80) == [ipaddress.ip_address("127.0.0.1")]
    dns.go_on.set()
    assert await NameLookup(getaddrinfo=dns.getaddrinfo)("localhost", 80) == [ipaddress.ip_address("127.0.0.1")]
    assert dns.asked == ["slow.test", "localhost"]
    lookup.close()


async def test_fetches_of_all_requests_together_are_bounded() -> None:
    async with media_host() as host:
        limits = FetchLimits(total_s=0.3, max_concurrent=2, private_hosts=frozenset({"*"}))
        fetcher = MediaFetcher(limits)
        slow = [asyncio.create_task(fetcher.fetch(host.url(f"/drip?{n}"), 1 << 20, PARAM)) for n in range(2)]
        late = asyncio.create_task(fetcher.fetch(host.url("/ok"), 1 << 20, PARAM))
        await eventually(lambda: len(host.requests) == 2)
        assert not late.done()
        results = await asyncio.gather(*slow, late, return_exceptions=True)
        assert [type(result) for result in results[:2]] == [MediaFetchFailed] * 2
        assert isinstance(results[2], Overloaded) or await bytes_of(results[2]) == BODY
        assert await bytes_of(await fetcher.fetch(host.url("/ok"), 1 << 20, PARAM)) == BODY
        await fetcher.aclose()


async def test_all_files_of_a_request_are_fetched_at_once() -> None:
    async with media_host() as host:
        fetcher = MediaFetcher(OPEN)
        setup = harness(fetcher=fetcher)
        parts = [{"type": "image_url", "image_url": {"url": host.url(f"/drip?{n}")}} for n in range(8)]
        asked = asyncio.create_task(setup.chat(messages=[{"role": "user", "content": parts}]))
        await eventually(lambda: host.num_open == 8)
        assert (await asked).status_code == 400
        await fetcher.aclose()


@needs_shared
async def test_credentials_of_a_url_appear_nowhere(logs: list[Any]) -> None:
    setup = harness()
    body = json.loads((SHARED / "cases" / "SEC-12" / "request.json").read_text())
    response = await setup.client.post("/v1/chat/completions", json=body)
    metrics = await setup.client.get("/metrics")
    assert response.status_code == 400
    for text in (response.text, metrics.text, repr(logs)):
        assert "SECRET" not in text


async def test_one_url_in_flight_is_fetched_once_for_all_who_ask_and_each_error_names_its_item() -> None:
    async with media_host() as host:
        fetcher = MediaFetcher(OPEN)
        asked = [fetcher.fetch(host.url("/drip"), 1 << 20, f"messages[{n}]") for n in range(5)]
        errors = await asyncio.gather(*asked, return_exceptions=True)
        assert [error.param for error in errors if isinstance(error, MediaFetchFailed)] == [
            f"messages[{n}]" for n in range(5)
        ]
        assert len(host.requests) == 1
        await fetcher.aclose()


async def test_a_flight_goes_on_for_who_is_left_and_ends_with_the_last() -> None:
    async with media_host() as host:
        fetcher = MediaFetcher(FetchLimits(total_s=30, private_hosts=frozenset({"*"})))
        asked = [asyncio.create_task(fetcher.fetch(host.url("/drip"), 1 << 20, PARAM)) for _ in range(2)]
        await eventually(lambda: host.requests)
        asked[0].cancel()
        await asyncio.gather(asked[0], return_exceptions=True)
        assert host.num_open == 1
        asked[1].cancel()
        await asyncio.gather(asked[1], return_exceptions=True)
        await eventually(lambda: host.num_open == 0)
        await fetcher.aclose()


@pytest.mark.parametrize(
    ("url", "is_allowed"),
    [
        ("http://images.test/a", True),
        ("http://IMAGES.test:8080/a", True),
        ("http://a.cdn.test/a", True),
        ("http://a.b.cdn.test/a", True),
        ("http://cdn.test/a", False),
        ("http://xcdn.test/a", False),
        ("http://images.test.evil/a", False),
        ("http://images.test@evil.test/a", False),
    ],
)
async def test_only_listed_domains_are_contacted_where_there_is_a_list(url: str, is_allowed: bool) -> None:
    asked = []

    async def nowhere(host: str, port: int) -> list[Address]:
        asked.append(host)
        raise OSError

    limits = FetchLimits(domains=frozenset({"images.test", "*.cdn.test"}))
    with pytest.raises(MediaFetchFailed if is_allowed else InvalidRequest):
        await fetch(url, limits=limits, resolver=nowhere)
    assert bool(asked) is is_allowed


async def test_a_redirect_to_a_domain_that_is_not_listed_is_refused() -> None:
    async with media_host() as host:
        limits = FetchLimits(total_s=2, private_hosts=frozenset({"*"}), domains=frozenset({"127.0.0.1"}))
        assert await fetch(host.url("/redirect"), limits=limits) == BODY
        with pytest.raises(InvalidRequest, match="not one that media may come from"):
            await fetch(host.url("/to-private"), limits=limits)


async def test_bytes_of_all_fetches_are_bounded_and_given_back_when_nobody_holds_them() -> None:
    async with media_host() as host:
        store = MediaStore(max_bytes=len(BODY) + 1)
        fetcher = MediaFetcher(FetchLimits(private_hosts=frozenset({"*"})), store=store)
        held = await fetcher.fetch(host.url("/ok"), 1 << 20, PARAM)
        assert store.budget.num_bytes == len(BODY)
        with pytest.raises(Overloaded, match="media of all requests"):
            await fetcher.fetch(host.url("/ok?again"), 1 << 20, PARAM)
        del held
        gc.collect()
        assert store.budget.num_bytes == 0
        await fetcher.fetch(host.url("/ok?again"), 1 << 20, PARAM)
        await fetcher.aclose()
