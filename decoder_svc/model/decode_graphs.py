"""Decode steps as CUDA graphs: one for each of some batch sizes, recorded once and replayed.

Owns the sizes, the buffers that a recorded step reads, and the padding: rows that stand for nobody write to a spare
block that no sequence is ever given, so real keys and values are out of their reach. Steps with anything but one new
token of each sequence run as ever. Recorded at start, used in the engine thread. Legend: `S` sequences.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from common.metrics import Counter
from decoder_svc.kv_cache import KVCache
from decoder_svc.model.text import TextModel
from decoder_svc.model_input import ModelInput

GRAPH_STEPS = Counter("tandem_decoder_graph_steps_total", "Engine steps that were replayed as CUDA graphs")

# Sizes up to which a batch is doubled, and then the distance between sizes: padding is at most half of a small batch
# and a few rows of a large one.
_DOUBLED_TO, _DISTANCE = 8, 8
_LARGEST = 256

Recorded = Callable[[], Tensor]
Record = Callable[[Recorded], Recorded]


def batch_sizes(max_sequences: int) -> list[int]:
    """Batch sizes to record, ascending: 1, 2, 4, 8, then every 8, up to what can run together."""
    largest = min(max_sequences, _LARGEST)
    doubled = [1 << power for power in range(_DOUBLED_TO.bit_length())]
    sizes = {*doubled, *range(_DOUBLED_TO, largest, _DISTANCE), largest}
    return sorted(size for size in sizes if size <= largest)


class PaddedStep:
    """The buffers of one batch size: a `ModelInput` that stays where it is, and whose rows are filled in anew."""

    def __init__(self, size: int, max_blocks: int, block_size: int, spare_block: int, device: torch.device) -> None:
        rows = torch.arange(size, device=device)
        self._filled = 0
        self._nobody = spare_block * block_size + rows % block_size  # slots of rows that stand for nobody
        self._spare_block = spare_block
        self.model_input = ModelInput(
            input_ids=torch.zeros_like(rows),
            positions=torch.zeros(3, size, dtype=torch.int64, device=device),
            slot_mapping=self._nobody.clone(),
            cu_seqlens_q=torch.arange(size + 1, dtype=torch.int32, device=device),
            context_lens=torch.ones(size, dtype=torch.int32, device=device),
            block_tables=torch.full((size, max_blocks), spare_block, dtype=torch.int32, device=device),
            vision_rows=rows[:0],
            vision_embeds=None,
            logits_rows=rows,
            query_lens=(1,) * size,
            kv_lens=(max_blocks * block_size,) * size,  # what a recorded step must be able to read
        )

    def fill(self, step: ModelInput) -> None:
        """Take in a step of one new token of each of `S` sequences; the other rows stand for nobody."""
        num, mine = len(step.query_lens), self.model_input
        mine.input_ids[:num].copy_(step.input_ids)
        mine.positions[:, :num].copy_(step.positions)
        mine.slot_mapping[:num].copy_(step.slot_mapping)
        mine.context_lens[:num].copy_(step.context_lens)
        # Beyond a row's own blocks stay those of earlier steps: valid ones, which its context does not reach.
        mine.block_tables[:num, : step.block_tables.shape[1]].copy_(step.block_tables)
        if num < self._filled:
            left = slice(num, self._filled)
            mine.input_ids[left].zero_()
            mine.positions[:, left].zero_()
            mine.slot_mapping[left].copy_(self._nobody[left])
            mine.context_lens[left].fill_(1)
            mine.block_tables[left].fill_(self._spare_block)
        self._filled = num


class DecodeGraphs:
    """Recorded decode steps of one model over one KV cache, whose last block is theirs."""

    def __init__(
        self, model: TextModel, kv_cache: KVCache, *, max_sequences: int, max_model_len: int, record: Record
    ) -> None:
        """`record` makes of a forward pass what runs it again: `record_graph`, or the pass itself in tests."""
        max_blocks = -(-max_model_len // kv_cache.block_size)
        spare_block = kv_cache.num_blocks - 1
        self._steps: dict[int, tuple[PaddedStep, Recorded]] = {}
        for size in reversed(batch_sizes(max_sequences)):  # the largest first: the others fit into its memory
            padded = PaddedStep(size, max_blocks, kv_cache.block_size, spare_block, model.device)
            self._steps[size] = padded, record(_forward(model, padded.model_input, kv_cache))
        self._sizes = sorted(self._steps)

    def can_run(self, step: ModelInput) -> bool:
        """Whether a step has one new token and wants one row of logits of each of its sequences, and not too many."""
        num = len(step.query_lens)
        is_decode = step.vision_embeds is None and step.input_ids.shape[0] == step.logits_rows.shape[0] == num
        return is_decode and num <= self._sizes[-1]

    def run(self, step: ModelInput) -> Tensor:
        """Run a step; the new keys and values are in the cache afterwards.

        returns  [S, vocab] logits, in memory that the next run uses again
        """
        num = len(step.query_lens)
        padded, recorded = self._steps[smallest_that_holds(num, self._sizes)]
        padded.fill(step)
        logits = recorded()
        GRAPH_STEPS.inc()
        return logits[:num]


def smallest_that_holds(num: int, sizes: Sequence[int]) -> int:
    """The first of ascending sizes that is not below a number."""
    return next(size for size in sizes if size >= num)


def _forward(model: TextModel, model_input: ModelInput, kv_cache: KVCache) -> Recorded:
    return lambda: model(model_input, kv_cache)


class GraphRecorder:
    """Records CUDA graphs that share one pool of memory: what one gives is used before another runs."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    @torch.inference_mode()
    def __call__(self, forward: Recorded) -> Recorded:
        """Run a pass twice, so that kernels and their workspaces are there, then record it."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(2):
                forward()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            logits = forward()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
