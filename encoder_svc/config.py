"""Settings of the encoder service, read once in `__main__`."""

from dataclasses import dataclass

from common.image_header import DEFAULT_MAX_CANVAS_PIXELS
from common.messages import WireDtype
from common.settings import CommonSettings, DtypeName, Port


@dataclass(frozen=True, kw_only=True)
class EncoderSettings(CommonSettings):
    """Settings of `tandem encoder`."""

    control_endpoint: str = "tcp://127.0.0.1:7101"
    """ZMQ address to bind for control messages (hello, load, cancel, release)."""

    data_endpoint: str = "tcp://127.0.0.1:7102"
    """ZMQ address to bind for media bytes and embeddings. `ipc://...` is the fast path on one host."""

    http_port: Port = 7100
    """Port of /health, /ready and /metrics."""

    device: str = "auto"
    """Device of the vision tower: cpu, cuda, cuda:1, or auto."""

    devices: tuple[str, ...] = ()
    """Several devices, such as cuda:0,cuda:1: one encoder process is started for each. Ports of the second are by 10
    higher than those given, of the third by 20; ipc addresses end in -1, -2. Other settings hold for each process."""

    dtype: DtypeName = "auto"
    """Compute dtype of the vision tower: auto takes the checkpoint's."""

    compile_tower: bool = False
    """Let torch.compile make the tower's layers at start, which takes a minute or more: the same results within
    rounding in fewer kernels. For GPUs; on a CPU the kernels that are used otherwise are faster. Needs a C++ compiler
    on the machine, which our images have not, and on a GPU Triton; where it fails the encoder does not start."""

    wire_dtype: WireDtype | None = None
    """Dtype of the embeddings on the wire and in Redis; by default the compute dtype. int8 takes half the bytes of
    bfloat16, with a scale for each row and level, and costs some accuracy."""

    threads: int = 0
    """Threads of the forward pass on CPU; 0 takes the cores that this process may use."""

    warm_up_s: float = 10.0
    """Seconds that first forwards of common sizes may take before the encoder is ready."""

    preprocess_threads: int = 0
    """Threads that decode and resize images; 0 takes half of the cores that this process may use, shared among
    --devices."""

    video_threads: int = 1
    """Threads that read videos, which may take long: images never wait behind them."""

    max_patches_per_batch: int = 16_384
    """Patches in one forward; a larger item runs alone."""

    max_items_per_batch: int = 64
    """Items in one forward."""

    max_patches_per_slice: int = 4096
    """A video of more patches is encoded in slices of whole frames, between which other items run."""

    max_slice_s: float = 0.07
    """Seconds that a slice may take at the rate measured, which makes slices smaller on slow devices; never less than
    a frame."""

    max_batch_wait_s: float = 0.05
    """Seconds that a batch which is not full waits for images that are being prepared at that moment. It does not wait
    when there are none, and no longer than it will take itself; one that will take this long begins at once."""

    max_queued_patches: int = 1_048_576
    """Patches admitted and not yet encoded, above which requests are refused as overloaded."""

    max_queued_bytes: int = 1 << 30
    """Bytes of media files admitted and not yet encoded, above which requests are refused as overloaded."""

    hold_bytes: int = 2 << 30
    """Memory for embeddings that are held for decoders, and kept for repeats. Room for an item's embedding is reserved
    before it is encoded."""

    share_memory: bool = True
    """Let decoders of the same user on the same host, not in other containers, map embeddings of 1 MiB and more instead
    of receiving them: a fraction of the time, and of the CPU on both sides. CURVE keys play no part in it."""

    lease_s: float = 120.0
    """Seconds that an embedding is kept for a request that neither fetched nor released it."""

    max_media_bytes: int = 256 << 20
    """Bytes of one image or video file."""

    max_canvas_pixels: int = DEFAULT_MAX_CANVAS_PIXELS
    """Pixels of one image before it is resized; each media thread may need 3 bytes for each."""

    max_video_frames: int = 54_000
    """Frames of one video file."""

    max_video_s: float = 3600.0
    """Seconds that one video may play."""

    max_video_decode_s: float = 60.0
    """Seconds of a core that decoding one video may take; a busy machine takes nothing from it."""
