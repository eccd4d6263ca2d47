"""Tensors to bytes and back, and the choice of device, dtype and threads."""

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from common.errors import ConfigError, ModelFailure
from common.tensors import DTYPES, check_finite, dtype_name, payload_of, pick_device, pick_dtype, tensor_of, use_threads
from tests.common.test_messages import HEADER


@pytest.mark.parametrize("name", list(DTYPES))
def test_bytes_and_back_is_the_same_tensor(name: Any) -> None:
    tensor = torch.randn(6, 192).to(DTYPES[name])
    header = msgspec.structs.replace(HEADER, dtype=name, rows=6, width=192)
    payload = payload_of(tensor)
    assert len(payload) == header.num_bytes
    assert torch.equal(tensor_of(header, bytearray(payload)), tensor)
    assert dtype_name(tensor.dtype) == name


def test_neither_way_copies() -> None:
    tensor = torch.zeros(6, 192)
    payload = payload_of(tensor)
    tensor[0, 0] = 1.0
    assert bytes(payload[:4]) == b"\0\0\x80?"
    data = bytearray(payload)
    header = msgspec.structs.replace(HEADER, dtype="float32", rows=6, width=192)
    assert tensor_of(header, data).data_ptr() == torch.frombuffer(data, dtype=torch.uint8).data_ptr()


def test_a_slice_becomes_its_own_bytes_only() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert bytes(payload_of(tensor[:, 1:3])) == bytes(payload_of(tensor[:, 1:3].clone()))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_a_failure(value: float) -> None:
    check_finite(torch.zeros(3), "x")
    with pytest.raises(ModelFailure, match="the embedding holds values that are not finite"):
        check_finite(torch.tensor([0.0, value]), "the embedding")


def test_a_device_that_is_not_there_is_named() -> None:
    assert pick_device("cpu") == "cpu"
    assert pick_device("auto") in ("cpu", "cuda")
    with pytest.raises(ConfigError, match="'abacus' is no device"):
        pick_device("abacus")
    with pytest.raises(ConfigError, match="no device cuda:99"):
        pick_device("cuda:99")


@pytest.mark.parametrize(
    ("name", "of_checkpoint", "expected"),
    [
        ("auto", torch.bfloat16, torch.bfloat16),
        ("auto", None, torch.float32),
        ("auto", torch.float64, torch.float32),
        ("float16", torch.bfloat16, torch.float16),
    ],
)
def test_the_dtype_is_the_checkpoint_s_unless_told(name: str, of_checkpoint: object, expected: torch.dtype) -> None:
    assert pick_dtype(name, of_checkpoint) == expected


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_threads_are_what_was_asked_for_or_the_cores_of_this_process(threads: None) -> None:
    assert use_threads(3) == torch.get_num_threads() == 3
    assert use_threads(0) == torch.get_num_threads() >= 1


@pytest.mark.parametrize("name", list(DTYPES))
def test_every_bit_pattern_is_judged_as_torch_does(name: Any) -> None:
    dtype = DTYPES[name]
    bits = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32)
    values = (bits << 16 if dtype.itemsize == 4 else bits.to(torch.int16)).view(dtype)
    for value in values[torch.randperm(len(values))[:2000]].tolist() + values[::1024].tolist():
        tensor = torch.tensor([value, 1.0], dtype=dtype)
        if torch.isfinite(tensor).all():
            check_finite(tensor, "x")
        else:
            with pytest.raises(ModelFailure):
                check_finite(tensor, "x")


@pytest.mark.parametrize("where", [0, 131_071, 131_072, 299_999])
def test_one_bad_value_is_found_wherever_it_is(where: int) -> None:
    tensor = torch.full((300_000,), -1.0, dtype=torch.bfloat16)
    check_finite(tensor.view(3, -1)[:, ::2], "x")
    tensor[where] = float("-inf")
    with pytest.raises(ModelFailure):
        check_finite(tensor, "x")
