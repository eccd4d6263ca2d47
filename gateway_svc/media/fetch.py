"""Media over HTTP, for URLs that strangers choose: what may be contacted, and how long and how much.

A host's name is resolved once, every address is checked, and the connection goes to a checked address, so neither a
second answer of DNS nor a redirect leads inside. Time, bytes, hops, fetches and look-ups that run together are bounded;
the body is read only up to its limit, and a URL that is being fetched is not fetched twice. Errors and logs name the
item, never the URL: it may hold credentials. Runs on the event loop, look-ups in threads.
"""

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import httpx

from common.errors import InvalidRequest, MediaFetchFailed, MediaTooLarge, Overloaded, TandemError
from gateway_svc.media.byte_budget import Holder
from gateway_svc.media.item import naming
from gateway_svc.media.single_flight import SingleFlight
from gateway_svc.media.store import HeldSource, MediaStore
from gateway_svc.media.url_cache import Freshness, freshness_of

_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_MAX_URL_CHARACTERS = 8192


@dataclass(frozen=True)
class FetchLimits:
    """How far one fetch may go, and how many run together in one gateway.

    `private_hosts` may be contacted although their addresses are private: names as in the URL, with or without a
    port, or "*" for any. A redirect to another private host is still refused. `domains`, where there are any, are the
    only ones that may be contacted: names, or "*.name" for all below one.
    """

    total_s: float = 20.0
    connect_s: float = 5.0
    max_redirects: int = 3
    max_concurrent: int = 64
    private_hosts: frozenset[str] = frozenset()
    domains: frozenset[str] = frozenset()


Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolver = Callable[[str, int], Awaitable[list[Address]]]


class NameLookup:
    """Looks names up with the system's resolver, which blocks, in a bounded number of threads.

    A thread whose look-up takes too long cannot be interrupted: it counts as busy until it comes back.
    """

    def __init__(
        self, *, max_threads: int = 16, wait_s: float = 5.0, getaddrinfo: Callable[..., Any] = socket.getaddrinfo
    ) -> None:
        """`wait_s` is how long a look-up waits for a thread."""
        self._threads = ThreadPoolExecutor(max_threads, thread_name_prefix="dns")
        self._free = asyncio.Semaphore(max_threads)
        self._max_threads = max_threads
        self._wait_s = wait_s
        self._getaddrinfo = getaddrinfo

    async def __call__(self, host: str, port: int) -> list[Address]:
        """Addresses of a name, in the resolver's order. Odd spellings of IPv4 (127.1, 0x7f.0.0.1) come out plain.

        Raises OSError or UnicodeError for a name that has none, and Overloaded when all threads stay busy.
        """
        try:
            return [ipaddress.ip_address(host.partition("%")[0])]
        except ValueError:
            found = await self._look_up(host, port)
        return list(dict.fromkeys(ipaddress.ip_address(str(entry[4][0]).partition("%")[0]) for entry in found))

    async def _look_up(self, host: str, port: int) -> Any:
        busy = f"all {self._max_threads} look-ups of media hosts' names are busy: try again later, or send data URIs"
        await _acquired(self._free, self._wait_s, busy)
        loop = asyncio.get_running_loop()
        job = self._threads.submit(self._getaddrinfo, host, port, type=socket.SOCK_STREAM)
        job.add_done_callback(partial(self._on_done, loop))
        return await asyncio.wrap_future(job)

    def _on_done(self, loop: asyncio.AbstractEventLoop, job: Future[Any]) -> None:
        """In the look-up's thread. A process that ends does not wait for its look-ups."""
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._free.release)

    def close(self) -> None:
        """Let threads end when their look-ups do."""
        self._threads.shutdown(wait=False, cancel_futures=True)


async def _acquired(slots: asyncio.Semaphore, wait_s: float, message: str) -> None:
    try:
        async with asyncio.timeout(wait_s):
            await slots.acquire()
    except TimeoutError as exc:
        raise Overloaded(message, retry_after_s=wait_s) from exc


@dataclass(frozen=True)
class Fetched:
    """What a host answered. Without a `source` the file is still what its ETag says."""

    source: HeldSource | None
    freshness: Freshness


class MediaFetcher:
    """Fetches media URLs. One instance for the gateway; `aclose` when it ends."""

    def __init__(
        self, limits: FetchLimits, *, store: MediaStore | None = None, resolver: Resolver | None = None
    ) -> None:
        """`store` keeps what is fetched; `resolver` instead of the system's."""
        self._limits = limits
        self._lookup = NameLookup()
        self._resolver = resolver or self._lookup
        self._slots = asyncio.Semaphore(limits.max_concurrent)
        self._flights: SingleFlight[Fetched] = SingleFlight()
        self.store = store or MediaStore()
        self._client = httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=httpx.Timeout(limits.total_s, connect=limits.connect_s),
            # Connections are addressed by IP, so a kept one could serve another name of the same address.
            limits=httpx.Limits(max_keepalive_connections=0),
            headers={"user-agent": "tandem", "accept": "image/*, video/*", "accept-encoding": "identity"},
        )

    async def fetch(self, url: str, max_bytes: int, param: str, *, etag: str | None = None) -> Fetched:
        """The file behind `url`, unless it is still that of `etag`.

        Raises InvalidRequest, MediaFetchFailed or MediaTooLarge, naming `param`; and Overloaded when too many other
        fetches run for as long as this one might have.
        """
        parsed = self.check_url(url, param)
        try:
            return await self._flights.run((url, max_bytes, etag), lambda: self._fetch(parsed, max_bytes, etag))
        except TandemError as error:
            raise naming(error, param) from error

    def check_url(self, url: str, param: str) -> httpx.URL:
        """Refuse what may never be fetched, by the URL alone."""
        parsed = parse_media_url(url, param)
        try:
            self._check_domain(parsed)
        except TandemError as error:
            raise naming(error, param) from error
        return parsed

    async def aclose(self) -> None:
        """Close idle connections, and the threads of look-ups."""
        self._lookup.close()
        await self._client.aclose()

    async def _fetch(self, url: httpx.URL, max_bytes: int, etag: str | None) -> Fetched:
        busy = f"{self._limits.max_concurrent} media files are being fetched: try again later, or send data URIs"
        await _acquired(self._slots, self._limits.total_s, busy)
        try:
            async with asyncio.timeout(self._limits.total_s):
                return await self._follow(url, max_bytes, etag)
        except TimeoutError as exc:
            raise MediaFetchFailed(
                f"the media host did not send the file within {self._limits.total_s:g} s: use a faster host, or send "
                "the file as a data URI"
            ) from exc
        finally:
            self._slots.release()

    async def _follow(self, url: httpx.URL, max_bytes: int, etag: str | None) -> Fetched:
        for hop in range(self._limits.max_redirects + 1):
            try:
                async with self._connect(url, etag) as response:
                    if response.status_code == 304 and etag is not None:
                        return Fetched(None, freshness_of(response.headers))
                    if response.status_code not in _REDIRECTS:
                        holder = self.store.budget.hold()
                        data = await _read(response, max_bytes, holder)
                        # Where a redirect leads may change sooner than the file there.
                        freshness = Freshness() if hop else freshness_of(response.headers)
                        return Fetched(self.store.hold(data, holder), freshness)
                    url = _redirect_target(url, response)
                    self._check_domain(url)
            except (httpx.TransportError, httpx.StreamError, httpx.InvalidURL) as exc:
                raise MediaFetchFailed(
                    f"the media host could not be reached, or broke off the transfer ({type(exc).__name__})"
                ) from exc
        raise MediaFetchFailed(
            f"the media host redirects more than {self._limits.max_redirects} times: give the final URL"
        )

    @asynccontextmanager
    async def _connect(self, url: httpx.URL, etag: str | None) -> AsyncIterator[httpx.Response]:
        """An open response from the first of the host's addresses that accepts a connection."""
        addresses = await self._allowed_addresses(url)
        condition = {} if etag is None else {"if-none-match": etag}
        for number, address in enumerate(addresses, start=1):
            request = self._client.build_request(
                "GET",
                url.copy_with(host=str(address)),
                headers={"host": url.netloc.decode("ascii"), **condition},
                extensions={"sni_hostname": url.raw_host.decode("ascii"), "timeout": self._client.timeout.as_dict()},
            )
            try:
                response = await self._client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if number == len(addresses):
                    raise
                continue
            try:
                yield response
            finally:
                await response.aclose()
            return

    def _check_domain(self, url: httpx.URL) -> None:
        """Refuse a host that is not on the operator's list, where there is one."""
        domains = self._limits.domains
        host = url.host.lower().rstrip(".")
        parents = (host[index:] for index, character in enumerate(host) if character == ".")
        if domains and host not in domains and not any(f"*{parent}" in domains for parent in parents):
            raise InvalidRequest(
                "the URL's host is not one that media may come from here: send the file as a data URI, or have the "
                "operator allow the host"
            )

    async def _allowed_addresses(self, url: httpx.URL) -> list[Address]:
        port = url.port or (443 if url.scheme == "https" else 80)
        try:
            addresses = await self._resolver(url.raw_host.decode("ascii").strip("[]"), port)
        except (OSError, UnicodeError) as exc:
            raise MediaFetchFailed("the name of the media host cannot be resolved") from exc
        is_exempt = not self._limits.private_hosts.isdisjoint({"*", url.host, f"{url.host}:{port}"})
        if not is_exempt and not all(map(is_public, addresses)):
            raise InvalidRequest(
                "the URL's host is in a private or reserved network, which may not be contacted: send the file as a "
                "data URI, or have the operator allow the host"
            )
        return addresses


def parse_media_url(text: str, param: str) -> httpx.URL:
    """An absolute http(s) URL with a host, without its credentials' appearing in any error."""
    scheme, separator, _ = text.partition("://")
    if not separator or scheme.lower() not in ("http", "https"):
        raise InvalidRequest(
            f"{param} is neither a data URI nor an http or https URL: send data:<type>;base64,<data> or a URL",
            param=param,
        )
    try:
        if len(text) > _MAX_URL_CHARACTERS:
            raise ValueError("too long")
        url = httpx.URL(text)
        is_usable = bool(url.host) and (url.port is None or 0 < url.port < 1 << 16)
    except (httpx.InvalidURL, ValueError) as exc:
        raise InvalidRequest(
            f"{param} is not a valid URL of at most {_MAX_URL_CHARACTERS} characters", param=param
        ) from exc
    if not is_usable:
        raise InvalidRequest(f"{param} is a URL without a host", param=param)
    return url


def _redirect_target(url: httpx.URL, response: httpx.Response) -> httpx.URL:
    location = response.headers.get("location")
    if not location:
        raise MediaFetchFailed("the media host redirects without saying where to")
    try:
        target = str(url.join(location))
    except (httpx.InvalidURL, ValueError) as exc:
        raise MediaFetchFailed("the media host redirects to an invalid URL") from exc
    return parse_media_url(target, "the redirect's target")


async def _read(response: httpx.Response, max_bytes: int, holder: Holder) -> bytes:
    if response.status_code != 200:
        raise MediaFetchFailed(f"the media host answered with status {response.status_code}")
    declared = response.headers.get("content-length", "")
    if declared.isdecimal() and len(declared) < 20 and int(declared) > max_bytes:
        raise _too_large(f"{int(declared)} bytes", max_bytes)
    chunks: list[bytes] = []
    num_bytes = 0
    # Raw: a compressed body is not unpacked, so a small body cannot become a large one.
    async for chunk in response.aiter_raw():
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise _too_large("more bytes", max_bytes)
        holder.take(len(chunk))
        chunks.append(chunk)
    if not num_bytes:
        raise MediaFetchFailed("the media host sent an empty file")
    return b"".join(chunks)


def _too_large(amount: str, max_bytes: int) -> MediaTooLarge:
    return MediaTooLarge(
        f"the media host sends {amount}, above the limit of {max_bytes} for one item: use a smaller file"
    )


def is_public(address: Address) -> bool:
    """Whether an address is on the public internet, also when IPv6 wraps an IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or _nat64(address)
        if inner is not None:
            return is_public(inner)
        if address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _nat64(address: ipaddress.IPv6Address) -> ipaddress.IPv4Address | None:
    """The IPv4 address inside 64:ff9b::/96, where a network translates."""
    if address in ipaddress.IPv6Network("64:ff9b::/96"):
        return ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
    return None
