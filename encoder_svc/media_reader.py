"""Media bytes to what the tower takes, and to what a prompt needs to know of a video, within limits.

Owns the limits of one item and the memory of videos probed before: the gateway asks for a video's facts first and for
its encoding soon after, and the frames to take need not be found out twice. Called in the encoder's media threads.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

from common.errors import InvalidRequest
from common.messages import EncodeRequest, ProbeRequest, VideoFacts
from common.processor_config import ProcessorConfig
from encoder_svc.preprocess import PreparedMedia, read_image, read_video
from encoder_svc.video_decode import VideoProbe, probe_video
from encoder_svc.video_source import VideoLimits

MAX_REMEMBERED_PROBES = 1024


class MediaReader:
    """Reads items for one checkpoint. All its methods may be called from several threads at once."""

    def __init__(self, processor: ProcessorConfig, *, max_canvas_pixels: int, video_limits: VideoLimits) -> None:
        self._processor = processor
        self._max_canvas_pixels = max_canvas_pixels
        self._video_limits = video_limits
        self._probes: OrderedDict[str, VideoProbe] = OrderedDict()
        self._lock = threading.Lock()

    def prepare(
        self, request: EncodeRequest, source: memoryview, is_over: Callable[[], bool] = lambda: False
    ) -> PreparedMedia:
        """An item's patches. Raises InvalidRequest when they are not of the grid that its header promised.

        A video that is being read stops soon after `is_over` says so, with `Cancelled`.
        """
        processor = self._processor.with_options(request.options)
        if request.modality == "image":
            prepare = partial(read_image, max_canvas_pixels=self._max_canvas_pixels)
        else:
            limits = dataclasses.replace(self._video_limits, is_over=is_over)
            prepare = partial(read_video, limits=limits, probe=self._remembered(request.key))
        prepared = prepare(bytes(source), processor)
        if prepared.grid_thw != request.expected_grid:
            raise InvalidRequest(
                f"the {request.modality} decodes to grid {prepared.grid_thw}, its header promised "
                f"{request.expected_grid}: the file is damaged or unusual; re-encode it"
            )
        return prepared

    def probe(
        self, request: ProbeRequest, source: memoryview, is_over: Callable[[], bool] = lambda: False
    ) -> VideoFacts:
        """A video's grid, frames and time stamps. Stops soon after `is_over` says so, with `Cancelled`."""
        probe = self._remembered(request.key)
        if probe is None:
            processor = self._processor.with_options(request.options)
            limits = dataclasses.replace(self._video_limits, is_over=is_over)
            probe = probe_video(bytes(source), processor, limits=limits)
            self._remember(request.key, probe)
        return VideoFacts(grid=probe.grid_thw, frame_indices=probe.frame_indices, timestamps=probe.timestamps)

    def _remembered(self, key: str) -> VideoProbe | None:
        with self._lock:
            probe = self._probes.get(key)
            if probe is not None:
                self._probes.move_to_end(key)
            return probe

    def _remember(self, key: str, probe: VideoProbe) -> None:
        with self._lock:
            self._probes[key] = probe
            if len(self._probes) > MAX_REMEMBERED_PROBES:
                self._probes.popitem(last=False)
