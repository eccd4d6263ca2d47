"""The table of errors: total, unambiguous, and the same on both sides of the wire."""

import inspect

import pytest

from common import errors
from common.errors import ERROR_TABLE, TandemError, error_info, from_code
from common.messages import ErrorDetail
from common.wire import error_detail, error_from_detail

CLASSES = [value for _, value in inspect.getmembers(errors, inspect.isclass) if issubclass(value, TandemError)]


@pytest.mark.parametrize("error_class", CLASSES)
def test_every_class_has_a_row(error_class: type[TandemError]) -> None:
    info = error_info(error_class("why"))
    assert 400 <= info.http_status <= 599
    is_of_client = info.http_status in (400, 401, 404, 405, 408, 413, 429)
    assert info.openai_type == ("invalid_request_error" if is_of_client else "server_error")


def test_codes_are_unique() -> None:
    assert set(ERROR_TABLE) == set(CLASSES)
    assert len({info.code for info in ERROR_TABLE.values()}) == len(ERROR_TABLE)


def test_only_server_errors_are_worth_another_try() -> None:
    assert all(info.http_status in (502, 503, 504) for info in ERROR_TABLE.values() if info.is_retryable)


@pytest.mark.parametrize("error_class", CLASSES)
def test_an_error_survives_the_wire(error_class: type[TandemError]) -> None:
    there = error_from_detail(error_detail(error_class("why", param="messages[0]")))
    assert type(there) is error_class
    assert (there.message, there.param, str(there)) == ("why", "messages[0]", "why")


def test_an_unknown_code_is_an_internal_error() -> None:
    assert type(from_code("of_a_later_version", "why")) is TandemError


def test_a_long_message_is_cut_to_what_the_wire_carries() -> None:
    detail = error_detail(TandemError("x" * 10_000))
    assert isinstance(detail, ErrorDetail)
    assert len(detail.message) == 4096
