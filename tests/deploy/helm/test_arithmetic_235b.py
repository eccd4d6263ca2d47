"""The numbers in the values file for Qwen3-VL-235B-A22B follow from its shape and from what a rank holds of it."""

import pytest

from common.checkpoint import without_storage
from decoder_svc.model.parallel import Alone, Shard, local_config
from decoder_svc.model.text import TextModel
from tests.deploy.helm.test_arithmetic import BYTES, FREE_SHARE, GIB, KIB, MIB, REQUEST, number, said, values_of
from tests.real_sizes import REAL_SIZES

FILE = "values-production-235b.yaml"
TEXT = REAL_SIZES["235B-A22B"].text_config
CUDA_GIB = 1.1


class OneOf(Alone):
    """The first of several ranks; only its share matters here."""

    def __init__(self, size: int) -> None:
        self.shard = Shard(0, size)


def held_gib(size: int) -> float:
    """Weights in each of several processes."""
    with without_storage():
        model = TextModel(local_config(TEXT, size), ranks=OneOf(size))
    return sum(parameter.numel() for parameter in model.parameters()) * BYTES / GIB


def kv_token(size: int) -> int:
    local = local_config(TEXT, size)
    return 2 * local.num_hidden_layers * int(local.num_key_value_heads or 0) * local.head_dim * BYTES


def test_weights_and_kv_of_a_process_are_what_is_said() -> None:
    text = said(FILE)
    assert values_of(FILE)["decoder"]["settings"]["tp"] == values_of(FILE)["decoder"]["gpu"]["count"] == 8
    assert number(text, "e9 x 2 bytes = N GiB for the language half") == pytest.approx(held_gib(1), rel=0.002)
    assert number(text, "each of eight GPUs holds N GiB") == pytest.approx(held_gib(8), abs=0.1)
    left = 80e9 / GIB - held_gib(8) - CUDA_GIB
    assert number(text, "of the N GiB that are left") == pytest.approx(left, abs=0.1)
    kv = number(text, "85 % is N GiB of KV")
    assert kv == pytest.approx(left * FREE_SHARE, abs=0.1)
    assert number(text, "128 x 2 bytes = N KiB; eight") * KIB == kv_token(1)
    assert number(text, "keep one head each, N KiB") * KIB == kv_token(8)
    assert number(text, "47 KiB: N tokens") == pytest.approx(kv * GIB / kv_token(8), rel=0.01)
    assert number(text, "so N requests of 8,192") == int(kv * GIB / kv_token(8) / REQUEST)


def test_four_larger_gpus_hold_what_is_said() -> None:
    text = said(FILE)
    assert number(text, "a process holds N GiB") == pytest.approx(held_gib(4), abs=0.1)
    kv = (141e9 / GIB - held_gib(4) - CUDA_GIB) * FREE_SHARE
    assert number(text, "and keeps N GiB of KV") == pytest.approx(kv, abs=0.1)
    assert number(text, "GiB of KV: N tokens") == pytest.approx(kv * GIB / kv_token(4), rel=0.01)


def test_what_goes_between_gpus_and_from_encoders_is_what_is_said() -> None:
    text = said(FILE)
    sums = 2 * TEXT.num_hidden_layers * TEXT.hidden_size * BYTES
    step = values_of(FILE)["decoder"]["settings"]["max-tokens-per-step"] * sums
    assert number(text, "in each layer, N MiB a token") == pytest.approx(sums / MIB, rel=0.03)
    assert number(text, "MiB a token, N GiB for a step") == pytest.approx(step / GIB, rel=0.03)
    assert number(text, "N ms at 450 GB/s") == pytest.approx(1.75 * step / 450e9 * 1e3, rel=0.05)
    picture = 32 * KIB * 1024
    assert number(text, "takes N MiB/s") * MIB == 5 * picture
    assert number(text, "MiB/s, N Gbit/s; they") == pytest.approx(5 * picture * 8 / 1e9, abs=0.05)
