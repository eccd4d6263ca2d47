"""The decoder's engine beside transformers' `generate`: decoding, prefill, and what must hold of the engine itself.

    python -m benchmarks.bench_decoder [--model FOLDER] [--rounds 5] [--threads 1] [--dtype bfloat16] [--vllm COMMAND]

Without a folder it writes the checkpoint of `bench_vl`. Both sides run in this process, with the same threads and
dtype, in turns. First their greedy tokens are compared in float32. With vLLM's command its server joins, in rows of
their own that no target judges: its times hold HTTP. The last line is one JSON object of ratios with
their targets; the exit status is 1 when one falls short.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from benchmarks.bench_vl import checkpoint
from benchmarks.side_by_side import Times, affinity, verdict
from benchmarks.vllm_server import Streams, vllm_server
from common.messages import GenerateRequest, SamplingParams, SequenceTokens
from common.tensors import DTYPES
from decoder_svc.engine import Engine, EngineLimits
from decoder_svc.kv_budget import make_kv_cache
from decoder_svc.model.text import TextModel
from decoder_svc.model.weights import load_text_model

BLOCK_SIZE = 16
FULL_STEP = 768  # tokens, the service's default on CPU
DECODE_TARGETS = {1: 1.7, 8: 3.0, 16: 3.5}
TARGETS = {
    **{f"decode_{batch}": target for batch, target in DECODE_TARGETS.items()},
    "prefill_1024": 1.5,
    "cached_prefix": 1 / 0.15,
    "bookkeeping": 1.0,
    "long_prompt_gap": 1.0,
    "flat_over_requests": 0.9,
}


@dataclass
class TimedModel:
    """The language model, counting the seconds that it computes."""

    model: TextModel
    busy_s: float = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)

    def __call__(self, *arguments: Any) -> Any:
        began = time.perf_counter()
        result = self.model(*arguments)
        self.busy_s += time.perf_counter() - began
        return result


class Ours:
    """An engine without sockets, driven step by step."""

    def __init__(
        self, folder: Path, dtype: torch.dtype, *, kv_tokens: int, max_tokens_per_step: int = FULL_STEP
    ) -> None:
        self.model = TimedModel(load_text_model(folder, dtype=dtype, device="cpu", block_size=BLOCK_SIZE))
        cache = make_kv_cache(self.model, kv_tokens // BLOCK_SIZE, BLOCK_SIZE)
        limits = EngineLimits(
            max_model_len=8192,
            max_tokens_per_step=max_tokens_per_step,
            max_sequences=64,
            max_waiting=1024,
            embedding_cache_bytes=0,
        )
        self.engine = Engine(self.model, cache, limits, eos_token_ids=[], spatial_merge_size=2)  # type: ignore[arg-type]
        self._names = (f"request-{i}" for i in itertools.count())
        self.num_cached = 0
        """Tokens of the last prompt that were not computed, since a former one began with them."""

    def add(self, ids: list[int], max_tokens: int) -> str:
        """Queue a greedy request of these token ids."""
        name = next(self._names)
        sampling = SamplingParams(seed=0, temperature=0.0, max_tokens=max_tokens)
        request = GenerateRequest(
            request_id=name,
            model="bench-vl",
            fingerprint="0" * 64,
            prompt_token_ids=ids,
            sampling=sampling,
            time_left_s=3600.0,
        )
        self.engine.add(request, time.monotonic())
        return name

    def step(self) -> tuple[float, dict[str, list[int]]]:
        """One step: its seconds, and the tokens that came by request."""
        began = time.perf_counter()
        events, _ = self.engine.step()
        seconds = time.perf_counter() - began
        answers = [event for event in events if isinstance(event, SequenceTokens)]
        for answer in answers:
            if answer.usage is not None:
                self.num_cached = answer.usage.cached_tokens
        return seconds, {answer.request_id: answer.tokens for answer in answers}

    def finish(self) -> dict[str, list[int]]:
        """Step until nothing is left; every token by request."""
        output: dict[str, list[int]] = {}
        while self.engine.has_sequences:
            for name, tokens in self.step()[1].items():
                output.setdefault(name, []).extend(tokens)
        return output

    def decode_step(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Median seconds of a step in which every prompt's answer grows by a token."""
        for ids in prompts:
            self.add(ids, num_tokens + 2)
        while not all(s.is_decoding for s in self.engine.scheduler.sequences):
            self.step()
        times = [self.step()[0] for _ in range(num_tokens)]
        self.finish()
        return statistics.median(times)

    def first_token(self, ids: list[int], num_cached: int = 0) -> float:
        """Seconds from a request to its first token, of whose prompt so many tokens are cached."""
        began = time.perf_counter()
        self.add(ids, 1)
        self.finish()
        seconds = time.perf_counter() - began
        assert self.num_cached == num_cached, f"{self.num_cached} tokens were cached"
        return seconds


@dataclass
class Transformers:
    """The reference's `generate`."""

    model: Any
    stamps: list[float] = field(default_factory=list)

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype) -> "Transformers":
        """The whole checkpoint, of which text alone is used."""
        return cls(AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval())

    def generate(self, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
        """Greedy tokens of prompts of equal length; notes when each step had ended."""
        ids = torch.tensor(prompts)
        self.stamps = []
        with torch.inference_mode():
            output: Tensor = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=torch.zeros_like(ids, dtype=torch.int32),
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[self._stamp],
            )
        return [list(row) for row in output[:, ids.shape[1] :].tolist()]

    def _stamp(self, ids: Tensor, _scores: Any, **_: Any) -> Tensor:
        self.stamps.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)

    def decode_step(self, prompts: list[list[int]], num_tokens: int) -> float:
        """Median seconds between two tokens of the batch."""
        self.generate(prompts, num_tokens + 1)
        return statistics.median(b - a for a, b in itertools.pairwise(self.stamps))

    def first_token(self, ids: list[int]) -> float:
        """Seconds from the call to its first token."""
        began = time.perf_counter()
        self.generate([ids], 1)
        return self.stamps[0] - began


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Token ids that are text in `bench_vl`. A longer prompt of the same seed begins as the shorter one."""
    generator = torch.Generator().manual_seed(seed)
    return [[int(i) for i in row] for row in torch.randint(700, 8000, (count, length), generator=generator)]


def in_turns(ours: Callable[[int], float], peer: Callable[[int], float], rounds: int) -> Times:
    """As `side_by_side.alternate`, for work that times itself; the argument is the round's seed."""
    ours(0)
    peer(0)
    times = Times([], [])
    for seed in range(1, rounds + 1):
        times.ours.append(ours(seed))
        times.peer.append(peer(seed))
    return times


def check_equal(folder: Path, reference: Transformers) -> None:
    """Assert greedy tokens in float32 equal to the reference's: at batch 1, 4 and 16, chunked and not."""
    for batch in (1, 4, 16):
        prompts = random_prompts(batch, 96, seed=batch)
        expected = reference.generate(prompts, 12)
        for budget in (FULL_STEP, 37):
            ours = Ours(folder, torch.float32, kv_tokens=batch * 128, max_tokens_per_step=budget)
            names = [ours.add(ids, 12) for ids in prompts]
            output = ours.finish()
            assert [output[name] for name in names] == expected, f"other tokens at batch {batch}, {budget} a step"
    print("greedy tokens in float32 equal transformers' at batch 1, 4, 16, in chunks of 37 and whole")


def bench_peer(
    ours: Ours,
    peer: Transformers | Streams,
    rounds: int,
    context: int,
    num_tokens: int,
    *,
    first_seed: int = 0,
    title: str = "",
) -> dict[str, float]:
    """Decoding and prefill beside a peer, which `title` names; prompts are new from `first_seed` on."""
    ratios = {}
    for batch in DECODE_TARGETS:
        times = in_turns(
            lambda seed, batch=batch: ours.decode_step(random_prompts(batch, context, first_seed + seed), num_tokens),
            lambda seed, batch=batch: peer.decode_step(random_prompts(batch, context, first_seed + seed), num_tokens),
            rounds,
        )
        ratios[f"decode_{batch}"] = times.ratio
        rates = [batch / statistics.median(side) for side in (times.ours, times.peer)]
        speeds = f"{rates[0]:.0f} and {rates[1]:.0f} tokens/s"
        print(times.row(f"{title}decode step, batch {batch}, context {context} ({speeds})"))
    for length in (512, 1024):
        times = in_turns(
            lambda seed, length=length: ours.first_token(random_prompts(1, length, first_seed + length + seed)[0]),
            lambda seed, length=length: peer.first_token(random_prompts(1, length, first_seed + length + seed)[0]),
            rounds,
        )
        print(times.row(f"{title}first token of {length} tokens"))
    ratios["prefill_1024"] = times.ratio
    return ratios


def bench_prefix(ours: Ours, rounds: int) -> float:
    """How many times sooner the first token of 1,024 tokens comes when all but the last few are cached."""
    cold, warm = [], []
    for seed in range(rounds):
        (ids,) = random_prompts(1, 1024, 2000 + seed)
        cold.append(ours.first_token(ids))
        warm.append(ours.first_token([*ids[:1008], *random_prompts(1, 16, 3000 + seed)[0]], num_cached=1008))
    print(Times(warm, cold).row("first token of 1024 tokens of which 1008 are cached, beside none"))
    return Times(warm, cold).ratio


def bench_bookkeeping(ours: Ours, num_tokens: int) -> float:
    """The share of a step of 64 sequences that may be outside of the model, by the share that is."""
    for ids in random_prompts(64, 128, 4000):
        ours.add(ids, num_tokens + 2)
    while not all(s.is_decoding for s in ours.engine.scheduler.sequences):
        ours.step()
    ours.model.busy_s = 0.0
    total = sum(ours.step()[0] for _ in range(num_tokens))
    ours.finish()
    share = 1 - ours.model.busy_s / total
    print(f"64 sequences: {total / num_tokens * 1e3:.1f} ms a step, {share:.1%} of it outside of the model")
    return 0.1 / share


def bench_long_prompt(ours: Ours, rounds: int) -> float:
    """1.5 full steps by the largest gap of 8 streams while a prompt of 4,096 tokens arrives."""
    times = in_turns(
        lambda seed: largest_gap(ours, 5000 + 10 * seed), lambda seed: full_step(ours, 5005 + 10 * seed), rounds
    )
    print(times.row("the largest gap of 8 streams as a prompt of 4096 tokens arrives, beside a full step"))
    return 1.5 * times.ratio


def full_step(ours: Ours, seed: int) -> float:
    """Seconds of the longest step of a prompt of 4,096 tokens, alone."""
    ours.add(random_prompts(1, 4096, seed)[0], 1)
    longest = 0.0
    while ours.engine.has_sequences:
        longest = max(longest, ours.step()[0])
    return longest


def largest_gap(ours: Ours, seed: int) -> float:
    """Seconds of the largest gap in 8 streams, beside which a prompt of 4,096 tokens arrives and is answered."""
    for ids in random_prompts(8, 256, seed):
        ours.add(ids, 64)
    while not all(s.is_decoding for s in ours.engine.scheduler.sequences):
        ours.step()
    streams = {s.request_id for s in ours.engine.scheduler.running}
    prompt = ours.add(random_prompts(1, 4096, seed + 1)[0], 4)
    largest, last, num_answered = 0.0, dict.fromkeys(streams, time.perf_counter()), 0
    while num_answered < 4:
        _, tokens = ours.step()
        now = time.perf_counter()
        assert streams <= tokens.keys(), "every stream goes on beside the prompt"
        largest = max(largest, *(now - last[name] for name in streams))
        last = dict.fromkeys(streams, now)
        num_answered += len(tokens.get(prompt, ()))
    ours.finish()
    return largest


def bench_flatness(aged: Ours, young: Ours, rounds: int, num_requests: int) -> float:
    """Seconds of a step of 8 streams in a young engine by those in one that served many requests, in turns."""
    for engine, total in ((aged, num_requests), (young, 10)):
        for seed in range(total):
            engine.add(random_prompts(1, 8, 10_000 + seed)[0], 2)
            if len(engine.engine.scheduler.sequences) >= 64:
                engine.finish()
        engine.finish()
    times = in_turns(
        lambda seed: aged.decode_step(random_prompts(8, 64, 6000 + seed), 60),
        lambda seed: young.decode_step(random_prompts(8, 64, 6000 + seed), 60),
        rounds,
    )
    print(times.row(f"a step of 8 streams after {num_requests} requests, beside one after 10"))
    return times.ratio


def main() -> int:
    """Compare, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint; by default that of bench_vl is written")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16")
    parser.add_argument("--vllm", type=Path, help="vLLM's command, such as vl/bin/vllm: its server is measured too")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=24, help="steps that each decoding round times")
    parser.add_argument("--requests", type=int, default=10_000, help="requests of the row that looks for a slow leak")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with checkpoint(options.model) as folder:
        check_equal(folder, Transformers.load(folder, torch.float32))
        dtype = DTYPES[options.dtype]
        ours, reference = Ours(folder, dtype, kv_tokens=20_480), Transformers.load(folder, dtype)
        print(
            f"threads {torch.get_num_threads()}, cores {affinity()}, {options.dtype}, torch {torch.__version__}, "
            f"{ours.model.kernels.name} kernels, {ours.model.attention.name} attention, {options.rounds} rounds"
        )
        ratios = bench_peer(ours, reference, options.rounds, options.context, options.tokens)
        if options.vllm is not None:
            with vllm_server(options.vllm, folder, options.threads) as url:
                bench_peer(
                    ours,
                    Streams(url),
                    options.rounds,
                    options.context,
                    options.tokens,
                    first_seed=7000,
                    title="beside vLLM: ",
                )
        ratios["cached_prefix"] = bench_prefix(ours, options.rounds)
        ratios["bookkeeping"] = bench_bookkeeping(ours, options.tokens)
        ratios["long_prompt_gap"] = bench_long_prompt(ours, options.rounds)
        young = Ours(folder, dtype, kv_tokens=20_480)
        ratios["flat_over_requests"] = bench_flatness(ours, young, options.rounds, options.requests)
    return verdict(ratios, TARGETS)


if __name__ == "__main__":
    sys.exit(main())
