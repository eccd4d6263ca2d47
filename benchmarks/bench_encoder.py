"""The encoder's arithmetic beside transformers', on the same checkpoint, threads and dtype.

    python -m benchmarks.bench_encoder [--model FOLDER] [--rounds 5] [--threads 1 2] [--dtype bfloat16]

The forward of the vision tower on one large image and on eight smaller ones, each from what the side's own
preprocessing gives: bytes of pixels here, normalised patches in the compute dtype there. Then JPEG bytes to what the
tower takes, against the PIL processor. Then the whole encoder process, transport, and an encoder under its heaviest
work, as `bench_pipeline`, `bench_transport` and `bench_calm` say; transport three times, of which the median counts,
as it takes seconds and a machine that is not ours alone changes its speed from one minute to the next. Asserts that
outputs agree: with transformers' float32 tower no worse than its own in the dtype, and pixels to the bit. Without
`--model` it builds bench-vl. Thread counts above the cores that the process may use are left out. Last line: one JSON
object of ratios; exit code 1 when one falls short.
"""

import argparse
import asyncio
import io
import multiprocessing
import statistics
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from benchmarks import bench_calm, bench_pipeline, bench_transport
from benchmarks.bench_vl import checkpoint, jpeg
from benchmarks.side_by_side import CLOCKS, Clock, affinity, alternate, seconds, verdict
from common.messages import Grid
from common.processor_config import ProcessorConfig
from common.tensors import DTYPES
from encoder_svc.model.vision import VisionTower
from encoder_svc.model.weights import load_vision_tower
from encoder_svc.preprocess import normalised, preprocess_image, read_image

WORKS = {"1x1024": [1024], "8x448": [448] * 8}
TARGETS = {"1x1024": 2.0, "8x448": 1.5}
JPEG_TARGET = 3.0
GEMM_SIDE = 2048


@dataclass(frozen=True)
class Work:
    """The same pictures for both sides."""

    grids: list[Grid]
    ours: list[torch.Tensor]
    peer: torch.Tensor  # float32; it is cast before the clock starts

    @classmethod
    def of(cls, sides: list[int], processor: ProcessorConfig) -> "Work":
        read = [read_image(jpeg(side, side, seed), processor) for seed, side in enumerate(sides)]
        floats = [normalised(item, processor.image).pixel_values for item in read]
        return cls(
            [item.grid_thw for item in read],
            [torch.from_numpy(item.pixel_values) for item in read],
            torch.from_numpy(np.concatenate(floats)),
        )


def tower_flops(tower: VisionTower, grids: list[Grid]) -> float:
    """Multiplications and additions of the matrix products, with the halved patch embedding of stills."""
    config = tower.config
    hidden, patches = config.hidden_size, sum(t * h * w for t, h, w in grids)
    block = 2 * patches * hidden * (4 * hidden + 2 * config.intermediate_size)
    attention = sum(4 * t * (h * w) ** 2 * hidden for t, h, w in grids)
    joined = hidden * config.spatial_merge_size**2
    mergers = (1 + tower.num_levels) * 2 * patches / 4 * joined * (joined + config.out_hidden_size)
    return config.depth * (block + attention) + mergers + 2 * patches * hidden * tower.patch_width / 2


def gemm_peak(dtype: torch.dtype, clock: Clock) -> float:
    """FLOP/s of a large square product, the best of ten."""
    a, b = torch.randn(2, GEMM_SIDE, GEMM_SIDE).to(dtype)
    torch.mm(a, b)
    return 2 * GEMM_SIDE**3 / min(seconds(lambda: torch.mm(a, b), clock) for _ in range(10))


def reference_payload(visual: Any, work: Work, dtype: torch.dtype) -> torch.Tensor:
    """transformers' outputs in the order of our payload."""
    out = visual(work.peer.to(dtype), grid_thw=torch.tensor(work.grids))
    return torch.cat([out.pooler_output, *out.deepstack_features], dim=1).float()


def assert_agrees(name: str, got: torch.Tensor, peer: torch.Tensor, exact: torch.Tensor) -> None:
    """Our error against the float32 tower is at most 1.5 times the peer's in the same dtype, and small."""
    scale = exact.abs().mean()
    ours, theirs = ((x.float() - exact).abs().mean() / scale for x in (got, peer))
    print(f"{name}: mean error against transformers in float32, relative: ours {ours:.2e}, transformers {theirs:.2e}")
    assert got.shape == exact.shape
    assert ours <= max(1.5 * theirs, 1e-5), f"{name}: our error {ours:.3e} is above transformers' {theirs:.3e}"


def bench_forward(model: Path, dtype: torch.dtype, threads: int, rounds: int, clock: Clock) -> dict[str, float]:
    """Ratios of both works, after their outputs have been compared."""
    torch.set_num_threads(threads)
    processor = ProcessorConfig.load(model)
    tower = load_vision_tower(model, dtype=dtype, device="cpu", processor=processor)
    peer = AutoModelForImageTextToText.from_pretrained(model, dtype=dtype).model.visual.eval()
    exact = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).model.visual.eval()
    peak = gemm_peak(dtype, clock)
    print(f"\n{threads} thread(s), {dtype}, attention {tower.attention.name}, GEMM peak {peak / 1e9:.0f} GFLOP/s")
    ratios = {}
    for name, sides in WORKS.items():
        work = Work.of(sides, processor)
        values, grid = work.peer.to(dtype), torch.tensor(work.grids)
        assert_agrees(
            name,
            tower(work.ours, work.grids),
            reference_payload(peer, work, dtype),
            reference_payload(exact, work, torch.float32),
        )
        times = alternate(
            lambda work=work: tower(work.ours, work.grids),
            lambda values=values, grid=grid: peer(values, grid_thw=grid),
            rounds,
            clock,
        )
        flops = tower_flops(tower, work.grids)
        roofline = flops / peak / sorted(times.ours)[len(times.ours) // 2]
        print(times.row(f"forward {name}"))
        print(f"    {flops / 1e9:.0f} GFLOP, {roofline:.0%} of the roofline")
        ratios[f"forward_{name}_{threads}t"] = times.ratio
    return ratios


def bench_jpeg(model: Path, rounds: int, clock: Clock) -> dict[str, float]:
    """JPEG bytes to the tower's input against the PIL processor's, one thread each."""
    torch.set_num_threads(1)
    settings = ProcessorConfig.load(model).image
    peer = Qwen2VLImageProcessorPil(
        patch_size=settings.patch_size,
        temporal_patch_size=settings.temporal_patch_size,
        merge_size=settings.merge_size,
        size={"shortest_edge": settings.min_pixels, "longest_edge": settings.max_pixels},
        image_mean=list(settings.image_mean),
        image_std=list(settings.image_std),
    )
    processor = ProcessorConfig.load(model)

    def theirs(data: bytes) -> Any:
        return peer(images=[Image.open(io.BytesIO(data))], return_tensors="np")["pixel_values"]

    print(
        "\nJPEG bytes to pixel_values, one thread: uint8 for the tower here, float32 from transformers' PIL processor"
    )
    ratios = {}
    for width, height in ((1024, 1024), (448, 448), (1600, 1200)):
        data = jpeg(width, height)
        np.testing.assert_array_equal(preprocess_image(data, processor).pixel_values, theirs(data))
        times = alternate(
            lambda data=data: read_image(data, processor), lambda data=data: theirs(data), max(rounds, 15), clock
        )
        print(times.row(f"JPEG {width}x{height}"))
        ratios[f"jpeg_{width}x{height}"] = times.ratio
    return ratios


def transport_apart(rounds: int) -> dict[str, float]:
    """The ratios of transport, from a process that has no memory of a former part to use again."""
    print("\nTransport")
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(bench_transport.run, max(rounds, 9)).result()


def main() -> int:
    """Run all; 1 when a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall", help="cpu where the machine has other work")
    options = parser.parse_args()
    clock = CLOCKS[options.clock]
    threads = [count for count in options.threads if count <= len(affinity())]
    print(f"torch {torch.__version__}, cores {affinity()}, {options.dtype}")
    print(f"{options.rounds} rounds in turns, {options.clock} time")
    ratios: dict[str, float] = {}
    targets: dict[str, float] = {}
    transport = [transport_apart(options.rounds)]
    with checkpoint(options.model) as model, torch.inference_mode():
        for count in threads:
            ratios |= bench_forward(model, DTYPES[options.dtype], count, options.rounds, clock)
            targets |= {f"forward_{name}_{count}t": target for name, target in TARGETS.items()}
        of_jpeg = bench_jpeg(model, options.rounds, clock)
        of_pipeline = bench_pipeline.bench(model, options.rounds)
    ratios["jpeg_1024x1024"] = of_jpeg["jpeg_1024x1024"]
    targets["jpeg_1024x1024"] = JPEG_TARGET
    ratios |= of_pipeline
    targets |= dict.fromkeys(of_pipeline, bench_pipeline.TARGET)
    transport.append(transport_apart(options.rounds))
    print("\nUnder load")
    with checkpoint(options.model) as model:
        ratios |= asyncio.run(bench_calm.bench(model))
    targets |= bench_calm.TARGETS
    transport.append(transport_apart(options.rounds))
    ratios |= {name: statistics.median(each[name] for each in transport) for name in bench_transport.TARGETS}
    targets |= bench_transport.TARGETS
    return verdict(ratios, targets)


if __name__ == "__main__":
    sys.exit(main())
