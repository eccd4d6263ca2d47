"""Which tokens the grammars of a step allow: computed by a thread of its own while the model runs.

Owns that thread and the form of the masks. Knows nothing of how grammars are written. Begun and applied in the engine
thread; llguidance runs without Python's lock, so the model's launches go on meanwhile.
"""

import os
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import numpy as np
import torch
from llguidance import LLExecutor
from numpy.typing import NDArray
from torch import Tensor

from decoder_svc.grammar import GrammarState
from decoder_svc.transfers import index_on, to_device


class GrammarMasks:
    """The masks of the rows of one step that follow a grammar."""

    def __init__(self, rows: Seq[int], banned: "Future[NDArray[np.bool_]]") -> None:
        """`banned` is [rows, vocab] for the given rows of the step's logits."""
        self._rows = list(rows)
        self._banned = banned

    def apply(self, scores: Tensor) -> None:
        """Make what the grammars do not allow impossible; `scores` [R, vocab], in place."""
        banned = to_device(self._banned.result(), scores.device)
        if len(self._rows) == scores.shape[0]:
            scores.masked_fill_(banned, -torch.inf)
        else:
            index = index_on(self._rows, scores.device)
            scores[index] = scores[index].masked_fill(banned, -torch.inf)


class GrammarMasker:
    """Computes the masks of one step at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar-masks")

    def begin(self, states: Seq[GrammarState | None]) -> GrammarMasks | None:
        """Start on a step's masks; None when no row follows a grammar. States may not change until they are applied."""
        rows = [row for row, state in enumerate(states) if state is not None]
        if not rows:
            return None
        followed = [state for state in states if state is not None]
        return GrammarMasks(rows, self._thread.submit(self._banned, followed))

    @cached_property
    def _executor(self) -> LLExecutor | None:
        """Half of the cores for masks, as the others are the model's; none where there are few: its threads spin."""
        num_threads = len(os.sched_getaffinity(0)) // 2
        return LLExecutor(num_threads=num_threads) if num_threads > 1 else None

    def _banned(self, states: Seq[GrammarState]) -> NDArray[np.bool_]:
        words = np.zeros((len(states), -(-self._vocab_size // 32)), np.int32)
        row_bytes = words.shape[1] * words.itemsize
        if self._executor is None:
            for index, state in enumerate(states):
                state.matcher.unsafe_compute_mask_ptr(words.ctypes.data + index * row_bytes, row_bytes)
        else:
            matchers = [(state.matcher, index) for index, state in enumerate(states)]
            self._executor.unsafe_compute_mask_ptr(matchers, words.ctypes.data, row_bytes, len(states))
        allowed = np.unpackbits(words.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        banned: NDArray[np.bool_] = allowed == 0
        return banned
