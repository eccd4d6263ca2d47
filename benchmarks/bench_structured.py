"""bench-structured: what grammars cost a full batch, and what their masks cost on a large vocabulary.

    python -m benchmarks.bench_structured

Eight answers decode on one thread, free and then each bound to a JSON schema of its own, in turns; the bound ones
are checked against their schemas. Prints the raw times of both sides and, as the last line, one JSON object of the
ratio with its target; exits 1 when it falls short.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import torch
from tokenizers import Tokenizer

from benchmarks.bench_vl import build
from common.messages import GenerateRequest, SamplingParams, SequenceTokens
from decoder_svc.engine import Engine, EngineLimits
from decoder_svc.grammar import GrammarCompiler
from decoder_svc.kv_budget import make_kv_cache
from decoder_svc.model.weights import load_text_model

BATCH, CONTEXT, NEW_TOKENS, BLOCK_SIZE = 8, 512, 64, 16
TARGET = 0.9


def schema(number: int) -> dict[str, Any]:
    """An object with a long list: an answer that does not end before the free one does."""
    item = {
        "type": "object",
        "properties": {
            f"name_{number}": {"type": "string", "maxLength": 12},
            "count": {"type": "integer", "minimum": 0, "maximum": 10_000 + number},
            "kind": {"enum": ["circle", "square", None, number]},
        },
        "required": [f"name_{number}", "count", "kind"],
        "additionalProperties": False,
    }
    return {"type": "array", "items": item, "minItems": 500}


def make_engine(folder: Path) -> Engine:
    """One that has room for the batch."""
    model = load_text_model(folder, dtype=torch.bfloat16, device="cpu", block_size=BLOCK_SIZE)
    num_blocks = BATCH * (-(-(CONTEXT + NEW_TOKENS) // BLOCK_SIZE) + 1)
    cache = make_kv_cache(model, num_blocks, BLOCK_SIZE)
    limits = EngineLimits(
        max_model_len=CONTEXT + NEW_TOKENS + 1,
        max_tokens_per_step=2048,
        max_sequences=BATCH,
        max_waiting=BATCH,
        embedding_cache_bytes=0,
    )
    return Engine(model, cache, limits, eos_token_ids=[], spatial_merge_size=2)


def decode(engine: Engine, compiler: GrammarCompiler | None, run: int) -> tuple[float, dict[int, list[int]]]:
    """Seconds of the decoding alone, and the tokens of each answer."""
    for number in range(BATCH):
        sampling = SamplingParams(seed=number, temperature=1.0, max_tokens=NEW_TOKENS, ignore_eos=True)
        grammar = None
        if compiler is not None:
            text = json.dumps(schema(number))
            sampling = msgspec.structs.replace(sampling, grammar_kind="json_schema", grammar=text)
            grammar = compiler.compile("json_schema", text)
        prompt = [(7 * number + 13 * i + run) % 8000 for i in range(CONTEXT)]
        request = GenerateRequest(
            request_id=str(number), model="bench", prompt_token_ids=prompt, sampling=sampling, time_left_s=1e5
        )
        engine.add(request, time.monotonic(), grammar)
    outputs: dict[int, list[int]] = {number: [] for number in range(BATCH)}
    began = None
    while engine.has_sequences:
        if began is None and all(outputs.values()):
            began = time.perf_counter()
        for event in engine.step()[0]:
            if isinstance(event, SequenceTokens):
                assert event.error is None, event.error
                outputs[int(event.request_id)] += event.tokens
    assert began is not None
    return time.perf_counter() - began, outputs


def check(outputs: dict[int, list[int]], tokenizer: Tokenizer) -> None:
    """Each answer is the beginning of what its schema allows: its whole items are valid."""
    for number, tokens in outputs.items():
        assert len(tokens) == NEW_TOKENS
        text = tokenizer.decode(tokens, skip_special_tokens=False)
        items, _, _ = text.rpartition("}")
        validator = jsonschema_rs.validator_for({**schema(number), "minItems": 0})
        validator.validate(json.loads(items + "}]") if items else [])
        assert text.lstrip().startswith("["), text[:40]


def mask_microseconds(compiler: GrammarCompiler, vocab_size: int) -> float:
    """The time of one mask of the batch, on its own."""
    from decoder_svc.grammar_masks import GrammarMasker

    masker = GrammarMasker(vocab_size)
    states = [compiler.compile("json_schema", json.dumps(schema(number))).begin([]) for number in range(BATCH)]
    times = []
    for _ in range(20):
        began = time.perf_counter()
        masker._banned(states)
        times.append(time.perf_counter() - began)
    return statistics.median(times) / BATCH * 1e6


def main() -> int:
    """Build, measure in turns, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder)
        engine = make_engine(folder)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        vocab_size = engine._model.config.vocab_size
        compiler = GrammarCompiler.load(folder, vocab_size, [])
        assert compiler is not None
        decode(engine, None, 0)
        check(decode(engine, compiler, 1)[1], tokenizer)
        free, bound = [], []
        for round_number in range(rounds):
            free.append(decode(engine, None, 10 + 2 * round_number)[0])
            seconds, outputs = decode(engine, compiler, 11 + 2 * round_number)
            check(outputs, tokenizer)
            bound.append(seconds)
        print(f"threads 1, cores {sorted(os.sched_getaffinity(0))}, bfloat16, batch {BATCH}, context {CONTEXT}")
        print("free  s:", " ".join(f"{seconds:.3f}" for seconds in free))
        print("bound s:", " ".join(f"{seconds:.3f}" for seconds in bound))
        print(f"one mask of {vocab_size} tokens: {mask_microseconds(compiler, vocab_size):.0f} us")
    ratio = statistics.median(free) / statistics.median(bound)
    print(json.dumps({"bound_to_free_throughput": {"ratio": round(ratio, 3), "target": TARGET}}))
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
