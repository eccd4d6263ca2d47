"""Settings of the gateway, read once in `__main__`."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from common.settings import CommonSettings, Port


@dataclass(frozen=True, kw_only=True)
class GatewaySettings(CommonSettings):
    """Settings of `tandem gateway`."""

    port: Port = 8000
    """Port of the OpenAI API, and of /health, /ready and /metrics."""

    encoders: tuple[str, ...] = ()
    """Encoders, each as CONTROL,DATA addresses, such as tcp://host:7101,tcp://host:7102. May be given several times."""

    decoders: tuple[str, ...] = ()
    """Control addresses of the decoders, such as tcp://host:7201. May be given several times."""

    limit_mm_per_prompt: dict[str, int] = field(default_factory=dict)
    """Items of a kind that one request may have, such as '{"image": 4, "video": 1}'."""

    generation_config: Literal["auto", "none"] = "auto"
    """Take the sampling defaults of requests from the checkpoint's generation_config.json, or OpenAI's."""

    chat_template: Path | None = None
    """Chat template to use instead of the checkpoint's."""

    video_outer_pair: bool = True
    """Keep the template's vision_start and vision_end around a video's timestamped frames, as transformers 5.24 does;
    without it they are replaced, as in training and in vLLM."""

    max_media_bytes: int = 100 << 20
    """Bytes of one image or video file."""

    max_body_bytes: int = 128 << 20
    """Bytes of one request body."""

    max_inflight_body_bytes: int = 1 << 30
    """Bytes of all request bodies that are being read or answered, above which new ones are refused as overloaded."""

    request_timeout_s: float = 600.0
    """Seconds that one request may take in all."""

    encoder_wait_s: float = 30.0
    """Seconds that media which is in no cache waits for an encoder while none is there; then 503."""

    decoder_wait_s: float = 60.0
    """Seconds that a request, also one whose decoder died, waits for a decoder while none is there; then 503."""

    media_timeout_s: float = 20.0
    """Seconds that fetching one media URL may take in all."""

    allow_private_media_hosts: tuple[str, ...] = ()
    """Hosts that media URLs may name although their addresses are loopback, private or link-local, such as
    files.internal or 10.0.0.5:8080; "*" allows all, for where clients are trusted. May be given several times."""
