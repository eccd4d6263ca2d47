"""Engines over a compressed KV cache: what they answer is what they answer over a plain one."""

import random
from typing import Any

import pytest
from torch import Tensor

from common.messages import GenerateRequest
from decoder_svc.kv_cache import KVCache
from decoder_svc.model.amx import amx_library
from decoder_svc.model.kernels import NativeKernels
from decoder_svc.model.text import TextModel
from tests.decoder_svc.engines import Driver, make_engine
from tests.decoder_svc.model.amx_models import make_model
from tests.decoder_svc.requests import generate_request, greedy

pytestmark = pytest.mark.skipif(amx_library() is None, reason="no kernels for AMX, or no processor that has it")

NUM_BLOCKS = 15
BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    return make_model(tmp_path_factory.mktemp("compressed"))


class Stumbling:
    """A model that fails a few times after it has computed a step, in which single tokens made blocks full."""

    def __init__(self, model: TextModel) -> None:
        self._model = model
        self.num_left = 3

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, model_input: Any, kv_cache: KVCache) -> Tensor:
        logits: Tensor = self._model(model_input, kv_cache)
        last = model_input.slot_mapping[model_input.cu_seqlens_q[1:].long() - 1] % BLOCK == BLOCK - 1
        fills = [seq for seq, count in enumerate(model_input.query_lens) if count == 1 and last[seq]]
        if fills and len(model_input.query_lens) > 1 and self.num_left > 0:
            self.num_left -= 1
            raise RuntimeError("stumbled")
        return logits


def turns(rng: random.Random, history: dict[str, list[int]]) -> list[GenerateRequest]:
    """Requests of any length, of which some go on from what was said before."""
    requests = []
    for i in range(8):
        name = f"r{i}"
        prompt = history.get(name, []) + [rng.randrange(280) for _ in range(rng.choice((1, 5, 16, 31, 70)))]
        history[name] = prompt
        requests.append(generate_request(prompt, request_id=name, sampling=greedy(rng.choice((1, 7, 33)))))
    return requests


def answers(model: Any, monkeypatch: pytest.MonkeyPatch, *, compress: bool) -> tuple[list[Any], KVCache, int]:
    """What two turns of conversations are answered, the cache afterwards, and how often a sequence was put back."""
    with monkeypatch.context() as patch:
        if not compress:
            patch.setattr(NativeKernels, "can_compress", lambda *sizes: False)
        engine = make_engine(model, num_blocks=NUM_BLOCKS, max_tokens_per_step=24, max_sequences=6, block_size=BLOCK)
    rng, history, outputs = random.Random(7), dict[str, list[int]](), []
    for _ in range(2):
        driver = Driver(engine, lambda key: None)
        driver.add(*turns(rng, history))
        driver.run()
        assert all(end.error is None for end in driver.ends.values())
        for (name, _), tokens in sorted(driver.outputs.items()):
            history[name] += tokens
        outputs.append(driver.outputs)
    return outputs, engine._kv_cache, engine.scheduler.num_preemptions


@pytest.mark.usefixtures("steps")
def test_conversations_are_answered_the_same(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    got, cache, num_preemptions = answers(model, monkeypatch, compress=True)
    expected, plain, _ = answers(model, monkeypatch, compress=False)
    assert got == expected
    assert num_preemptions > 0
    assert cache.bases is not None
    assert cache.count_tiles()[0] > 0
    assert plain.bases is None


def test_steps_that_are_repeated_change_nothing(model: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    stumbling = Stumbling(model)
    got, _, _ = answers(stumbling, monkeypatch, compress=True)
    expected, _, _ = answers(Stumbling(model), monkeypatch, compress=False)
    assert got == expected
    assert stumbling.num_left == 0
