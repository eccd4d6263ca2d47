"""A checkpoint's media settings: what the gateway and the encoder must read alike, so that their grids agree.

Owns the reading of `preprocessor_config.json`, `video_preprocessor_config.json`, the nested `processor_config.json`
of newer checkpoints, and the vision facts of `config.json`. An absent key has the default of transformers 5.24; a
setting that we do not reproduce stops the start. Knows nothing of pixels, torch or the environment. Runs once, at
start-up.
"""

import math
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from common.errors import ConfigError, InvalidRequest
from common.messages import MediaOptions

# Changes whenever the meaning of a setting changes, so that old cached embeddings are not taken for new ones.
_CANONICAL_VERSION = "tandem-processor-1"
_CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
_CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
_IMAGENET_STANDARD = (0.5, 0.5, 0.5)
_MAX_PIXELS = 1 << 31
_BICUBIC = 3

Triple = tuple[float, float, float]


class ImageSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How an image becomes patches. Pixel limits are areas after the resize."""

    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    image_mean: Triple
    image_std: Triple
    rescale_factor: float

    @property
    def factor(self) -> int:
        """Pixels along one side of a vision token: every resized side is a multiple of it."""
        return self.patch_size * self.merge_size


class VideoSettings(ImageSettings, frozen=True, kw_only=True):
    """How a video becomes patches. Pixel limits are summed over the sampled frames."""

    fps: float
    min_frames: int
    max_frames: int
    cap_pixels_per_frame: bool
    max_video_tokens: int
    num_frames: int | None = None  # of a request: this many frames instead of `fps`


SettingsT = TypeVar("SettingsT", ImageSettings, VideoSettings)


class MediaTokenIds(msgspec.Struct, frozen=True, kw_only=True):
    """The token ids that stand for media in a prompt."""

    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int


class ProcessorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything between media bytes and patches that a checkpoint decides."""

    image: ImageSettings
    video: VideoSettings
    tokens: MediaTokenIds

    @classmethod
    def load(cls, checkpoint_dir: Path) -> "ProcessorConfig":
        """Read the settings of a checkpoint folder. Raises `ConfigError` for absent, absurd or unsupported ones."""
        config = _read_json(checkpoint_dir, "config.json")
        if config is None:
            raise ConfigError("config.json is missing from the checkpoint: give the folder of a Qwen3-VL checkpoint")
        vision = _Section("config.json vision_config", _object(config, "vision_config", "config.json"))
        nested = _read_json(checkpoint_dir, "processor_config.json") or {}
        image = _section(checkpoint_dir, nested, "image_processor", ["preprocessor_config.json"])
        video = _section(
            checkpoint_dir,
            nested,
            "video_processor",
            ["video_preprocessor_config.json", "preprocessor_config.json"],
        )
        return cls(
            image=_image_settings(image, vision),
            video=_video_settings(video, vision),
            tokens=_token_ids(_Section("config.json", config)),
        )

    def with_options(self, options: MediaOptions) -> "ProcessorConfig":
        """These settings for one item whose request asks for others.

        A request may narrow the checkpoint's limits, never widen them: values beyond a limit become the limit.
        """
        if options.fps is not None and options.num_frames is not None:
            raise InvalidRequest(
                f"fps {options.fps:g} and num_frames {options.num_frames} exclude each other: send only one"
            )
        low, high = options.min_pixels, options.max_pixels
        if low is not None and high is not None and low > high:
            raise InvalidRequest(f"min_pixels {low} is above max_pixels {high}: send a smaller min_pixels")
        max_frames = min(options.max_frames or self.video.max_frames, self.video.max_frames)
        video = msgspec.structs.replace(
            _with_pixel_limits(self.video, low, high),
            fps=options.fps or self.video.fps,
            num_frames=None if options.num_frames is None else min(options.num_frames, max_frames),
            min_frames=min(self.video.min_frames, max_frames),
            max_frames=max_frames,
        )
        image = _with_pixel_limits(self.image, low, high)
        return ProcessorConfig(image=image, video=video, tokens=self.tokens)

    def canonical_bytes(self) -> bytes:
        """The settings that change pixels, in one spelling: the fingerprint's input."""
        return msgspec.json.encode([_CANONICAL_VERSION, self.image, self.video], order="sorted")


def _with_pixel_limits(settings: SettingsT, low: int | None, high: int | None) -> SettingsT:
    smallest, largest = settings.min_pixels, settings.max_pixels
    if high is not None:
        largest = min(max(high, smallest), largest)
    if low is not None:
        smallest = min(max(low, smallest), largest)
    return msgspec.structs.replace(settings, min_pixels=smallest, max_pixels=largest)


class _Section:
    """One JSON object and the name that its errors carry."""

    def __init__(self, name: str, values: dict[str, Any]) -> None:
        self.name = name
        self.values = values

    def error(self, key: str, limit: str) -> ConfigError:
        return ConfigError(f"{self.name}: {key} is {self.values.get(key)!r}, but it must be {limit}")

    def integer(self, key: str, default: int, low: int, high: int) -> int:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.error(key, f"an integer from {low} to {high}")
        return value

    def number(self, key: str, default: float, low: float, high: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise self.error(key, f"a number from {low:g} to {high:g}")
        return float(value)

    def boolean(self, key: str, default: bool) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def triple(self, key: str, default: Triple) -> Triple:
        value = self.values.get(key)
        if value is None:
            return default
        items = value if isinstance(value, list) else [value] * 3
        is_numeric = all(isinstance(v, int | float) and not isinstance(v, bool) for v in items)
        if len(items) != 3 or not is_numeric or not all(math.isfinite(v) and abs(v) < 1e6 for v in items):
            raise self.error(key, "three finite numbers, or one for all channels")
        return float(items[0]), float(items[1]), float(items[2])

    def require(self, key: str, expected: object) -> None:
        """Refuse a setting that we do not reproduce, rather than answer with other pixels."""
        if self.values.get(key, expected) != expected:
            raise self.error(key, f"{expected!r}: nothing else is supported")


def _read_json(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / name
    try:
        value = msgspec.json.decode(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as exc:
        raise ConfigError(f"{name} of the checkpoint cannot be read: it must be a JSON file") from exc
    if not isinstance(value, dict):
        raise ConfigError(f"{name} of the checkpoint holds a {type(value).__name__}: it must hold a JSON object")
    return value


def _object(values: dict[str, Any], key: str, name: str) -> dict[str, Any]:
    value = values.get(key) or {}
    if not isinstance(value, dict):
        raise ConfigError(f"{name}: {key} is {value!r}, but it must be a JSON object")
    return value


def _section(folder: Path, nested: dict[str, Any], nested_key: str, names: list[str]) -> _Section:
    """The first source that exists, in the reference's order: nested, then the files in turn."""
    if nested.get(nested_key) is not None:
        return _Section(f"processor_config.json {nested_key}", _object(nested, nested_key, "processor_config.json"))
    for name in names:
        values = _read_json(folder, name)
        if values is not None:
            return _Section(name, values)
    raise ConfigError(f"{names[0]} is missing from the checkpoint: copy it from the model's publisher")


def _image_settings(section: _Section, vision: _Section) -> ImageSettings:
    common = _common_settings(section, vision, _CLIP_MEAN, _CLIP_STD)
    common["min_pixels"], common["max_pixels"] = _pixel_limits(
        section, (56 * 56, 28 * 28 * 1280), is_size_first=False, factor=common["patch_size"] * common["merge_size"]
    )
    return ImageSettings(**common)


def _video_settings(section: _Section, vision: _Section) -> VideoSettings:
    common = _common_settings(section, vision, _IMAGENET_STANDARD, _IMAGENET_STANDARD)
    common["min_pixels"], common["max_pixels"] = _pixel_limits(
        section,
        (128 * 32 * 32, 32 * 32 * 768),
        is_size_first=True,
        factor=common["patch_size"] * common["merge_size"],
    )
    section.require("do_sample_frames", True)
    section.require("num_frames", None)
    min_frames = section.integer("min_frames", 4, 1, 1 << 20)
    max_frames = section.integer("max_frames", 768, 1, 1 << 20)
    if min_frames > max_frames:
        raise ConfigError(f"{section.name}: min_frames {min_frames} is above max_frames {max_frames}")
    return VideoSettings(
        **common,
        fps=section.number("fps", 2.0, 1e-3, 1e3),
        min_frames=min_frames,
        max_frames=max_frames,
        cap_pixels_per_frame=section.boolean("cap_pixels_per_frame", False),
        max_video_tokens=section.integer("max_video_tokens", 768, 1, 1 << 20),
    )


def _common_settings(section: _Section, vision: _Section, mean: Triple, std: Triple) -> dict[str, Any]:
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        section.require(key, True)
    section.require("resample", _BICUBIC)
    image_std = section.triple("image_std", std)
    if any(abs(value) < 1e-9 for value in image_std):
        raise section.error("image_std", "different from zero")
    return {
        "patch_size": _shared_integer(section, "patch_size", vision, "patch_size", 16, 256),
        "temporal_patch_size": _shared_integer(section, "temporal_patch_size", vision, "temporal_patch_size", 2, 16),
        "merge_size": _shared_integer(section, "merge_size", vision, "spatial_merge_size", 2, 16),
        "image_mean": section.triple("image_mean", mean),
        "image_std": image_std,
        "rescale_factor": section.number("rescale_factor", 1 / 255, 1e-9, 1e3),
    }


def _shared_integer(section: _Section, key: str, vision: _Section, vision_key: str, default: int, high: int) -> int:
    """A size that the tower's weights fix; a processor that states another one belongs to another model."""
    of_tower = vision.integer(vision_key, default, 1, high)
    value = section.integer(key, of_tower, 1, high)
    if value != of_tower:
        raise ConfigError(
            f"{section.name}: {key} is {value}, but {vision.name} has {vision_key} {of_tower}: "
            "take both files from the same checkpoint"
        )
    return value


def _pixel_limits(section: _Section, defaults: tuple[int, int], *, is_size_first: bool, factor: int) -> tuple[int, int]:
    """Both spellings: `size: {shortest_edge, longest_edge}` and `min_pixels`, `max_pixels`.

    The reference lets `min_pixels` override `size` for images only.
    """
    size = _Section(f"{section.name} size", _object(section.values, "size", section.name))
    limits = []
    for edge, key, default in (
        ("shortest_edge", "min_pixels", defaults[0]),
        ("longest_edge", "max_pixels", defaults[1]),
    ):
        sources = [(section, key), (size, edge), (size, key)]
        if is_size_first:
            sources = [*sources[1:], sources[0]]
        given = [(source, name) for source, name in sources if source.values.get(name) is not None]
        if not given and size.values:
            raise ConfigError(f"{size.name} has no {edge}: it needs shortest_edge and longest_edge")
        limits.append(given[0][0].integer(given[0][1], default, 1, _MAX_PIXELS) if given else default)
    if limits[0] > limits[1] or limits[1] < factor * factor:
        raise ConfigError(
            f"{section.name}: pixels from {limits[0]} to {limits[1]} are impossible: the smallest must not be above "
            f"the largest, and the largest must hold one token of {factor}x{factor}"
        )
    return limits[0], limits[1]


def _token_ids(config: _Section) -> MediaTokenIds:
    ids = {
        key: config.integer(key, default, 0, (1 << 31) - 1)
        for key, default in (
            ("image_token_id", 151655),
            ("video_token_id", 151656),
            ("vision_start_token_id", 151652),
            ("vision_end_token_id", 151653),
        )
    }
    if len(set(ids.values())) != len(ids):
        raise ConfigError(f"config.json: media token ids {sorted(ids.values())} must all be different")
    return MediaTokenIds(**ids)
