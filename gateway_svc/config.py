"""Settings of the gateway, read once in `__main__`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from common.settings import CommonSettings, Port
from gateway_svc.routing.encoder_pool import DEFAULT_PATCHES_PER_S


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(CommonSettings):
    """Settings of `tandem gateway`."""

    port: Port = 8000
    """Port of the OpenAI API, and of /health, /ready and /metrics."""

    encoders: tuple[str, ...] = ()
    """Encoders: CONTROL,DATA addresses, such as tcp://host:7101,tcp://host:7102; or dns:HOST:7101,7102 for all
    addresses of a name; or kubernetes:SERVICE for the endpoints of a Service. May be given several times."""

    decoders: tuple[str, ...] = ()
    """Decoders: control addresses, such as tcp://host:7201; or dns:HOST:7201; or kubernetes:SERVICE. May be given
    several times."""

    gateways: tuple[str, ...] = ()
    """All gateways, whose shares /autoscale/v1 adds up: http://host:8000, dns:HOST:8000 or kubernetes:SERVICE. May be
    given several times; without any it tells this gateway's alone."""

    encoder_patches_per_s: Annotated[float, Parameter(validator=Number(gt=0))] = DEFAULT_PATCHES_PER_S
    """Patches that one encoder encodes in a second, for routing and autoscaling, until an encoder has told what it
    measured."""

    kubernetes_api: str | None = None
    """URL of the Kubernetes API server that sources with kubernetes: ask; by default the pod's own, or that of the
    kubeconfig."""

    discovery_relist_s: Annotated[float, Parameter(validator=Number(gte=1, lte=3600))] = 120.0
    """Seconds after which the endpoints of a Service are listed anew, whatever a watch told; 60 to 300 suit most."""

    limit_mm_per_prompt: dict[str, int] = field(default_factory=dict)
    """Items of a kind that one request may have, such as '{"image": 4, "video": 1}'."""

    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """Refuse requests that have a field which the API does not know, by its name, as OpenAI does; or ignore it."""

    generation_config: Literal["auto", "none"] = "auto"
    """Take the sampling defaults of requests from the checkpoint's generation_config.json, or OpenAI's."""

    embeddings: bool = False
    """The checkpoint is an embedding model, such as Qwen3-VL-Embedding: /v1/embeddings answers, nothing generates."""

    chat_template: Path | None = None
    """Chat template to use instead of the checkpoint's."""

    video_outer_pair: bool = True
    """Keep the template's vision_start and vision_end around a video's timestamped frames, as transformers 5.24 does;
    without it they are replaced, as in training and in vLLM."""

    max_media_bytes: int = 100 << 20
    """Bytes of one image or video file."""

    max_request_media_bytes: int = 512 << 20
    """Bytes of all media of one request."""

    max_request_pixels: int = 1 << 30
    """Pixels of all images of one request, as they are in their files."""

    max_body_bytes: int = 128 << 20
    """Bytes of one request body."""

    max_inflight_body_bytes: int = 1 << 30
    """Bytes of all request bodies that are being read or answered, above which new ones are refused as overloaded."""

    request_timeout_s: float = 600.0
    """Seconds that one request may take in all."""

    stream_open_s: float = 15.0
    """Seconds that a stream's status waits for its first token, so that an error before it has its own status; then it
    is 200, and comments keep the connection alive."""

    encoder_wait_s: float = 30.0
    """Seconds that media which is in no cache waits for an encoder while none is there; then 503."""

    decoder_wait_s: float = 60.0
    """Seconds that a request, also one whose decoder died, waits for a decoder while none is there; then 503."""

    media_timeout_s: float = 20.0
    """Seconds that fetching one media URL may take in all."""

    allow_private_media_hosts: tuple[str, ...] = ()
    """Hosts that media URLs may name although their addresses are loopback, private or link-local, such as
    files.internal or 10.0.0.5:8080; "*" allows all, for where clients are trusted. May be given several times."""

    max_requests: int = 2048
    """Requests that one gateway runs at once, above which new ones are refused as overloaded."""

    api_keys: tuple[str, ...] = ()
    """API keys, each KEY or its digest as sha256:HEX. With any, or a file of them, all routes but /health, /ready,
    /metrics and /autoscale need one. Better given in the environment or a file than on the command line."""

    api_key_file: Path | None = None
    """File of API keys, one a line: KEY, or NAME KEY, then limits such as requests_per_minute=60 max_inflight=8. Read
    anew when it changes."""

    key_requests_per_minute: float = 0.0
    """Requests a minute of each API key that has no limit of its own; 0 is no limit. Beyond it: 429."""

    key_max_inflight: int = 0
    """Requests at once of each API key that has no limit of its own; 0 is no limit. Beyond it: 429."""

    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may use the API, such as https://app.example; "*" allows any."""

    access_log: bool = False
    """Log a line for every HTTP request: ids, route, status, key name, bytes and time, and nothing of its contents."""

    allowed_media_domains: tuple[str, ...] = ()
    """The only hosts that media URLs may name, such as images.example.com, or *.example.com for all below it; redirects
    too. By default any public host. May be given several times."""

    allowed_local_media_path: Path | None = None
    """Folder that file: URLs may lead into, and nowhere else; without it they are refused."""

    max_inflight_media_bytes: int = 1 << 30
    """Bytes of media that running requests hold, in memory and in files, above which more are refused as overloaded."""

    max_media_memory_bytes: int = 256 << 20
    """Bytes of media that running requests hold in memory, above which they are written to files until needed."""

    media_spool_dir: Path | None = None
    """Folder of these files, which have no names there; by default the system's for temporary files."""

    max_known_urls: int = 10_000
    """Media URLs whose file is remembered by its key while its host vouches for it (ETag, max-age); 0 is none."""
