"""Every route against requests that its own documentation describes, and against some that it does not: no fault.

`make fuzz` runs it with thousands of examples a route; here it is a sample. The backend is scripted.
"""

import os
from typing import Any

import schemathesis
from hypothesis import HealthCheck, Phase, settings
from schemathesis import GenerationMode

from common.errors import ERROR_TABLE
from tests.gateway_svc.fake_backend import FakeBackend, harness

EXAMPLES = int(os.environ.get("TANDEM_FUZZ_EXAMPLES", "4"))
STATUSES = {200, *(info.http_status for info in ERROR_TABLE.values())} - {500, 502}

_setup = harness(FakeBackend(answers=["Hi."]))
_schema = schemathesis.openapi.from_asgi("/openapi.json", _setup.app)
_schema.config.generation.update(modes=list(GenerationMode))


@schemathesis.hook
def map_body(context: schemathesis.HookContext, body: Any) -> Any:
    """JSON Schema takes 5.0 for an integer, and this server does not: most bodies should get further than that."""
    return _with_integers(body)


def _with_integers(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


@_schema.parametrize()
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES <= 4,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
def test_no_request_is_a_fault(case: schemathesis.Case) -> None:
    response = case.call()
    assert response.status_code in STATUSES, response.text
    if response.status_code >= 400 and case.path != "/ready":
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert error["code"] in {info.code for info in ERROR_TABLE.values()}
