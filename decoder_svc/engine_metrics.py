"""What the engine counts and measures, and the check that an idle one holds nothing.

Owns the metrics' names and how they follow from the scheduler's and the block manager's own counts. Knows nothing of
models or sockets. Called in the engine thread.
"""

import time
from collections.abc import Sequence as Seq

from common.metrics import SECONDS_BUCKETS, Counter, Gauge, Histogram
from common.rate import RateMeter, seconds_for
from decoder_svc.block_manager import BlockManager
from decoder_svc.scheduler import Chunk, Scheduler

STEP_SECONDS = Histogram("tandem_decoder_step_seconds", "Time of one engine step", buckets=SECONDS_BUCKETS)
STEP_TOKENS = Histogram(
    "tandem_decoder_step_tokens",
    "Tokens in one engine step",
    buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048),
)
STEP_SEQUENCES = Histogram(
    "tandem_decoder_step_sequences",
    "Sequences in one engine step, by what they do in it",
    ["kind"],
    buckets=(0, 1, 2, 4, 8, 16, 32, 64, 128),
)
TOKENS = Counter("tandem_decoder_tokens_total", "Tokens that went through the language model", ["kind"])
PREEMPTIONS = Counter("tandem_decoder_preemptions_total", "Sequences put back to be recomputed")
PREFIX_TOKENS = Counter("tandem_decoder_prefix_tokens_total", "Prompt tokens of started sequences", ["cache"])
RUNNING = Gauge("tandem_decoder_running", "Sequences that hold KV blocks and run")
WAITING = Gauge("tandem_decoder_waiting", "Sequences that wait to be started")
WAITING_FOR_MEDIA = Gauge("tandem_decoder_waiting_for_media", "Sequences whose embeddings are not all here")
KV_BLOCKS = Gauge("tandem_decoder_kv_blocks", "KV blocks; cached are those of the free with known content", ["state"])
KV_EVICTIONS = Counter("tandem_decoder_kv_evictions_total", "KV blocks whose kept content was given up for another's")
PREFILL_RATE = Gauge("tandem_decoder_prefill_tokens_per_second", "Tokens of prompts a second, in steps full of them")
BACKLOG_SECONDS = Gauge("tandem_decoder_backlog_seconds", "Time that prompts which are not computed yet will take")
IDLE_SHARE = Gauge("tandem_decoder_device_idle_share", "Share of the last seconds in which no step ran on the device")
KV_TILES = Gauge(
    "tandem_decoder_kv_tiles", "Tiles of full KV blocks by how they are kept, as an idle decoder found them", ["kept"]
)
LEAKED = Gauge("tandem_decoder_leaked", "What an idle decoder still holds and should not", ["kind"])

# Looked up once: finding a label's child takes as long as counting.
_DECODED, _PREFILLED = TOKENS.labels("decode"), TOKENS.labels("prefill")
_DECODING, _PREFILLING = STEP_SEQUENCES.labels("decode"), STEP_SEQUENCES.labels("prefill")
_KV_USED, _KV_FREE, _KV_CACHED = (KV_BLOCKS.labels(state) for state in ("used", "free", "cached"))
_PREFIX_HIT, _PREFIX_MISS = PREFIX_TOKENS.labels("hit"), PREFIX_TOKENS.labels("miss")

IDLE_WINDOW_S = 5.0


class EngineMetrics:
    """Reads the counts of one engine. Counters advance by what has changed since the last look."""

    def __init__(self, scheduler: Scheduler, blocks: BlockManager) -> None:
        self._scheduler = scheduler
        self._blocks = blocks
        self._counted: dict[str, int] = {}
        self._window_began = time.monotonic()
        self._busy_s = 0.0
        self._prefill = RateMeter()

    def stepped(self, chunks: Seq[Chunk], seconds: float) -> None:
        """A step has run."""
        num_tokens = sum(chunk.num_tokens for chunk in chunks)
        decoded = sum(1 for chunk in chunks if chunk.num_tokens == 1)
        STEP_SECONDS.observe(seconds)
        STEP_TOKENS.observe(num_tokens)
        _DECODING.observe(decoded)
        _PREFILLING.observe(len(chunks) - decoded)
        _DECODED.inc(decoded)
        _PREFILLED.inc(num_tokens - decoded)
        self._busy_s += seconds
        if num_tokens > decoded:
            self._prefill.add(num_tokens - decoded, seconds)
            PREFILL_RATE.set(self._prefill.per_s)

    def look(self, num_waiting_for_media: int) -> None:
        """Say how things stand: after each step, and when a sequence leaves, since an idle engine runs no step."""
        scheduler, blocks = self._scheduler, self._blocks
        RUNNING.set(len(scheduler.running))
        WAITING.set(len(scheduler.waiting))
        WAITING_FOR_MEDIA.set(num_waiting_for_media)
        _KV_USED.set(blocks.num_used)
        _KV_FREE.set(blocks.num_free)
        _KV_CACHED.set(blocks.num_cached)
        self._advance(PREEMPTIONS, "preemptions", scheduler.num_preemptions)
        self._advance(KV_EVICTIONS, "evictions", blocks.num_evicted)
        misses = scheduler.num_prefix_tokens - scheduler.num_prefix_hit_tokens
        self._advance(_PREFIX_HIT, "hit", scheduler.num_prefix_hit_tokens)
        self._advance(_PREFIX_MISS, "miss", misses)

    def measure_backlog(self) -> float:
        """Seconds that queued prompts take at the rate of steps like those before."""
        backlog_s = seconds_for(self._scheduler.count_queued_tokens(), self._prefill.per_s)
        BACKLOG_SECONDS.set(backlog_s)
        return backlog_s

    def look_at_device(self, now: float) -> None:
        """Say which share of the time was idle; the window is some seconds."""
        elapsed = now - self._window_began
        if elapsed >= IDLE_WINDOW_S:
            IDLE_SHARE.set(max(0.0, 1.0 - self._busy_s / elapsed))
            self._window_began, self._busy_s = now, 0.0

    def checked(self, *, embedding_bytes: int, needs: int) -> None:
        """An idle engine was looked at: all counts are zero unless something leaks."""
        LEAKED.labels("kv_blocks").set(self._blocks.num_used)
        LEAKED.labels("embedding_bytes").set(embedding_bytes)
        LEAKED.labels("embedding_needs").set(needs)

    def looked_at_tiles(self, num_compressed: int, num_whole: int) -> None:
        """An idle engine counted how its full blocks are kept."""
        KV_TILES.labels("compressed").set(num_compressed)
        KV_TILES.labels("whole").set(num_whole)

    def _advance(self, counter: Counter, name: str, value: int) -> None:
        if advance := value - self._counted.get(name, 0):
            counter.inc(advance)
            self._counted[name] = value
