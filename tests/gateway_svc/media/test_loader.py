"""Media of a request: data URIs by explicit rules, limits, keys, grids and errors that name the item."""

import asyncio
import base64
import io
import json
import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from common.errors import InvalidRequest, MediaTooLarge, UnsupportedMedia
from common.messages import MediaOptions, VideoFacts
from gateway_svc.media.data_uri import decode_data_uri
from gateway_svc.media.fetch import FetchLimits, MediaFetcher
from gateway_svc.media.item import MediaReference
from gateway_svc.media.loader import MediaLimits, MediaLoader
from tests.gateway_svc.fake_backend import CONFIG, MODEL, FakeBackend, harness
from tests.paths import SHARED, needs_shared

DATA = bytes(range(256))
BASE64 = base64.b64encode(DATA).decode()


def test_frames_of_a_list_are_put_one_after_another() -> None:
    assert decode_data_uri(f"data:video/jpeg;base64,{BASE64},{BASE64}", 1000, "p") == DATA * 2
    with pytest.raises(InvalidRequest, match="frame 1 of p is empty"):
        decode_data_uri(f"data:video/jpeg;base64,{BASE64},,{BASE64}", 1000, "p")
    with pytest.raises(MediaTooLarge):
        decode_data_uri(f"data:video/jpeg;base64,{BASE64},{BASE64}", len(DATA) + 10, "p")
    with pytest.raises(InvalidRequest):
        decode_data_uri(f"data:image/jpeg;base64,{BASE64},{BASE64}", 1000, "p")


def png(width: int = 64, height: int = 64) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(buffer, "PNG")
    return buffer.getvalue()


def data_uri(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def image_part(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": url}


def loader(backend: FakeBackend | None = None, **limits: Any) -> MediaLoader:
    return MediaLoader(backend or FakeBackend(), CONFIG, MediaFetcher(FetchLimits()), MediaLimits(**limits))


async def load(media: MediaLoader, *references: MediaReference, **fields: Any) -> Any:
    options = {"image": MediaOptions(), "video": MediaOptions()}
    settings = {"fingerprint": "f" * 64, "cache_salt": None, "deadline": 1e9, **fields}
    return await media.load(references, options, **settings)


@pytest.mark.parametrize(
    "uri",
    [
        f"data:image/png;base64,{BASE64}",
        f"DATA:image/png;Base64,{BASE64}",
        f"data:;base64,{BASE64}",
        f"data:image/jpeg;charset=utf-8;base64,{BASE64}",
        f"data:image/png;base64,{BASE64.rstrip('=')}",
        f"data:image/png;base64,{BASE64.replace('+', '-').replace('/', '_')}",
        f"data:image/png;base64,{BASE64.replace('/', '_').rstrip('=')}",
        "data:image/png;base64," + "\r\n".join(BASE64[i : i + 76] for i in range(0, len(BASE64), 76)),
        f"data:image/png;base64,{BASE64.replace('+', '%2B').replace('/', '%2F')}",
        "data:application/octet-stream," + "".join(f"%{byte:02x}" for byte in DATA),
    ],
    ids=lambda uri: uri[:24],
)
def test_valid_data_uris_give_their_bytes(uri: str) -> None:
    assert decode_data_uri(uri, 1 << 20, "x") == DATA


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("data:image/png;base64,", "without data"),
        ("data:image/png;base64" + BASE64[:8], "without a comma"),
        ("data:image/png;base64,AAAAA", "5 characters"),
        ("data:image/png;base64,AAAA=", "1 of padding"),
        ("data:image/png;base64,AA=A", "character 2"),
        ("data:image/png;base64,AA*A", "character 2"),
        ("data:image/png;base64,AAé=", "alphabet"),
        ("data:text/plain,é", "percent-encode"),
        ("data:,", "without data"),
    ],
)
def test_other_data_uris_are_refused_with_the_reason(uri: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message) as caught:
        decode_data_uri(uri, 1 << 20, "messages[0].content[0]")
    assert caught.value.param == "messages[0].content[0]"


@pytest.mark.parametrize("uri", [f"data:;base64,{BASE64}", "data:," + "%00" * 256])
def test_data_beyond_the_limit_is_refused(uri: str) -> None:
    assert len(decode_data_uri(uri, 256, "x")) == 256
    with pytest.raises(MediaTooLarge, match="255"):
        decode_data_uri(uri, 255, "x")


@given(st.binary(max_size=60), st.integers(1, 9), st.integers(0, 3), st.booleans(), st.booleans())
def test_slices_decode_to_what_the_whole_decodes_to(
    data: bytes, size: int, every: int, is_padded: bool, is_url_safe: bool
) -> None:
    digits = (base64.urlsafe_b64encode if is_url_safe else base64.b64encode)(data).decode()
    if not is_padded:
        digits = digits.rstrip("=")
    if every:
        digits = "\r\n".join(digits[i : i + every] for i in range(0, len(digits), every)) + "\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway_svc.media.data_uri._SLICE_CHARACTERS", size)
        if data:
            assert decode_data_uri(f"data:;base64,{digits}", 60, "x") == data


@given(st.text(alphabet="AB+/=-* \n", max_size=24), st.integers(1, 9))
def test_slices_refuse_what_the_whole_refuses(digits: str, size: int) -> None:
    def outcome(slice_characters: int) -> bytes | str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("gateway_svc.media.data_uri._SLICE_CHARACTERS", slice_characters)
            try:
                return decode_data_uri(f"data:;base64,{digits}", 60, "x")
            except InvalidRequest:
                return "refused"

    plain = "".join(digits.split()).replace("-", "+")
    missing = -len(plain.rstrip("=")) % 4
    is_valid = set(plain.rstrip("=")) <= set("AB+/") and len(plain) - len(plain.rstrip("=")) in (0, missing)
    expected = base64.b64decode(plain.rstrip("=") + "=" * missing) if is_valid and missing < 3 and plain else b""
    assert outcome(size) == outcome(1 << 20) == (expected or "refused")


async def test_an_image_has_its_key_grid_and_bytes() -> None:
    (item,) = await load(loader(), MediaReference(data_uri(png(320, 240)), "image", "p"))
    assert item.grid == (1, 16, 20)
    assert await item.source.read() == png(320, 240)
    (again,) = await load(loader(), MediaReference(data_uri(png(320, 240), "image/webp"), "image", "q"))
    assert again.key == item.key
    (salted,) = await load(loader(), MediaReference(data_uri(png(320, 240)), "image", "p"), cache_salt="t")
    assert salted.key != item.key


async def test_a_large_image_is_hashed_in_a_thread_with_the_same_key() -> None:
    small = png()
    padded = small + bytes(200_000)
    (item,) = await load(loader(), MediaReference(data_uri(padded), "image", "p"))
    assert item.grid == (1, 8, 8)
    assert await item.source.read() == padded


async def test_a_video_is_probed_and_a_picture_is_not() -> None:
    backend = FakeBackend(facts=VideoFacts(grid=(2, 4, 6), frame_indices=[0, 1, 2, 3], timestamps=[0.3, 1.6]))
    video, image = await load(
        loader(backend),
        MediaReference(data_uri(b"anything", "video/mp4"), "video", "v"),
        MediaReference(data_uri(png()), "image", "i"),
    )
    assert backend.probes == [(MediaOptions(), 8)]
    assert (video.grid, video.facts) == ((2, 4, 6), backend.facts)
    assert image.facts is None


@pytest.mark.parametrize(
    ("source", "kind"), [(b"<svg/>", UnsupportedMedia), (png(201 * 4, 4), InvalidRequest), (b"xx", UnsupportedMedia)]
)
async def test_a_bad_image_is_named(source: bytes, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        await load(
            loader(), MediaReference(data_uri(png()), "image", "a"), MediaReference(data_uri(source), "image", "b.c")
        )
    assert caught.value.param == "b.c"  # type: ignore[attr-defined]
    assert str(caught.value).startswith("b.c: ")


async def test_too_many_items_are_refused_before_anything_is_loaded() -> None:
    setup = harness(media_limits=MediaLimits(max_items={"image": 2, "video": 0}))
    parts = [image_part({"url": data_uri(png())}) for _ in range(3)]
    response = await setup.chat(messages=[{"role": "user", "content": parts}])
    assert response.status_code == 400
    error = response.json()["error"]
    assert "3 image items, above the limit of 2" in error["message"]
    assert error["param"] == "messages[0].content[2]"
    assert (await setup.chat(messages=[{"role": "user", "content": parts[:2]}])).status_code == 200


async def test_usage_counts_media_by_where_they_came_from() -> None:
    for outcome, name in (
        ("kv", "cached_media_tokens"),
        ("decoder", "cached_media_tokens"),
        ("cache", "cached_media_tokens"),
        ("encoded", "encoded_media_tokens"),
    ):
        setup = harness(FakeBackend(media_outcome=outcome))  # type: ignore[arg-type]
        body = (await setup.chat(messages=[{"role": "user", "content": [image_part(data_uri(png()))]}])).json()
        details = body["usage"]["prompt_tokens_details"]
        assert details.pop(name) == 16
        assert details == {
            "cached_tokens": 3,
            **dict.fromkeys({"cached_media_tokens", "encoded_media_tokens"} - {name}, 0),
        }
        assert (
            setup.registry.get_sample_value("tandem_media_items_total", {"modality": "image", "outcome": outcome}) == 1
        )


async def test_a_picture_that_is_there_twice_counts_as_encoded_once(logs: list[Any]) -> None:
    setup = harness()
    parts = [image_part(data_uri(png())), image_part(data_uri(png())), image_part(data_uri(png(128, 192)))]
    usage = (await setup.chat(messages=[{"role": "user", "content": parts}])).json()["usage"]
    details = usage["prompt_tokens_details"]
    assert (details["encoded_media_tokens"], details["cached_media_tokens"]) == (16 + 24, 16)
    assert logs[-1]["media"] == ["image:encoded", "image:decoder", "image:encoded"]


async def test_options_reach_the_grid_and_the_key_and_stay_within_the_model_s_limits() -> None:
    setup = harness()
    body = [{"role": "user", "content": [image_part(data_uri(png(512, 512)))]}]
    for kwargs in (None, {"max_pixels": 65_536}, {"max_pixels": 1 << 30}, {"fps": 1.0}):
        assert (await setup.chat(messages=body, mm_processor_kwargs=kwargs)).status_code == 200
    plain, small, huge, with_fps = (media[0] for media in setup.backend.media)
    assert (plain.grid, small.grid, huge.grid) == ((1, 32, 32), (1, 16, 16), (1, 32, 32))
    assert small.key != plain.key
    assert with_fps.key == plain.key


async def test_an_image_of_low_detail_has_no_more_pixels_than_512_by_512_and_a_key_of_its_own() -> None:
    wide = msgspec.structs.replace(CONFIG, image=msgspec.structs.replace(CONFIG.image, max_pixels=1 << 22))
    media = MediaLoader(FakeBackend(), wide, MediaFetcher(FetchLimits()), MediaLimits())
    url = data_uri(png(1024, 768))
    options = [MediaOptions(), MediaOptions(max_pixels=1 << 16), MediaOptions(min_pixels=1 << 20, max_pixels=1 << 21)]
    settings: dict[str, Any] = {"fingerprint": "f" * 64, "cache_salt": None, "deadline": 1e9}
    references = [MediaReference(url, "image", "a"), MediaReference(url, "image", "b", is_low_detail=True)]
    keys, pixels = set(), []
    for wished in options:
        plain, low = await media.load(references, {"image": wished}, **settings)
        keys.update((plain.key, low.key))
        pixels.append((256 * math.prod(plain.grid), 256 * math.prod(low.grid)))
    assert pixels[0][0] == 1024 * 768
    assert all(low <= 512 * 512 for _, low in pixels)
    assert pixels[1][0] == pixels[1][1] <= 1 << 16, "what a request limits further stays so"
    assert pixels[2][0] > 1 << 20
    assert len(keys) == 5


@pytest.mark.parametrize("route", ["chat", "responses"])
async def test_the_detail_of_a_request_reaches_its_picture(route: str) -> None:
    setup = harness()
    url = data_uri(png())
    for detail in ("auto", "high", "low"):
        if route == "chat":
            part: dict[str, Any] = image_part({"url": url, "detail": detail})
            response = await setup.chat(messages=[{"role": "user", "content": [part]}])
        else:
            part = {"type": "input_image", "image_url": url, "detail": detail}
            body = {"model": MODEL, "input": [{"role": "user", "content": [part]}]}
            response = await setup.client.post("/v1/responses", json=body)
        assert response.status_code == 200, response.text
    auto, high, low = (media[0] for media in setup.backend.media)
    assert auto.options == high.options == MediaOptions()
    assert low.options == MediaOptions(max_pixels=512 * 512)


@pytest.mark.parametrize("kwargs", [{"fps": 1.0, "num_frames": 4}, {"min_pixels": 9, "max_pixels": 8}])
async def test_options_that_exclude_each_other_are_refused(kwargs: dict[str, Any]) -> None:
    body = [{"role": "user", "content": [image_part(data_uri(png()))]}]
    response = await harness().chat(messages=body, mm_processor_kwargs=kwargs)
    assert response.json()["error"]["param"] == "mm_processor_kwargs"


async def test_a_prompt_that_is_too_long_is_refused_before_its_media_is_loaded() -> None:
    backend = FakeBackend()
    parts = [{"type": "text", "text": "word " * 20_000}, {"type": "video_url", "video_url": data_uri(b"x")}]
    response = await harness(backend).chat(messages=[{"role": "user", "content": parts}])
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "context_length_exceeded"
    assert backend.probes == []


async def test_the_first_failure_cancels_the_other_items() -> None:
    cancelled = asyncio.Event()

    class Slow(FakeBackend):
        async def probe_video(self, *_: Any) -> VideoFacts:
            try:
                await asyncio.wait_for(asyncio.Event().wait(), 10)
            except asyncio.CancelledError:
                cancelled.set()
                raise
            raise AssertionError

    with pytest.raises(UnsupportedMedia):
        await load(
            loader(Slow()),
            MediaReference(data_uri(b"video"), "video", "a"),
            MediaReference(data_uri(b"no image" * 20_000), "image", "b"),
        )
    assert cancelled.is_set()


@needs_shared
async def test_equal_pictures_of_cases_have_equal_keys() -> None:
    for case in ("IMG-24", "IMG-25", "IMG-27", "IMG-29", "IMG-39"):
        setup = harness()
        for name in ("request", "same_0"):
            body = json.loads((SHARED / "cases" / case / f"{name}.json").read_text())
            assert (await setup.client.post("/v1/chat/completions", json=body)).status_code == 200
        first, second = setup.backend.media
        assert [item.key for item in first] == [item.key for item in second]


async def test_bytes_and_pixels_of_all_media_of_a_request_are_bounded_and_the_item_beyond_is_named() -> None:
    references = [MediaReference(data_uri(png(64, 64 + n)), "image", f"p{n}") for n in range(3)]
    num_bytes = sum(len(png(64, 64 + n)) for n in range(3))
    num_pixels = 64 * (64 + 65 + 66)
    assert len(await load(loader(max_request_bytes=num_bytes, max_request_pixels=num_pixels), *references)) == 3
    for limits, word in (
        ({"max_request_bytes": num_bytes - 1}, "bytes in all"),
        ({"max_request_pixels": num_pixels - 1}, "pixels in all"),
    ):
        with pytest.raises(MediaTooLarge, match=word) as caught:
            await load(loader(**limits), *references)
        assert caught.value.param == "p2"
        again = loader(**limits)
        for reference in references:
            await load(again, reference)  # another request begins anew
