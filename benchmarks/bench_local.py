"""Latency and throughput of a local stack beside transformers, on the same machine and in the same minute.

    python -m benchmarks.bench_local [--model demo/model] [--rounds 5]

Each round measures every row on both sides, one after the other, so that drift of the machine hits both; a row is the
median over rounds and the ratio is the median of the rounds' ratios. transformers runs in this process, in float32,
with the threads of one core, since the stack gives each half one core and uses one of them at a time here.
"""

import argparse
import asyncio
import base64
import io
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from openai import AsyncOpenAI
from PIL import Image
from rich.console import Console
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText

from common.processor_config import ProcessorConfig
from deploy.local import LocalStack, UpSettings, free_port, plan
from encoder_svc.preprocess import preprocess_image

SIDE = 448
ANSWER_TOKENS = 64
STREAMS = 8
QUESTION = "What is in this picture?"


def picture(seed: int) -> bytes:
    """A PNG of noise that was never sent before."""
    pixels = np.random.default_rng(seed).integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


class Product:
    """The stack through OpenAI's client."""

    def __init__(self, client: AsyncOpenAI, model: str) -> None:
        self._client = client
        self._model = model

    async def ask(self, source: bytes | None, max_tokens: int) -> tuple[float, float]:
        """Seconds to the first token, and to the last."""
        parts: list[Any] = [{"type": "text", "text": QUESTION}]
        if source is not None:
            url = f"data:image/png;base64,{base64.b64encode(source).decode()}"
            parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
        began, first = time.perf_counter(), 0.0
        stream = await self._client.chat.completions.create(
            model=self._model,
            messages=[{"role": "user", "content": parts}],
            max_completion_tokens=max_tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for _ in stream:
            first = first or time.perf_counter() - began
        return first, time.perf_counter() - began


class Transformers:
    """The reference, in this process."""

    def __init__(self, model: Path) -> None:
        self._model = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._processor = ProcessorConfig.load(model)

    def ask(self, source: bytes | None, max_tokens: int, streams: int = 1) -> float:
        """Seconds to the last of `max_tokens` tokens of `streams` equal requests in one batch."""
        began = time.perf_counter()
        pads, inputs = "", {}
        if source is not None:
            prepared = preprocess_image(source, self._processor)
            inputs["pixel_values"] = torch.from_numpy(prepared.pixel_values)
            inputs["image_grid_thw"] = torch.tensor([prepared.grid_thw])
            count = prepared.pixel_values.shape[0] // 4
            pads = f"<|vision_start|>{'<|image_pad|>' * count}<|vision_end|>"
        prompt = f"<|im_start|>user\n{pads}{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        ids = torch.tensor([self._tokenizer.encode(prompt).ids] * streams)
        inputs["mm_token_type_ids"] = (ids == self._processor.tokens.image_token_id).int()
        with torch.inference_mode():
            self._model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                **inputs,
                do_sample=False,
                max_new_tokens=max_tokens,
                min_new_tokens=max_tokens,
                pad_token_id=0,
            )
        return time.perf_counter() - began


class Bench:
    """Rows of measurements: name, unit, product, transformers."""

    def __init__(self, product: Product, reference: Transformers) -> None:
        self._product = product
        self._reference = reference
        self._seed = int(time.time())
        self.rows: dict[str, list[tuple[float, float | None]]] = {}

    def _fresh(self) -> bytes:
        self._seed += 1
        return picture(self._seed)

    async def round(self) -> None:
        """Measure every row once."""
        await self._row("first token, text (ms)", self._text, lambda: self._reference.ask(None, 1) * 1e3)
        source = self._fresh()
        await self._row(
            f"first token, new {SIDE}x{SIDE} picture (ms)",
            lambda: self._ttft(source),
            lambda: self._reference.ask(source, 1) * 1e3,
        )
        await self._row(
            "first token, the same picture again (ms)",
            lambda: self._ttft(source),
            lambda: self._reference.ask(source, 1) * 1e3,
        )
        await self._row("one stream (tokens/s)", lambda: self._rate(1), lambda: self._reference_rate(1))
        await self._row(
            f"{STREAMS} streams (tokens/s)", lambda: self._rate(STREAMS), lambda: self._reference_rate(STREAMS)
        )

    async def _row(self, name: str, ours: Callable[[], Awaitable[float]], theirs: Callable[[], float]) -> None:
        value = await ours()
        self.rows.setdefault(name, []).append((value, await asyncio.to_thread(theirs)))

    async def _text(self) -> float:
        return (await self._product.ask(None, 1))[0] * 1e3

    async def _ttft(self, source: bytes) -> float:
        return (await self._product.ask(source, 1))[0] * 1e3

    async def _rate(self, streams: int) -> float:
        began = time.perf_counter()
        await asyncio.gather(*(self._product.ask(None, ANSWER_TOKENS) for _ in range(streams)))
        return streams * ANSWER_TOKENS / (time.perf_counter() - began)

    def _reference_rate(self, streams: int) -> float:
        return streams * ANSWER_TOKENS / self._reference.ask(None, ANSWER_TOKENS, streams)

    def table(self) -> str:
        """The rows as Markdown."""
        lines = ["| | Tandem | transformers | ratio |", "|---|---|---|---|"]
        for name, pairs in self.rows.items():
            ours = statistics.median(a for a, _ in pairs)
            theirs = statistics.median(b for _, b in pairs if b is not None)
            ratio = statistics.median(a / b for a, b in pairs if b)
            lines.append(f"| {name} | {ours:.1f} | {theirs:.1f} | {ratio:.2f} |")
        return "\n".join(lines)


async def measure(model: Path, rounds: int) -> None:
    """Start a stack, measure, print the table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="tandem-bench-") as folder:
        run_dir, log_dir = Path(folder) / "run", Path(folder) / "logs"
        run_dir.mkdir()
        log_dir.mkdir()
        settings = UpSettings(model=str(model), port=free_port(), data_dir=Path(folder))
        planned = plan(settings, run_dir, log_dir)
        stack = LocalStack(planned)
        try:
            await stack.start()
            await stack.wait_ready(Console(stderr=True))
            async with AsyncOpenAI(base_url=f"{planned.urls[0]}/v1", api_key="none", max_retries=0) as client:
                bench = Bench(Product(client, settings.model_name), Transformers(model))
                await bench.round()  # warm-up
                bench.rows.clear()
                for _ in range(rounds):
                    await bench.round()
        finally:
            await stack.stop()
    print(f"{rounds} rounds, {len(os.sched_getaffinity(0))} cores, float32, torch {torch.__version__}")
    print(bench.table())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    asyncio.run(measure(options.model.resolve(), options.rounds))
