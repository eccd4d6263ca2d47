"""The numbers in the values files for Qwen3-VL-8B follow from the model's shape and from the files' own values."""

import re
from typing import Any

import pytest
import yaml

from tests.deploy.helm.values_schema import CHART
from tests.real_sizes import REAL_SIZES

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BYTES = 2  # bfloat16
SIDE = 1024  # of the picture that they speak of
REQUEST = 8192  # tokens
CONFIG = REAL_SIZES["8B"]
TEXT, VISION = CONFIG.text_config, CONFIG.vision_config
FREE_SHARE = 0.85  # of the memory after loading that is KV


def text_parameters() -> int:
    """Of the language half."""
    hidden, wide = TEXT.hidden_size, TEXT.num_attention_heads * TEXT.head_dim
    attention = 2 * hidden * wide + 2 * hidden * TEXT.num_key_value_heads * TEXT.head_dim
    layer = attention + 3 * hidden * TEXT.intermediate_size
    return int(TEXT.num_hidden_layers * layer + 2 * TEXT.vocab_size * hidden)


def vision_parameters() -> int:
    """Of the tower with its mergers."""
    hidden, inner, merged = VISION.hidden_size, VISION.intermediate_size, VISION.hidden_size * 4
    layer = 4 * hidden * hidden + 2 * hidden * inner
    mergers = (1 + len(VISION.deepstack_visual_indexes)) * (merged * merged + merged * VISION.out_hidden_size)
    return int(VISION.depth * layer + mergers)


KV_TOKEN = 2 * TEXT.num_hidden_layers * TEXT.num_key_value_heads * TEXT.head_dim * BYTES
EMBEDDING_TOKEN = TEXT.hidden_size * (1 + len(VISION.deepstack_visual_indexes)) * BYTES
PATCHES = (SIDE // 16) ** 2
PICTURE = PATCHES // 4 * EMBEDDING_TOKEN
LINEAR_FLOP = 2 * vision_parameters() * PATCHES
ATTENTION_FLOP = VISION.depth * 4 * PATCHES**2 * VISION.hidden_size


def said(file: str) -> str:
    """The comment at the top of a values file, on one line."""
    lines = (CHART / file).read_text().splitlines()
    return re.sub(r"\s+", " ", " ".join(line.lstrip("# ") for line in lines if line.startswith("#")))


def values_of(file: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((CHART / file).read_text())
    return values


def number(text: str, pattern: str) -> float:
    """The number that stands at the place of `N`."""
    found = re.search(re.escape(pattern).replace("N", r"([0-9][0-9.,e]*[0-9]|[0-9])"), text)
    assert found, pattern
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize("file", ["values-one-gpu-node.yaml", "values-production-8b.yaml"])
def test_what_both_files_say_of_the_model(file: str) -> None:
    text = said(file)
    assert number(text, "language half N x 2 bytes") == pytest.approx(text_parameters(), rel=0.01)
    assert number(text, "8.2e9 x 2 bytes = N GiB") == pytest.approx(text_parameters() * BYTES / GIB, rel=0.01)
    assert number(text, "128 x 2 bytes = N KiB") * KIB == KV_TOKEN
    assert number(text, "x 2 bytes = N KiB a token") * KIB == EMBEDDING_TOKEN
    assert vision_parameters() * BYTES / GIB == pytest.approx(1.1, rel=0.05)
    assert "1.1 GiB" in text


def test_a_decoder_on_24_gib_holds_what_is_said() -> None:
    text = said("values-one-gpu-node.yaml")
    kv = number(text, "85 % of the free N GiB") * FREE_SHARE
    assert 24 - text_parameters() * BYTES / GIB > number(text, "85 % of the free N GiB")
    assert number(text, "is N GiB: 49,500 tokens") == pytest.approx(kv, abs=0.1)
    assert number(text, "is 6.8 GiB: N tokens") == pytest.approx(kv * GIB / KV_TOKEN, rel=0.01)
    assert int(kv * GIB / KV_TOKEN / REQUEST) == 6
    cache = int(values_of("values-one-gpu-node.yaml")["valkey"]["maxmemory"].removesuffix("gb"))
    assert number(text, f"{cache} GiB keep N such pictures") == pytest.approx(cache * GIB / PICTURE, rel=0.02)


def test_a_decoder_of_the_fleet_holds_what_is_said() -> None:
    text = said("values-production-8b.yaml")
    left = number(text, "Of the N GiB that are left")
    assert left < 80e9 / GIB - text_parameters() * BYTES / GIB < left + 1.5  # the rest is CUDA's own
    assert number(text, "85 % is N GiB of KV") == pytest.approx(left * FREE_SHARE, abs=0.5)
    assert number(text, "144 KiB: N tokens") == pytest.approx(49 * GIB / KV_TOKEN, rel=0.01)
    assert number(text, "so N requests of 8,192") == int(49 * GIB / KV_TOKEN / REQUEST)
    assert 49 * GIB / KV_TOKEN > 262_144 == number(text, "and one of N fits")


def test_an_encoder_of_the_fleet_does_what_is_said_and_the_gateways_count_with_it() -> None:
    file = "values-production-8b.yaml"
    text, values = said(file), values_of(file)
    assert number(text, "1024 x 1024 is N patches") == PATCHES
    assert number(text, "4,096 = N TFLOP") == pytest.approx(LINEAR_FLOP / 1e12, rel=0.03)
    assert number(text, "1,152 = N TFLOP") == pytest.approx(ATTENTION_FLOP / 1e12, rel=0.03)
    pictures_per_s = 50e12 / (LINEAR_FLOP + ATTENTION_FLOP)
    assert pictures_per_s == pytest.approx(7, abs=0.5)
    assert values["gateway"]["settings"]["encoder-patches-per-s"] == pytest.approx(7 * PATCHES, rel=0.05)
    assert number(text, "Seven a second are N MiB/s") * MIB == 7 * PICTURE
    assert number(text, "MiB/s or N Gbit/s out of each") == pytest.approx(7 * PICTURE * 8 / 1e9, abs=0.05)
    most = values["autoscaling"]["encoder"]["max"]
    assert number(text, "all eight N Gbit/s into") == pytest.approx(most * 7 * PICTURE * 8 / 1e9, abs=0.5)
    cache = int(values["valkey"]["maxmemory"].removesuffix("gb"))
    assert number(text, f"{cache} GiB keep N such pictures") == pytest.approx(cache * GIB / PICTURE, rel=0.05)
