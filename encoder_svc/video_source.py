"""Video bytes to a stream of decoded frames, for the containers that we accept.

Owns the container and codec lists, the limits, and what a frame is: upright, RGB on demand. MP4/MOV and WebM/MKV go
through PyAV, GIF and lists of JPEG through Pillow (so that a frame is the picture that `image_url` gives). The demuxer
is chosen by the file's first bytes and may open nothing but those bytes. Knows nothing of sampling or grids. Runs in
the encoder's media threads.
"""

import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BytesIO
from typing import NamedTuple, Protocol, TypeAlias

import av
import numpy as np
from PIL import Image

from common.errors import Cancelled, MediaTooLarge, UnsupportedMedia
from common.image_header import decoding_errors_mapped, open_image
from encoder_svc.image_decode import load_rgb_image, to_rgb
from encoder_svc.jpeg_frames import JPEG_START, split_jpegs

VIDEO_CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg"})
VideoPacket: TypeAlias = "av.packet.Packet[av.video.stream.VideoStream]"
_STILL_BRANDS = (b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1")
_OLD_MOV_ATOMS = (b"moov", b"mdat", b"wide", b"free", b"skip")  # QuickTime files of before 2000 begin with these
# Browsers and ffmpeg play GIF frames that claim 10 ms or less at 100 ms.
_GIF_SHORTEST_MS = 10
_GIF_DEFAULT_MS = 100
LARGEST_RATE_ERROR = 0.1  # of a stated rate: a file of few frames says little of its rate


@dataclass(frozen=True)
class VideoLimits:
    """What one video may cost. `num_threads` are the codec's own threads, besides the media thread.

    `is_over` is asked with each frame whether anybody still wants the video.
    """

    max_bytes: int = 256 * 1024 * 1024
    max_frames: int = 54_000
    max_duration_s: float = 3600.0
    max_canvas_pixels: int = 7680 * 4320
    max_decode_s: float = 60.0
    num_threads: int = 1
    is_over: Callable[[], bool] = lambda: False


class DecodedFrame(NamedTuple):
    """A decoded frame, upright. `to_rgb` converts it, and must be called before the next frame is asked for."""

    width: int
    height: int
    to_rgb: Callable[[], Image.Image]


class FrameSource(Protocol):
    """A video that can be played once."""

    def frames(self) -> Iterator[DecodedFrame]:
        """All frames that really decode, in order of presentation; a damaged tail just ends them."""

    def fps(self) -> float | None:
        """Frames a second, None when the container does not say. Known once `frames` has ended."""


def open_video(data: bytes, limits: VideoLimits) -> FrameSource:
    """The source for these bytes, by their content. Raises `UnsupportedMedia` or `MediaTooLarge`."""
    if len(data) > limits.max_bytes:
        raise MediaTooLarge(
            f"the video has {len(data)} bytes, above the limit of {limits.max_bytes}: send a shorter or smaller one"
        )
    if data.startswith((b"GIF87a", b"GIF89a")):
        return _GifSource(data, limits)
    if data.startswith(JPEG_START):
        return _JpegListSource(data, limits)
    if (data[4:8] == b"ftyp" and data[8:12] not in _STILL_BRANDS) or data[4:8] in _OLD_MOV_ATOMS:
        return _ContainerSource(data, "mp4", limits)
    if data.startswith(b"\x1a\x45\xdf\xa3"):
        return _ContainerSource(data, "matroska", limits)
    raise UnsupportedMedia(
        "the video's format is not supported: send MP4, MOV, WebM, MKV, GIF or a list of JPEG frames; "
        "stills go as image_url"
    )


def bounded_frames(source: FrameSource, limits: VideoLimits) -> Generator[DecodedFrame, None, None]:
    """The frames of a source while they stay within the limits; raises `MediaTooLarge` where they do not."""
    for index, frame in enumerate(source.frames()):
        check_num_frames(index + 1, limits)
        check_canvas(frame.width, frame.height, limits)
        yield frame


def check_num_frames(num_frames: int, limits: VideoLimits) -> None:
    """Refuse more frames than the limit."""
    if num_frames > limits.max_frames:
        raise MediaTooLarge(f"the video has more than {limits.max_frames} frames: send a shorter one")


def check_duration(duration_s: float, limits: VideoLimits) -> None:
    """Refuse a video that plays for longer than the limit."""
    if duration_s > limits.max_duration_s:
        raise MediaTooLarge(
            f"the video lasts {duration_s:.0f} s, above the limit of {limits.max_duration_s:.0f} s: send a shorter one"
        )


def check_canvas(width: int, height: int, limits: VideoLimits) -> None:
    """Refuse frames above the canvas limit."""
    if width * height > limits.max_canvas_pixels:
        raise MediaTooLarge(
            f"the video's frames are {width} x {height} pixels, above the limit of {limits.max_canvas_pixels} "
            "pixels: scale it down"
        )


class _Stopwatch:
    """Raises when decoding takes too long, as a file of a few kilobytes can ask for hours of work, or is in vain.

    It counts what the thread that made it computes, not what it waits for a core.
    """

    def __init__(self, limits: VideoLimits) -> None:
        self._is_over = limits.is_over
        self._limit_s = limits.max_decode_s
        self._deadline = time.thread_time() + limits.max_decode_s

    def check(self) -> None:
        if self._is_over():
            raise Cancelled("nobody waits for the video any more")
        if time.thread_time() > self._deadline:
            raise MediaTooLarge(
                f"the video takes more than {self._limit_s:g} s of a core to decode: send a shorter or smaller one"
            )


class _Pace:
    """How fast the frames of a container really play.

    The header of a file of variable rate may state the rate that its clock allows: 10 for a WebM whose frames are half
    a second apart. Such a header is not believed. Where both agree the header's number is the exact one, since times
    of Matroska are rounded to milliseconds.
    """

    def __init__(self) -> None:
        self._num_frames = 0
        self._first_s: float | None = None
        self._end_s = 0.0

    def add(self, frame: "av.VideoFrame") -> None:
        """The next frame; one without a time says nothing."""
        if frame.pts is None or frame.time_base is None:
            return
        time_s = float(frame.pts * frame.time_base)
        self._num_frames += 1
        if self._first_s is None:
            self._first_s = time_s
        self._end_s = time_s + float((frame.duration or 0) * frame.time_base)

    def agreed(self, stated: float | None) -> float | None:
        """The stated frames a second, or those that were seen where these are others."""
        if self._first_s is None or self._num_frames < 2 or self._end_s <= self._first_s:
            return stated
        seen = self._num_frames / (self._end_s - self._first_s)
        if stated is not None and abs(stated / seen - 1) <= LARGEST_RATE_ERROR:
            return stated
        return seen


class _ContainerSource:
    """MP4 or WebM through PyAV."""

    def __init__(self, data: bytes, demuxer: str, limits: VideoLimits) -> None:
        self._data = data
        self._demuxer = demuxer
        self._limits = limits
        self._stated_fps: float | None = None
        self._pace = _Pace()

    def fps(self) -> float | None:
        return self._pace.agreed(self._stated_fps)

    def frames(self) -> Iterator[DecodedFrame]:
        stopwatch = _Stopwatch(self._limits)
        with decoding_errors_mapped("video"), self._open() as container:
            stream = self._prepare_stream(container)
            for packet in readable_packets(container, stream):
                stopwatch.check()
                for frame in _decoded(stream.codec_context, packet):
                    stopwatch.check()
                    self._pace.add(frame)
                    yield _upright(frame)

    def _open(self) -> "av.container.InputContainer":
        # The options also reach the decoders that ffmpeg opens while it looks for stream facts. Their canvas limit is
        # wider than ours, since beyond it the size is lost and our error could not name it.
        options = {
            "protocol_whitelist": "none",
            "enable_drefs": "0",
            "max_pixels": str(4 * self._limits.max_canvas_pixels),
            "threads": str(self._limits.num_threads),
        }
        return av.open(BytesIO(self._data), "r", format=self._demuxer, options=options, io_open=_refuse_to_open)

    def _prepare_stream(self, container: "av.container.InputContainer") -> "av.video.stream.VideoStream":
        stream = container.streams.best("video")
        if not isinstance(stream, av.video.stream.VideoStream) or stream.codec_context is None:
            raise UnsupportedMedia("the file has no video track: send a video, or a still as image_url")
        codec = stream.codec_context.codec.canonical_name
        if codec not in VIDEO_CODECS:
            raise UnsupportedMedia(
                f"the video's codec {codec} is not supported: send one of {', '.join(sorted(VIDEO_CODECS))}"
            )
        context = stream.codec_context
        if context.width < 1 or context.height < 1:
            raise UnsupportedMedia(
                f"the video's frame size cannot be read or is far above the limit of {self._limits.max_canvas_pixels} "
                "pixels: send the whole file, or scale it down"
            )
        check_canvas(context.width, context.height, self._limits)
        # What the header promises already is refused before anything is decoded; what it hides, once it shows.
        check_num_frames(stream.frames, self._limits)
        check_duration((container.duration or 0) / av.time_base, self._limits)
        context.thread_count = self._limits.num_threads
        # Slice threads only: with frame threads the frames that survive a damaged file would depend on timing.
        context.thread_type = "SLICE"
        context.options = {"max_pixels": str(self._limits.max_canvas_pixels)}
        rate = stream.average_rate or stream.guessed_rate
        self._stated_fps = float(rate) if rate else None
        return stream


def _refuse_to_open(*_: object) -> object:
    raise PermissionError("a video may not refer to other files")


def readable_packets(
    container: "av.container.InputContainer", stream: "av.video.stream.VideoStream"
) -> Iterator["VideoPacket | None"]:
    """The packets up to the first damage that the demuxer cannot pass; None lets the decoder give what it holds."""
    with suppress(av.error.FFmpegError):
        yield from container.demux(stream)
    yield None


def _decoded(context: "av.video.codeccontext.VideoCodecContext", packet: "VideoPacket | None") -> list["av.VideoFrame"]:
    """The frames of a packet, none for a damaged one: its neighbours still count."""
    with suppress(av.error.InvalidDataError, av.error.EOFError):
        return context.decode(packet)
    return []


def _upright(frame: "av.VideoFrame") -> DecodedFrame:
    # The display matrix tells how far to turn, counter-clockwise in degrees.
    quarter_turns = round(frame.rotation / 90) % 4

    def convert() -> Image.Image:
        rgb = frame.to_ndarray(format="rgb24", threads=1)
        return Image.fromarray(np.ascontiguousarray(np.rot90(rgb, quarter_turns)))

    width, height = frame.width, frame.height
    if quarter_turns % 2:
        width, height = height, width
    return DecodedFrame(width, height, convert)


class _GifSource:
    """An animated GIF through Pillow, each frame composed with those before it, on white."""

    def __init__(self, data: bytes, limits: VideoLimits) -> None:
        self._data = data
        self._limits = limits
        self._num_frames = 0
        self._duration_ms = 0.0

    def fps(self) -> float | None:
        return 1000.0 * self._num_frames / self._duration_ms if self._duration_ms else None

    def frames(self) -> Iterator[DecodedFrame]:
        stopwatch = _Stopwatch(self._limits)
        image, _ = open_image(self._data, max_canvas_pixels=self._limits.max_canvas_pixels)
        with image:
            while _try_load_frame(image, self._num_frames):
                stopwatch.check()
                self._num_frames += 1
                duration_ms = float(image.info.get("duration", 0))
                self._duration_ms += duration_ms if duration_ms > _GIF_SHORTEST_MS else _GIF_DEFAULT_MS
                yield DecodedFrame(image.width, image.height, lambda: to_rgb(image))


class _JpegListSource:
    """JPEG pictures one after another. Nothing says how fast they play."""

    def __init__(self, data: bytes, limits: VideoLimits) -> None:
        self._data = data
        self._limits = limits

    def fps(self) -> float | None:
        return None

    def frames(self) -> Iterator[DecodedFrame]:
        stopwatch = _Stopwatch(self._limits)
        for index, jpeg in enumerate(split_jpegs(self._data, self._limits.max_frames)):
            stopwatch.check()
            try:
                image = load_rgb_image(bytes(jpeg), max_canvas_pixels=self._limits.max_canvas_pixels)
            except UnsupportedMedia as exc:
                raise UnsupportedMedia(f"frame {index} of the list cannot be decoded: {exc.message}") from exc
            yield DecodedFrame(image.width, image.height, lambda image=image: image)  # type: ignore[misc]


def _try_load_frame(image: Image.Image, index: int) -> bool:
    """Go to a frame and decode it; False behind the last one that is whole."""
    try:
        image.seek(index)
        image.load()
    except MemoryError:
        raise
    except Exception:
        # Pillow raises EOFError behind the last frame and nearly anything inside a damaged one.
        return False
    return True
