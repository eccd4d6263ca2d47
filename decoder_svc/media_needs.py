"""Which embeddings the engine's sequences need, which of them were asked for, and what becomes of those that are here.

Owns what was asked for and has not arrived, and the words in which the engine asks. The embeddings themselves are the
pool's. Knows nothing of blocks or of where embeddings come from. Used in the engine thread.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from common.errors import InvalidRequest, TandemError
from decoder_svc.embedding_pool import EmbeddingPool
from decoder_svc.sequence import Sequence


@dataclass(frozen=True)
class MediaWanted:
    """Embeddings that a request needs and that are not here. Sent once for a request, and again when more are."""

    request_id: str
    attempt: int
    keys: list[str]


@dataclass(frozen=True)
class MediaBudget:
    """What became of the embeddings that were given to the engine.

    `released_bytes` of them are needed no more (negative: some that were kept are needed again), and `first_in_need` is
    the request that is the next to need any.
    """

    released_bytes: int
    first_in_need: str | None


class MediaNeeds:
    """What all sequences of an engine need of its pool."""

    def __init__(self, pool: EmbeddingPool) -> None:
        self._pool = pool
        self._first_in_need: str | None = None
        self.wanted: dict[Sequence, set[str]] = {}
        """Keys that were asked for and have not arrived, of the sequences that have media."""

    @property
    def num_waiting(self) -> int:
        """Sequences whose embeddings are not all here."""
        return sum(1 for keys in self.wanted.values() if keys)

    def want(self, sequences: Seq[Sequence], *, always: bool = False) -> list[MediaWanted]:
        """Ask for embeddings that were not asked for yet; with `always` also in vain, as an answer to a new request.

        Called after every step: what a sequence has computed it needs no more, and a preempted one needs it again.
        """
        wanted: dict[tuple[str, int], list[str]] = {}
        for sequence in sequences:
            if not sequence.prompt.spans and not always:
                continue
            keys = [span.key for span in sequence.spans_from(sequence.num_computed_tokens)]
            self._pool.need(sequence, keys)
            asked = self.wanted.setdefault(sequence, set())
            missing = [key for key in keys if key not in self._pool and key not in asked]
            asked.update(missing)
            if missing or always:
                wanted.setdefault((sequence.request_id, sequence.attempt), []).extend(missing)
        return [
            MediaWanted(request_id, attempt, list(dict.fromkeys(keys)))
            for (request_id, attempt), keys in wanted.items()
        ]

    def arrived(self, key: str, embedding: Tensor, now: float) -> dict[str, TandemError]:
        """Take in an embedding `[tokens, H*(1+L)]`; an error for each request that it does not fit."""
        self._pool.add(key, embedding)
        misfits: dict[str, TandemError] = {}
        for sequence, keys in self.wanted.items():
            if key in keys:
                keys.discard(key)
                sequence.media_wait_s = now - sequence.arrived_at
                try:
                    self.check_held(sequence)
                except TandemError as error:
                    misfits[sequence.request_id] = error
        return misfits

    def check_held(self, sequence: Sequence) -> None:
        """Refuse a sequence whose spans do not take exactly the rows of an embedding that is here for its key."""
        rows: dict[str, int] = {}
        for span in sequence.prompt.spans:
            rows[span.key] = max(rows.get(span.key, 0), span.row_offset + span.num_tokens)
        for key, num_tokens in rows.items():
            if (held := self._pool.tensors.get(key)) is not None and len(held) != num_tokens:
                raise InvalidRequest(
                    f"a media item has {num_tokens} tokens in the prompt, but {len(held)} rows in its embedding"
                )

    def forget(self, sequence: Sequence) -> None:
        """A sequence has ended."""
        self._pool.need(sequence, ())
        self.wanted.pop(sequence, None)

    def budget(self, sequences: Seq[Sequence]) -> list[MediaBudget]:
        """Tells of released bytes and of who, in this order, is the next to need some, when either has changed."""
        released, first = self._pool.take_released_bytes(), None
        if self._pool.has_needs:
            first = next(s.request_id for s in sequences if self._pool.needs_of(s))
        if not released and first == self._first_in_need:
            return []
        self._first_in_need = first
        return [MediaBudget(released, first)]
