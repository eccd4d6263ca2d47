"""A Redis client from a URL: one server, a Sentinel's master, or a Cluster; with TLS and passwords where it says so.

    redis://[[user]:password@]host[:port][/db]     rediss:// for TLS     unix://[[user]:password@]/path[?db=N]
    redis+sentinel://[[user]:password@]host[:port][,host[:port]...]/service[/db]
    redis+cluster://[[user]:password@]host[:port][,host[:port]...]

and `rediss+sentinel`, `rediss+cluster` for TLS. Nothing is contacted yet. Knows nothing of what is stored.
"""

from typing import Any, TypeAlias
from urllib.parse import unquote

import redis.asyncio as redis
from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff

from common.errors import ConfigError

RedisClient: TypeAlias = redis.Redis | RedisCluster

MAX_CONNECTIONS = 16
CONNECT_TIMEOUT_S = 0.25
SOCKET_TIMEOUT_S = 2.0
_PORTS = {"sentinel": 26379, "cluster": 6379}


def connect_redis(url: str) -> RedisClient:
    """A client for a URL. Raises ConfigError for a URL that is none."""
    scheme, separator, rest = url.partition("://")
    base, _, kind = scheme.partition("+")
    try:
        if kind in _PORTS and base in ("redis", "rediss") and separator:
            return _connect_many(kind, rest, is_tls=base == "rediss")
        pool = redis.BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=1, **_options())
    except ValueError as exc:
        raise ConfigError(f"the Redis URL is not valid: {exc}") from exc
    return redis.Redis.from_pool(pool)


def _options() -> dict[str, Any]:
    return {
        "socket_connect_timeout": CONNECT_TIMEOUT_S,
        "socket_timeout": SOCKET_TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        "health_check_interval": 0,
    }


def _connect_many(kind: str, rest: str, *, is_tls: bool) -> RedisClient:
    authority, _, path = rest.partition("/")
    credentials, _, hosts = authority.rpartition("@")
    user, _, password = credentials.partition(":")
    nodes = [_host_and_port(host, _PORTS[kind]) for host in hosts.split(",")]
    access: dict[str, Any] = {"username": unquote(user) or None, "password": unquote(password) or None, "ssl": is_tls}
    if kind == "cluster":
        if path:
            raise ValueError(f"a cluster has no database {path!r}: end the URL behind its hosts")
        starts = [ClusterNode(host, port) for host, port in nodes]
        return RedisCluster(startup_nodes=starts, max_connections=MAX_CONNECTIONS, **access, **_options())
    service, _, database = path.partition("/")
    if not service:
        raise ValueError(
            "a Sentinel URL names its service behind the hosts, as in redis+sentinel://host:26379/mymaster"
        )
    sentinel = Sentinel(nodes, sentinel_kwargs=_options() | {"ssl": is_tls}, **access, **_options())  # type: ignore[no-untyped-call]
    master: redis.Redis = sentinel.master_for(service, db=int(database or 0))
    return master


def _host_and_port(text: str, default_port: int) -> tuple[str, int]:
    host, separator, port = text.rpartition(":")
    if not separator or text.endswith("]"):
        host, port = text, ""
    if not host.strip("[]"):
        raise ValueError(f"{text!r} is no host: write host:port, and commas between several")
    return host.strip("[]"), int(port or default_port)
