"""Items are read within limits, and a video that was probed is not looked through again."""

import pytest

from common.errors import InvalidRequest, MediaTooLarge
from common.messages import EncodeRequest, Grid, MediaOptions, Modality, ProbeRequest
from encoder_svc import media_reader
from encoder_svc.media_reader import MediaReader
from encoder_svc.preprocess import read_video
from encoder_svc.video_source import VideoLimits
from tests.media_samples import DEMO_PROCESSOR, flat_frames, png, video_file

VIDEO = video_file(flat_frames(6), fps=2)


def reader(max_canvas_pixels: int = 1 << 24, **limits: float) -> MediaReader:
    return MediaReader(
        DEMO_PROCESSOR,
        max_canvas_pixels=max_canvas_pixels,
        video_limits=VideoLimits(**limits),  # type: ignore[arg-type]
    )


def encode_request(modality: Modality, grid: Grid, key: str = "a") -> EncodeRequest:
    return EncodeRequest(
        request_id="r",
        key=key * 64,
        modality=modality,
        options=MediaOptions(),
        expected_grid=grid,
        fingerprint="f" * 64,
        time_left_s=1.0,
    )


def probe_request(key: str = "a") -> ProbeRequest:
    return ProbeRequest(request_id="r", key=key * 64, time_left_s=1.0)


def test_a_probed_video_is_not_probed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[bytes] = []
    original = media_reader.probe_video

    def counted(data: bytes, *args: object, **kwargs: object) -> object:
        probed.append(data)
        return original(data, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(media_reader, "probe_video", counted)
    subject = reader()
    facts = subject.probe(probe_request(), memoryview(VIDEO))
    assert subject.probe(probe_request(), memoryview(VIDEO)) == facts
    assert len(probed) == 1
    prepared = subject.prepare(encode_request("video", facts.grid), memoryview(VIDEO))
    expected = read_video(VIDEO, DEMO_PROCESSOR)
    assert (prepared.pixel_values == expected.pixel_values).all()


def test_a_video_that_was_never_probed_here_is_read_all_the_same() -> None:
    prepared = reader().prepare(encode_request("video", read_video(VIDEO, DEMO_PROCESSOR).grid_thw), memoryview(VIDEO))
    assert prepared.pixel_values.shape[0] > 0


def test_another_grid_than_promised_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="promised"):
        reader().prepare(encode_request("image", (1, 2, 2)), memoryview(png(64, 64)))


def test_the_limits_are_those_that_were_set() -> None:
    with pytest.raises(MediaTooLarge):
        reader(max_canvas_pixels=1000).prepare(encode_request("image", (1, 8, 8)), memoryview(png(64, 64)))
    with pytest.raises(MediaTooLarge):
        reader(max_frames=3).probe(probe_request(), memoryview(VIDEO))
