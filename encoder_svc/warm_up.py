"""The first forwards of an encoder, before it says that it is ready: kernels are chosen, compiled and loaded by them.

Owns which sizes are common. Runs in the compute thread, where the real ones will, and so also gives the first measure
of its speed. Knows nothing of sockets or requests.
"""

import io
import time

import structlog
from PIL import Image

from common.processor_config import ProcessorConfig
from encoder_svc.preprocess import read_image
from encoder_svc.runner import TowerItem, TowerRunner

logger = structlog.get_logger(__name__)

# (pictures in the batch, width, height), from what costs least
SIZES = [(1, 224, 224), (1, 448, 448), (4, 448, 448), (1, 1280, 720), (1, 1024, 1024)]


async def warm_up(runner: TowerRunner, processor: ProcessorConfig, budget_s: float) -> int:
    """Run pictures of the common sizes until they are done or the time is over; how many batches ran.

    Raises ModelFailure for a tower whose embeddings are not usable.
    """
    began = time.monotonic()
    seen: set[object] = set()
    num_batches = 0
    for count, width, height in SIZES:
        if time.monotonic() - began >= budget_s:
            break
        prepared = read_image(_grey_png(width, height), processor)
        if (count, prepared.grid_thw) in seen:  # the pixel limits make it a size that has been
            continue
        seen.add((count, prepared.grid_thw))
        await runner.run([TowerItem("0" * 64, prepared.grid_thw, prepared.pixel_values)] * count)
        num_batches += 1
    logger.info("warmed up", batches=num_batches, seconds=round(time.monotonic() - began, 2))
    return num_batches


def _grey_png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (width, height), (127, 127, 127)).save(buffer, "PNG")
    return buffer.getvalue()
