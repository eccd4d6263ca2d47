"""Sampling defaults of a checkpoint."""

import json
from pathlib import Path
from typing import Any

import pytest

from common.errors import ConfigError
from gateway_svc.schemas.chat_request import ChatCompletionRequest
from gateway_svc.text.sampling import SamplingDefaults, sampling_params


def load(folder: Path, values: Any, mode: Any = "auto") -> SamplingDefaults:
    (folder / "generation_config.json").write_text(json.dumps(values))
    return SamplingDefaults.load(folder, mode)


def test_the_values_of_qwen_s_file_become_the_defaults(tmp_path: Path) -> None:
    values = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.0, "x": 1}
    assert load(tmp_path, values) == SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20)


def test_without_sampling_the_default_is_greedy(tmp_path: Path) -> None:
    assert load(tmp_path, {"do_sample": False, "temperature": 0.7}).temperature == 0.0


def test_the_file_can_be_switched_off_and_may_be_absent(tmp_path: Path) -> None:
    assert SamplingDefaults.load(tmp_path) == SamplingDefaults()
    assert load(tmp_path, {"temperature": 0.1}, "none") == SamplingDefaults()


@pytest.mark.parametrize("values", [{"temperature": "hot"}, {"top_p": 0}, {"max_new_tokens": 0}, [], {"top_k": -5}])
def test_absurd_values_stop_the_start(tmp_path: Path, values: Any) -> None:
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        load(tmp_path, values)


def test_requests_without_a_seed_get_different_ones() -> None:
    request = ChatCompletionRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}]})
    seeds = {sampling_params(request, SamplingDefaults(), room=10, vocab_size=10).seed for _ in range(8)}
    assert len(seeds) == 8
