"""An encoder under its heaviest work: do probes and small pictures still get through, and is its memory bounded?

    python -m benchmarks.bench_calm [--model FOLDER] [--frames 256] [--images 2000]

An encoder process on one core encodes a video of 256x256 again and again. Meanwhile `/health` is asked 20 times a
second, and small pictures are encoded one after another, which are timed alone between two videos. Then thousands of
different pictures pass through it, and the most that is resident as the later half passes is compared with the most
before. At last it gets more pictures at once than a batch holds: the most that it then has in memory is compared with
what one full batch takes in a process that has nothing but the tower, and the embeddings that it may hold. All by wall
clock in one run. Last line: one JSON object, each value the limit divided by what was measured; exit code 1 below 1.
"""

import argparse
import asyncio
import contextlib
import io
import multiprocessing
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import httpx
import numpy as np
import torch
import zmq.asyncio

from benchmarks.bench_pipeline import PATIENCE_S, Client
from benchmarks.bench_vl import checkpoint, jpeg
from benchmarks.side_by_side import affinity, verdict
from common.link import Link
from common.messages import EncodeReply, EncodeRequest, Hello, MediaOptions, Modality, ProbeReply, ProbeRequest, Release
from common.processor_config import ProcessorConfig
from common.transport import Dealer
from common.vision_grid import Grid, num_patches
from deploy.local import free_port
from encoder_svc.config import EncoderSettings
from encoder_svc.model.weights import load_vision_tower
from encoder_svc.preprocess import read_image

SIDE, SMALL = 256, 224
NUM_SMALL = 200  # so that one in a hundred is more than the slowest
ALONE_EACH = 10  # pictures timed alone before each video
PROBES_PER_S = 20
HEALTH_P99_S, HEALTH_WORST_S = 0.05, 0.25
FIRST_IMAGES, SAMPLE_EVERY, MAX_GROWTH = 500, 100, 1.05
HOLD_BYTES = 64 << 20
BATCH_PATCHES = EncoderSettings.max_patches_per_batch
BATCH_SIDE = 448
MAX_PEAK = 1.5
TARGETS = dict.fromkeys(("health_p99", "health_worst", "small_images_p99", "memory_growth", "memory_peak"), 1.0)


def video(num_frames: int) -> bytes:
    """A moving gradient, in H.264."""
    buffer = io.BytesIO()
    ramp = np.add.outer(np.arange(SIDE), np.arange(SIDE)).astype(np.uint8)
    with av.open(buffer, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=Fraction(24))
        stream.width, stream.height, stream.pix_fmt = SIDE, SIDE, "yuv420p"
        for number in range(num_frames):
            frame = av.VideoFrame.from_ndarray(np.repeat(np.roll(ramp, number, 1)[:, :, None], 3, 2), format="rgb24")
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return buffer.getvalue()


def resident_bytes(pid: int, field: str = "VmRSS") -> int:
    """What a process has in memory, or with "VmHWM" the most that it had since `forget_peak`."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:")) << 10


def forget_peak(pid: int) -> None:
    """Count the most that a process has in memory anew."""
    Path(f"/proc/{pid}/clear_refs").write_text("5")


@dataclass(frozen=True)
class Timed:
    """Seconds until an item was held, and those of them that its forward took."""

    seconds: float
    forward_s: float


@dataclass(frozen=True)
class Encoder:
    """A process, its probes, and a gateway's way to it."""

    process: asyncio.subprocess.Process
    url: str
    control: Link
    data: Link
    client: Client
    probed: "asyncio.Future[ProbeReply]"

    async def encode(self, source: bytes, grid: Grid, modality: Modality, options: MediaOptions) -> Timed:
        """Have a new item encoded; it is let go as soon as it is held."""
        name, key = secrets.token_hex(8), secrets.token_hex(32)
        peer = self.data.peer
        assert peer is not None
        assert peer.fingerprint is not None
        answers = self.client._waiting[name] = asyncio.Queue()
        began = time.perf_counter()
        request = EncodeRequest(
            request_id=name,
            key=key,
            modality=modality,
            options=options,
            expected_grid=grid,
            fingerprint=peer.fingerprint,
            time_left_s=PATIENCE_S,
        )
        self.data.send(request, source)
        reply, _ = await answers.get()
        seconds = time.perf_counter() - began
        del self.client._waiting[name]
        assert isinstance(reply, EncodeReply), reply
        assert reply.error is None, reply
        self.control.send_or_keep(Release(request_id=name))
        return Timed(seconds, reply.times.forward_s)

    async def metric(self, name: str) -> float:
        """A metric's value."""
        async with httpx.AsyncClient(trust_env=False) as client:
            lines = (await client.get(f"{self.url}/metrics")).text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))

    def resident_bytes(self) -> int:
        """What the process has in memory."""
        return resident_bytes(self.process.pid)


@contextlib.asynccontextmanager
async def encoder(model: Path, core: int, *more: str) -> AsyncIterator[Encoder]:
    """An encoder process on one core, ready; `more` are flags."""
    with tempfile.TemporaryDirectory(prefix="tdm") as folder:
        addresses = {name: f"ipc://{folder}/{name}" for name in ("control", "data")}
        port = free_port()
        options = ["--model", str(model), "--served-model-name", "bench", "--device", "cpu", "--threads", "1"]
        options += ["--control-endpoint", addresses["control"], "--data-endpoint", addresses["data"]]
        options += ["--http-port", str(port), "--preprocess-threads", "1", "--hold-bytes", str(HOLD_BYTES)]
        options += ["--dtype", "bfloat16", "--log-level", "warning", *more]
        process = await asyncio.create_subprocess_exec(
            *("taskset", "-c", str(core), sys.executable, "-m", "encoder_svc", *options),
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        context = zmq.asyncio.Context()
        hello = Hello(role="gateway", instance_id="bench", model="bench", version="0", is_ready=True)
        probed: asyncio.Future[ProbeReply] = asyncio.get_running_loop().create_future()

        def link(name: str) -> Link:
            return Link(
                Dealer(context, addresses[name], name="bench"),
                lambda: hello,
                role="encoder",
                on_message=lambda _, message, payload: (
                    probed.set_result(message) if isinstance(message, ProbeReply) else client.take(message, payload)
                ),
            )

        control, data = link("control"), link("data")
        client = Client(data)
        running = [asyncio.create_task(one.run()) for one in (control, data)]
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not (data.is_ready and control.is_ready):
                    assert process.returncode is None, "the encoder ended"
                    await asyncio.sleep(0.05)
            yield Encoder(process, f"http://127.0.0.1:{port}", control, data, client, probed)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)
            for one in (control, data):
                one.close()
            context.destroy(linger=0)
            process.kill()
            await process.wait()


async def probe_health(url: str, times: list[float]) -> None:
    """Ask for the process's health, at a steady rate, until cancelled."""
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            began = time.perf_counter()
            assert (await client.get(f"{url}/health")).status_code == 200
            times.append(time.perf_counter() - began)
            await asyncio.sleep(max(0.0, 1 / PROBES_PER_S - times[-1]))


def p99(values: list[float]) -> float:
    """The value that one in a hundred exceeds."""
    return sorted(values)[min(len(values) - 1, int(len(values) * 0.99))]


async def beside_a_video(to: Encoder, processor: ProcessorConfig, num_frames: int) -> dict[str, float]:
    """Probes and small pictures while a video encodes."""
    picture = jpeg(SMALL, SMALL)
    grid = read_image(picture, processor).grid_thw
    still = MediaOptions()
    await to.encode(picture, grid, "image", still)
    source, options = video(num_frames), MediaOptions(num_frames=num_frames)
    to.data.send(ProbeRequest(request_id="p", key="a" * 64, options=options, time_left_s=PATIENCE_S), source)
    facts = (await to.probed).facts
    assert facts is not None
    before = [await to.metric(f"tandem_encoder_forward_seconds_{part}") for part in ("sum", "count")]
    health: list[float] = []
    alone: list[Timed] = []
    small: list[Timed] = []
    probing = asyncio.create_task(probe_health(to.url, health))
    while len(small) < NUM_SMALL:
        alone += [await to.encode(picture, grid, "image", still) for _ in range(ALONE_EACH)]
        encoding = asyncio.create_task(to.encode(source, facts.grid, "video", options))
        while not encoding.done():
            small.append(await to.encode(picture, grid, "image", still))
        await encoding
    probing.cancel()
    await asyncio.gather(probing, return_exceptions=True)
    spent, count = [
        await to.metric(f"tandem_encoder_forward_seconds_{part}") - then
        for part, then in zip(("sum", "count"), before, strict=True)
    ]
    pictures_s = sum(picture.forward_s for picture in alone + small)
    slice_s = (spent - pictures_s) / max(1.0, count - len(alone) - len(small))
    alone_s, small_s = ([picture.seconds for picture in pictures] for pictures in (alone, small))
    bound = 3 * statistics.median(alone_s) + slice_s
    print(f"video of grid {facts.grid}; small pictures of grid {grid}; one slice takes {slice_s * 1e3:.0f} ms")
    print(f"small picture alone: median {statistics.median(alone_s) * 1e3:.1f} ms, p99 {p99(alone_s) * 1e3:.1f} ms")
    print(
        f"beside the video: {len(small)}, median {statistics.median(small_s) * 1e3:.1f}, "
        f"p99 {p99(small_s) * 1e3:.1f} ms"
    )
    print(
        f"/health: {len(health)}, median {statistics.median(health) * 1e3:.1f}, p99 {p99(health) * 1e3:.1f}, "
        f"worst {max(health) * 1e3:.1f} ms"
    )
    return {
        "health_p99": HEALTH_P99_S / p99(health),
        "health_worst": HEALTH_WORST_S / max(health),
        "small_images_p99": bound / p99(small_s),
    }


async def growth(to: Encoder, processor: ProcessorConfig, num_images: int) -> float:
    """The limit of the growth of its memory over different pictures, divided by the growth.

    At single moments it differs by a heap of the C library, 64 MiB, that is there or not: compared is the most while
    the later half of the pictures passed with the most while the earlier half did.
    """
    picture = jpeg(SMALL, SMALL)
    grid = read_image(picture, processor).grid_thw
    gate = asyncio.Semaphore(8)

    async def one() -> None:
        async with gate:
            await to.encode(picture, grid, "image", MediaOptions())

    await asyncio.gather(*(one() for _ in range(FIRST_IMAGES)))
    resident = []
    for _ in range(num_images // SAMPLE_EVERY):
        await asyncio.gather(*(one() for _ in range(SAMPLE_EVERY)))
        resident.append(to.resident_bytes())
    half = len(resident) // 2
    earlier, later = max(resident[:half]), max(resident[half:])
    print(
        f"{num_images} pictures after the first {FIRST_IMAGES}: at most {earlier >> 20} MiB resident in the earlier "
        f"half, {later >> 20} in the later; after each {SAMPLE_EVERY} {[one >> 20 for one in resident]}"
    )
    return MAX_GROWTH / (later / earlier)


def one_batch_alone(model: Path) -> int:
    """In a process of its own that loads the tower: bytes that a full batch adds at most."""
    torch.set_num_threads(1)
    processor = ProcessorConfig.load(model)
    tower = load_vision_tower(model, dtype=torch.bfloat16, device="cpu", processor=processor)
    prepared = read_image(jpeg(BATCH_SIDE, BATCH_SIDE), processor)
    items = [prepared] * (BATCH_PATCHES // num_patches(prepared.grid_thw))
    loaded = resident_bytes(os.getpid())
    forget_peak(os.getpid())
    with torch.inference_mode():
        tower([torch.from_numpy(item.pixel_values.copy()) for item in items], [item.grid_thw for item in items])
    return resident_bytes(os.getpid(), "VmHWM") - loaded


async def peak(to: Encoder, processor: ProcessorConfig, model: Path) -> float:
    """Of an encoder that has computed nothing yet: the limit of what it has in memory above its weights, with more than
    enough to do, divided by that."""
    loaded = to.resident_bytes()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as alone:
        activations = alone.submit(one_batch_alone, model).result()
    picture = jpeg(BATCH_SIDE, BATCH_SIDE)
    grid = read_image(picture, processor).grid_thw
    forget_peak(to.process.pid)
    count = 4 * BATCH_PATCHES // num_patches(grid)
    await asyncio.gather(*(to.encode(picture, grid, "image", MediaOptions()) for _ in range(count)))
    most = resident_bytes(to.process.pid, "VmHWM") - loaded
    print(
        f"one full batch alone takes {activations >> 20} MiB, {HOLD_BYTES >> 20} MiB may be held; the encoder with "
        f"{count} pictures of {BATCH_SIDE}x{BATCH_SIDE} at once has at most {most >> 20} MiB above its weights"
    )
    return MAX_PEAK * (activations + HOLD_BYTES) / most


async def bench(model: Path, num_frames: int = 256, num_images: int = 2000) -> dict[str, float]:
    """Print the table; gives the ratios of `TARGETS`."""
    cores = affinity()
    print(f"encoder on core {cores[0]}, one compute thread, bfloat16; this client on {cores}")
    processor = ProcessorConfig.load(model)
    async with encoder(model, cores[0]) as to:
        ratios = await beside_a_video(to, processor, num_frames)
        ratios["memory_growth"] = await growth(to, processor, num_images)
    async with encoder(model, cores[0], "--warm-up-s", "0") as to:
        ratios["memory_peak"] = await peak(to, processor, model)
    return ratios


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--frames", type=int, default=256)
    parser.add_argument("--images", type=int, default=2000)
    arguments = parser.parse_args()
    with checkpoint(arguments.model) as model:
        return verdict(asyncio.run(bench(model, arguments.frames, arguments.images)), TARGETS)


if __name__ == "__main__":
    sys.exit(main())
