"""The start of the decoder: its steps and threads, and the tokens that end an answer."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common.errors import ConfigError
from decoder_svc.__main__ import _eos_token_ids, _max_tokens_per_step, _overlaps_steps, _records_graphs, _threads
from decoder_svc.config import DecoderSettings, OnOffAuto
from tests.decoder_svc.engines import World

CONFIG = SimpleNamespace(text_config=SimpleNamespace(eos_token_id=7))


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [3, 4]}, CONFIG, [3, 4]),
        ({"eos_token_id": 3}, CONFIG, [3]),
        ({"do_sample": True}, CONFIG, [7]),
        (None, CONFIG, [7]),
        (None, SimpleNamespace(eos_token_id=None), []),
    ],
)
def test_the_end_tokens_are_those_of_the_generation_config_or_of_the_model(
    tmp_path: Path, generation_config: dict[str, Any] | None, config: object, expected: list[int]
) -> None:
    if generation_config is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation_config))
    assert _eos_token_ids(tmp_path, config) == expected


@pytest.mark.parametrize("content", ["{", '{"eos_token_id": "x"}', "[]"])
def test_a_damaged_generation_config_stops_the_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "generation_config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        _eos_token_ids(tmp_path, CONFIG)


def test_steps_on_cpu_are_short_unless_the_setting_says_otherwise(world: World) -> None:
    assert _max_tokens_per_step(DecoderSettings(model="m"), world.pair.model) == 768
    assert _max_tokens_per_step(DecoderSettings(model="m", max_tokens_per_step=4096), world.pair.model) == 4096


@pytest.mark.parametrize(
    ("setting", "device", "expected"),
    [("auto", "cpu", False), ("auto", "cuda", True), ("on", "cpu", True), ("off", "cuda", False)],
)
def test_steps_overlap_on_cuda_or_when_the_setting_says_so(setting: OnOffAuto, device: str, expected: bool) -> None:
    settings = DecoderSettings(model="m", overlap_steps=setting)
    assert _overlaps_steps(settings, torch.device(device)) is expected


@pytest.mark.parametrize(
    ("device", "can_record", "fields", "expected"),
    [
        ("cuda", True, {}, True),
        ("cuda", True, {"cuda_graphs": "off"}, False),
        ("cuda", True, {"tp": 2}, False),
        ("cuda", False, {}, False),
        ("cpu", True, {}, False),
    ],
)
def test_decode_steps_are_recorded_where_they_can_be(
    device: str, can_record: bool, fields: dict[str, Any], expected: bool
) -> None:
    model = torch.nn.Module()
    model.device, model.attention = torch.device(device), SimpleNamespace(can_record=can_record)  # type: ignore[assignment]
    assert _records_graphs(DecoderSettings(model="m", **fields), model) is expected  # type: ignore[arg-type]


def test_the_threads_are_shared_among_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    assert _threads(DecoderSettings(model="m")) == 6
    assert _threads(DecoderSettings(model="m", tp=2)) == 3
    assert _threads(DecoderSettings(model="m", tp=4, threads=2)) == 1
