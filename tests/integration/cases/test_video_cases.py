"""Videos that broke other servers, through the running system."""

import json

import httpx
import pytest

from tests.integration.cases.asking import ask, check_case, vision_tokens_of
from tests.integration.cases.manifest import FOLDER, Case, case, plain_cases
from tests.paths import needs_shared
from tests.tiny_tokenizer import tiny_tokenizer

pytestmark = [needs_shared, pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]


@pytest.mark.parametrize("entry", plain_cases("VID"))
async def test_video_case(client: httpx.AsyncClient, entry: Case) -> None:
    await check_case(client, entry)


@pytest.mark.parametrize("case_id", ["VID-02", "VID-08"])
async def test_a_prompt_has_the_time_and_the_tokens_of_each_pair_of_frames(
    client: httpx.AsyncClient, case_id: str
) -> None:
    body, expected = case(case_id).request(), json.loads((FOLDER / case_id / "expected.json").read_text())
    response = await ask(client, body)
    t, h, w = expected["grid"]
    assert vision_tokens_of(response) == t * h * w // 4
    pads = "<|video_pad|>" * (h * w // 4)
    frames = "".join(f"<{time} seconds><|vision_start|>{pads}<|vision_end|>" for time in expected["times"])
    texts = "".join(part.get("text", "") for part in body["messages"][0]["content"])
    prompt = f"<|im_start|>user\n<|vision_start|>{frames}<|vision_end|>{texts}<|im_end|>\n<|im_start|>assistant\n"
    assert response.json()["usage"]["prompt_tokens"] == len(tiny_tokenizer().encode(prompt).ids)
