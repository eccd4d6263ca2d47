"""`docs/api.md` names every field of a request, and every one that is refused."""

import json
import re

from fastapi.routing import APIRoute

from common.image_header import DEFAULT_MAX_CANVAS_PIXELS, IMAGE_FORMATS
from common.vision_grid import MAX_ASPECT_RATIO
from encoder_svc.video_decode import DEFAULT_VIDEO_LIMITS
from gateway_svc.media.fetch import FetchLimits
from gateway_svc.routes import completions, embeddings, media
from gateway_svc.routes.api import HttpLimits
from gateway_svc.schemas import chat_request, responses_request, sampling_fields
from gateway_svc.text.conversation import _RESERVED_KWARGS
from tests.docs.tables import DOCS
from tests.gateway_svc.fake_backend import harness

PAGE = (DOCS / "api.md").read_text()


def names_in(text: str) -> set[str]:
    return set(re.findall(r"`([a-z_]+)`", text))


def test_the_table_has_exactly_the_fields_that_are_read() -> None:
    section = PAGE.partition("## Request fields")[2].partition("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    assert set().union(*map(names_in, rows)) == set(chat_request.ChatCompletionRequest.model_fields)


def test_the_list_of_refused_fields_is_the_code_s() -> None:
    refused = PAGE.partition("(`store: false`, `best_of: 1`):")[2].partition("| Where")[0]
    assert names_in(refused) == set(chat_request.ChatCompletionRequest.not_served)


def test_the_options_of_processors_and_templates_are_all_named() -> None:
    row = next(line for line in PAGE.splitlines() if line.startswith("| `mm_processor_kwargs`"))
    assert names_in(row) - {"mm_processor_kwargs"} == set(sampling_fields.ProcessorKwargs.model_fields)
    row = next(line for line in PAGE.splitlines() if line.startswith("| `chat_template_kwargs`"))
    assert names_in(row) - {"chat_template_kwargs"} == set(_RESERVED_KWARGS)


def test_every_route_is_listed() -> None:
    paths = {route.path for route in harness().app.routes if isinstance(route, APIRoute)}
    assert len(paths) >= 6
    listed = {
        path.replace("{model}", "{model:path}") for path in re.findall(r"(?:GET|POST|DELETE) (/[a-z0-9/{}._]+)", PAGE)
    }
    assert paths <= listed


def test_the_numbers_are_the_code_s() -> None:
    video, fetch, http = DEFAULT_VIDEO_LIMITS, FetchLimits(), HttpLimits()
    images = next(line for line in PAGE.splitlines() if line.startswith("| Images"))
    assert set(IMAGE_FORMATS) <= {word.upper() for word in re.findall(r"\w+", images)}
    assert f"{DEFAULT_MAX_CANVAS_PIXELS:,} pixels" in images
    assert f"{MAX_ASPECT_RATIO} to 1" in images
    assert f"{video.max_bytes >> 20} MiB, {video.max_frames:,} frames" in PAGE
    assert f"and {video.max_decode_s:g} s of decoding" in PAGE
    assert f"at most {fetch.max_redirects} redirects" in PAGE
    assert f"at most {http.stream_open_s:g} s" in PAGE
    assert f"every {http.keep_alive_s:g} s" in PAGE
    assert f"1 to {sampling_fields.MAX_CHOICES} choices" in PAGE
    assert f"1 to {chat_request.MAX_MESSAGES:,}, with up to {chat_request.MAX_PARTS:,} parts each" in PAGE
    assert f"{chat_request.MAX_PARTS_IN_ALL:,} in all" in PAGE
    assert f"up to {sampling_fields.MAX_STOPS} of up to {sampling_fields.MAX_STOP_CHARACTERS:,} characters" in PAGE
    assert f"up to {sampling_fields.MAX_TOP_LOGPROBS} alternatives" in PAGE
    assert f"up to {sampling_fields.MAX_BAD_WORDS} texts" in PAGE
    assert f"up to {sampling_fields.MAX_ALTERNATIVES:,} texts" in PAGE
    assert f"a list of up to {completions.MAX_PROMPTS}" in PAGE
    assert f"`max_tokens` is {completions.DEFAULT_TOKENS} when it is left out" in PAGE


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_fields_of_the_other_routes_are_named() -> None:
    own = set(completions.CompletionRequest.model_fields) - set(sampling_fields.SamplingFields.model_fields)
    refused = set(completions.CompletionRequest.not_served) - set(sampling_fields.NOT_SERVED)
    assert own | refused <= names_in(section("Completions"))
    fields = set(responses_request.ResponsesRequest.model_fields) - {"model", "reasoning"}
    assert fields - {"text"} <= names_in(section("Responses"))
    assert set(responses_request.ResponsesRequest.not_served) <= names_in(section("Responses"))
    assert set(media.WarmRequest.model_fields) <= names_in(section("Media ahead of time"))
    assert f"up to {media.MAX_ITEMS} parts" in PAGE
    embedding = {*embeddings.EmbeddingRequest.model_fields, *embeddings.EmbeddingRequest.not_served} - {"model", "user"}
    assert embedding <= names_in(section("Embeddings"))
    assert set(sampling_fields.StructuredOutputs.model_fields) <= {"json_", *names_in(PAGE)}


def test_the_openapi_document_is_whole() -> None:
    document = harness().app.openapi()
    schemas = document["components"]["schemas"]
    references = set(re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)))
    assert references <= set(schemas)
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"]
            assert "422" not in operation["responses"]
            assert ("requestBody" in operation) == (method == "post"), path
    assert schemas["ChatCompletionRequest"]["properties"]["model"]["enum"] == ["tandem-demo", "alias"]
