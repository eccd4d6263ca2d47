"""A step waits for the device once: engines on torch's `meta` device, which has no data that anybody could read.

Whatever asks the device for a number raises there: `.item()`, `.tolist()`, `.cpu()`, `nonzero`, a mask as an index.
What only waits, a copy that is not asynchronous, is found by watching the calls.
"""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from common.messages import GenerateRequest, SamplingParams
from decoder_svc import transfers
from decoder_svc.model.text import TextModel
from tests.decoder_svc.engines import Driver, World, make_engine, request_of
from tests.decoder_svc.requests import greedy

pytestmark = pytest.mark.usefixtures("steps")
TEXT = [5, 17, 200, 33, 7, 90, 121]
MORE = [8, 9, 77]
META = torch.device("meta")


class WaitingCopies(TorchFunctionMode):
    """Collects calls that copy host memory to the device, or back, and wait until it is there."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        is_on_device = isinstance(result, Tensor) and result.device == META
        if is_on_device and name in ("tensor", "as_tensor", "asarray"):
            self.found.append(f"torch.{name} makes a tensor on the device")
        comes_from_host = any(isinstance(arg, Tensor) and arg.device != META for arg in args)
        if is_on_device and name in ("to", "copy_") and comes_from_host and not kwargs.get("non_blocking"):
            self.found.append(f"{name} to the device without non_blocking")
        if name in ("__getitem__", "__setitem__") and args[0].device == META:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, list) or (isinstance(i, Tensor) and i.device != META) for i in index):
                self.found.append(f"{name} by an index of the host")
        return result


@pytest.fixture
def model(world: World) -> TextModel:
    """The tiny model in plain torch, as a GPU would run it, without its numbers."""
    whole = TextModel(world.pair.model.config, tie_word_embeddings=world.pair.model.lm_head is None)
    return whole.to(META).eval()


@pytest.fixture
def num_reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of values that were brought to the host, which are token ids of chance in place of what is not there."""
    reads: list[int] = []
    chance = random.Random(0)

    def start(readback: transfers.Readback) -> None:
        parts = readback._parts
        assert all(part.device == META for part in parts)
        if parts:
            reads.append(len(parts))
        readback._host = [
            torch.tensor([float(chance.randrange(1, 200)) for _ in range(part.numel())]).view(part.shape)
            for part in parts
        ]

    monkeypatch.setattr(transfers.Readback, "start", start)
    return reads


def mixed_requests(world: World) -> list[GenerateRequest]:
    """All that a step may have to do."""
    everything = {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "logit_bias": {4: 1.0},
        "min_tokens": 3,
        "stop_token_ids": [255],
        "bad_words_ids": [[3], [5, 6]],
        "num_logprobs": 3,
    }
    samplings = [
        greedy(),
        greedy(num_prompt_logprobs=2, num_logprobs=2),
        SamplingParams(seed=1, max_tokens=8, temperature=1.0, n=3),
        SamplingParams(seed=1, max_tokens=8, temperature=0.7, top_p=0.9, top_k=20, min_p=0.01, **everything),
        SamplingParams(seed=1, max_tokens=8, temperature=0.7, top_p=0.9, allowed_token_ids=[7, 8, 9]),
    ]
    requests = [
        request_of(world, [number], TEXT, 0, MORE, request_id=f"r{number}", sampling=sampling)
        for number, sampling in enumerate(samplings)
    ]
    pooled = request_of(world, TEXT, 1, MORE, request_id="pooled", sampling=greedy(1), pooling="last")
    return [*requests, pooled]


def test_each_step_reads_back_once_and_waits_for_nothing_else(
    world: World, model: TextModel, num_reads: list[int]
) -> None:
    run = Driver(make_engine(model, max_tokens_per_step=20), world.embeddings.__getitem__)
    run.add(*mixed_requests(world))
    copies = WaitingCopies()
    most_parts = 0
    while run.engine.has_sequences:
        before = len(num_reads)
        with copies:
            run.step()
        assert len(num_reads) - before <= 1
        most_parts = max([most_parts, *num_reads[before:]])
    assert most_parts > 3, "tokens, log probabilities and others came in one copy"
    assert not copies.found
    assert all(run.ends[f"r{number}", 0].error is None for number in range(5))
    assert run.ends["pooled", 0].embedding is not None


@pytest.mark.parametrize(
    "ask",
    [
        lambda t: t.sum().item(),
        lambda t: t.tolist(),
        lambda t: t.cpu(),
        lambda t: t[t > 0],
        lambda t: t.nonzero(),
        lambda t: bool(t.any()),
        lambda t: torch.bincount(t),
    ],
)
def test_the_device_of_these_tests_raises_when_it_is_asked(ask: Callable[[Tensor], object]) -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        ask(torch.ones(3, dtype=torch.int64, device=META))


def test_copies_that_wait_are_seen() -> None:
    on_device = torch.zeros(4, device=META)
    with WaitingCopies() as copies:
        torch.tensor([1], device=META)
        torch.ones(3).to(META)
        on_device[[0, 1]]
        on_device[torch.tensor([1])] = 0
        torch.ones(3).to(META, non_blocking=True)
    assert len(copies.found) == 4
