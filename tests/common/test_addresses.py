"""Addresses as people write them."""

import pytest

from common.addresses import EncoderAddress
from common.errors import ConfigError


def test_an_encoder_is_two_addresses() -> None:
    address = EncoderAddress.parse("tcp://host:7101,tcp://host:7102")
    assert address == EncoderAddress(control="tcp://host:7101", data="tcp://host:7102")


@pytest.mark.parametrize(
    "text", ["", ",", "tcp://host:7101", "tcp://a:1,", ",tcp://a:1", "tcp://a:1,tcp://a:2,tcp://a:3"]
)
def test_anything_else_is_refused_with_the_form_that_is_wanted(text: str) -> None:
    with pytest.raises(ConfigError, match="CONTROL,DATA"):
        EncoderAddress.parse(text)
