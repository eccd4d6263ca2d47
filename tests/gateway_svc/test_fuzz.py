"""Every route against requests that its own documentation describes, and against some that it does not: no fault.

What comes back has to be what the documentation says as well. `make test` sends 300 to a route, `make fuzz` thousands.
The backends are scripted; a route of embeddings is asked at a gateway that has an embedding model.

Nearly all the time goes into making bodies. Lists of up to two items, where the documentation allows thousands, make
them in a third of the time, and most of them are mended to get beyond validation.
"""

import base64
import json
import os
import zlib
from typing import Any

import pytest
import schemathesis
import zmq.asyncio
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, settings
from schemathesis import GenerationMode
from schemathesis.openapi import from_dict
from schemathesis.python.asgi import ASGIClient, get_client
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from common.errors import ERROR_TABLE
from common.members import StaticMembers
from common.messages import VideoFacts
from gateway_svc.routes.autoscale import add_autoscale_route
from gateway_svc.routing.fleet import Fleet
from tests.gateway_svc.fake_backend import FakeBackend, VectorBackend, harness
from tests.media_samples import png

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("TANDEM_FUZZ_EXAMPLES", "300"))
STATUSES = {200, *(info.http_status for info in ERROR_TABLE.values())} - {500, 502}
CODES = {info.code for info in ERROR_TABLE.values()}
MAX_LIST = 2
PICTURE = "data:image/png;base64," + base64.b64encode(png(64, 64)).decode()
AS_DOCUMENTED = [status_code_conformance, content_type_conformance, response_schema_conformance]
_SETTINGS = settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 300,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def _documented(app: FastAPI) -> Any:
    """The API as the application documents it, with shorter lists."""
    document = json.loads(json.dumps(app.openapi()))
    _shorten(document["components"]["schemas"])
    schema = from_dict(document)
    schema.app = app
    schema.config.generation.update(modes=list(GenerationMode))
    return schema


def _shorten(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "array":
            schema["maxItems"] = min(MAX_LIST, schema.get("maxItems", MAX_LIST))
        schema = list(schema.values())
    for item in schema if isinstance(schema, list) else ():
        _shorten(item)


FACTS = VideoFacts(grid=(2, 4, 6), frame_indices=[0, 1, 2, 3], timestamps=[0.3, 1.6])
_app = harness(FakeBackend(answers=["Hi."], facts=FACTS)).app
_nobody = StaticMembers([])
_fleet = Fleet(
    zmq.asyncio.Context.instance(),
    model="tandem-demo",
    instance_id="g",
    encoder_source=_nobody,
    decoder_source=_nobody,
    cache=None,
    keys=None,
)
add_autoscale_route(_app, _fleet.autoscale.own, None)
_generating = _documented(_app).exclude(path="/v1/embeddings")
_embedding_app = harness(VectorBackend(facts=FACTS), is_embedding_model=True).app
_embedding = _documented(_embedding_app).include(path="/v1/embeddings")
_client, _embedding_client = get_client(_app), get_client(_embedding_app)


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """Most bodies should get further than what documentation cannot say; one of four stays as it is."""
    if zlib.crc32(repr(body).encode("utf-8", "replace")) % 4 == 0:
        return body
    return _mended(body)


def _mended(value: Any) -> Any:
    """JSON Schema takes 5.0 for an integer, where this server does not; nor can it say which fields need others."""
    if isinstance(value, list):
        return [_mended(item) for item in value]
    if isinstance(value, dict):
        mended = {key: _mended(item) for key, item in value.items()}
        if mended.get("role") not in (None, "assistant") and mended.get("content") is None:
            mended["content"] = "a"
        if "top_logprobs" in mended:
            mended["logprobs"] = True
        if "stream_options" in mended:
            mended["stream"] = True
        for name in ("url", "image_url", "video_url"):
            if isinstance(mended.get(name), str):
                mended[name] = PICTURE
        return mended
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check(case: schemathesis.Case, client: ASGIClient) -> None:
    response = case.call(session=client)
    assert response.status_code in STATUSES, response.text
    if response.status_code >= 400 and case.path != "/ready":
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] in CODES
    case.validate_response(response, checks=AS_DOCUMENTED)


@_generating.parametrize()
@_SETTINGS
def test_no_request_is_a_fault(case: schemathesis.Case) -> None:
    _check(case, _client)


@_embedding.parametrize()
@_SETTINGS
def test_no_request_for_embeddings_is_a_fault(case: schemathesis.Case) -> None:
    _check(case, _embedding_client)
