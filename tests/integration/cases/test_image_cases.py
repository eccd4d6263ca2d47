"""Images that broke other servers, through the running system."""

import base64
import io

import httpx
import psutil
import pytest
from PIL import Image

from tests.integration.cases.asking import ask, assert_same, check_case, error_of
from tests.integration.cases.manifest import Case, case, plain_cases
from tests.media_samples import encoded
from tests.paths import needs_shared
from tests.stack import Stack

pytestmark = [needs_shared, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("entry", plain_cases("IMG"))
async def test_image_case(client: httpx.AsyncClient, entry: Case) -> None:
    await check_case(client, entry)


async def test_a_grey_jpeg_beside_a_coloured_one_is_its_rgb_twin(client: httpx.AsyncClient) -> None:
    body = {**case("IMG-08").request(), "logprobs": True}
    response = await ask(client, body)
    part = body["messages"][0]["content"][0]["image_url"]
    grey = Image.open(io.BytesIO(base64.b64decode(part["url"].partition(",")[2])))
    assert grey.mode == "L"
    part["url"] = "data:image/png;base64," + base64.b64encode(encoded(grey.convert("RGB"))).decode()
    assert_same(response, await ask(client, body))


@pytest.mark.parametrize(
    ("case_id", "words"),
    [
        ("IMG-11", ["JPEG", "cut short"]),
        ("IMG-16", ["aspect ratio", "201"]),
        ("IMG-18", ["20000 x 20000", "limit"]),
        ("IMG-20", ["format is not supported"]),
        ("IMG-21", ["format is not supported"]),
        ("IMG-22", ["without data"]),
        ("IMG-31", ["comma"]),
    ],
)
async def test_a_refused_image_is_named_with_the_reason(
    client: httpx.AsyncClient, case_id: str, words: list[str]
) -> None:
    error = error_of(await ask(client, case(case_id).body()))
    assert error["param"] == "messages[0].content[0]"
    assert "messages[0].content[0]" in error["message"]
    for word in words:
        assert word in error["message"]


async def test_a_picture_that_claims_a_huge_canvas_costs_neither_time_nor_memory(
    client: httpx.AsyncClient, stack: Stack
) -> None:
    processes = [psutil.Process(stack.local.children[name].pid) for name in ("gateway-0", "encoder-0")]

    def used() -> tuple[int, float]:
        """Memory, and time of processors: what else the machine does is no matter."""
        times = [process.cpu_times() for process in processes]
        return sum(p.memory_info().rss for p in processes), sum(time.user + time.system for time in times)

    bytes_before, seconds_before = used()
    response = await ask(client, case("IMG-18").body())
    assert response.status_code in (400, 413)
    bytes_after, seconds_after = used()
    assert seconds_after - seconds_before < 1
    assert bytes_after - bytes_before < 50 << 20
