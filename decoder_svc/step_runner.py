"""One step on the model's device: launched, sampled, and read back in one copy.

Owns the order build → forward → sample → read, and what of a step is still on the device in between. Knows nothing of
scheduling or of what tokens mean for a request. Nothing but `read` waits for the device, and no sequence changes before
it. A step may be launched before the one before is read: it takes its tokens from the device, and is sampled when they
are known here too, since penalties and grammars depend on them. Runs in the engine thread.
"""

import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from decoder_svc.grammar_masks import GrammarMasker, GrammarMasks
from decoder_svc.input_builder import UnreadTokens, build_model_input
from decoder_svc.kv_cache import KVCache
from decoder_svc.model.decode_graphs import DecodeGraphs
from decoder_svc.model.text import TextModel
from decoder_svc.prompt_logprobs import PromptLogprobs, token_rows
from decoder_svc.sampler import Drawn, SampledToken, Sampler
from decoder_svc.scheduler import Chunk
from decoder_svc.sequence import Sequence
from decoder_svc.transfers import Readback, index_on


@dataclass
class Step:
    """Chunks that were launched together, and what is known of their results.

    sequences  those that get a token, in the order of their rows
    logits     [R, vocab]       of each chunk its prompt rows, then one if it gives a token
    hidden     [R, H] or None   the same rows after the last norm, when a sequence is pooled
    """

    chunks: Seq[Chunk]
    sequences: list[Sequence]
    logits: Tensor
    hidden: Tensor | None
    readback: Readback
    launched_at: float
    masks: GrammarMasks | None = None
    are_masks_begun: bool = False
    drawn: Drawn | None = None
    prompt_logprobs: PromptLogprobs | None = None
    embeddings: int | None = None


class StepRunner:
    """Runs the steps of one engine."""

    def __init__(
        self,
        model: TextModel,
        kv_cache: KVCache,
        sampler: Sampler,
        embeddings: Mapping[str, Tensor],
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """`embeddings` [tokens, H*(1+L)] by media key: of each span that a chunk reaches when it is launched."""
        self._model = model
        self._device = model.device
        self._graphs = graphs
        self._kv_cache = kv_cache
        self._embeddings = embeddings
        self.sampler = sampler
        self.masker = GrammarMasker(model.config.vocab_size)

    def launch(self, chunks: Seq[Chunk], before: Step | None = None) -> Step:
        """Build the inputs and give the device the forward pass; `before` is the step that is not read yet."""
        launched_at = time.monotonic()
        unread = None
        if before is not None and before.drawn is not None:
            unread = UnreadTokens(before.sequences, before.drawn.token_ids)
        model_input = build_model_input(chunks, self._embeddings, self._kv_cache.block_size, self._device, unread)
        sequences = [chunk.sequence for chunk in chunks if chunk.gives_token]
        masks = None if before is not None else self._begin_masks(sequences)
        readback = Readback(self._device)
        hidden = None
        if any(sequence.is_pooled for sequence in sequences):
            hidden, _ = self._model.hidden_states(model_input, self._kv_cache)
            logits = self._model.logits(hidden)
        elif self._graphs is not None and self._graphs.can_run(model_input):
            logits = self._graphs.run(model_input)
        else:
            logits = self._model(model_input, self._kv_cache)
        return Step(chunks, sequences, logits, hidden, readback, launched_at, masks, before is None)

    def sample(self, step: Step) -> None:
        """Give the device the choice of tokens, and the copy of all that the host wants to know.

        Sequences that have ended since the step was launched get none.
        """
        if not step.are_masks_begun:
            step.masks = self._begin_masks([s for s in step.sequences if not s.is_ended])
        step.prompt_logprobs = PromptLogprobs.of(step.chunks, step.logits, step.readback)
        rows = token_rows(step.chunks)
        live = [(row, s) for row, s in zip(rows, step.sequences, strict=True) if not s.is_ended]
        logits, hidden = step.logits, step.hidden
        if len(live) < len(logits):
            index = index_on([row for row, _ in live], logits.device)
            logits = logits.index_select(0, index)
            hidden = None if hidden is None else hidden.index_select(0, index)
            step.sequences = [sequence for _, sequence in live]
        if live:
            step.drawn = self.sampler.draw(logits, step.sequences, step.masks, step.readback)
            if hidden is not None:
                step.embeddings = step.readback.add(F.normalize(hidden.float(), dim=1))
        step.readback.start()

    def read(self, step: Step) -> list[SampledToken]:
        """Wait for the results: a token for each of the step's sequences, an embedding for those that are pooled."""
        parts = step.readback.wait()
        assert step.prompt_logprobs is not None, "the step was sampled"
        step.prompt_logprobs.keep(parts)
        if step.drawn is None:
            return []
        sampled = step.drawn.sampled(parts)
        if step.embeddings is None:
            return sampled
        return [
            token._replace(embedding=embedding) if sequence.is_pooled else token
            for sequence, token, embedding in zip(step.sequences, sampled, parts[step.embeddings].tolist(), strict=True)
        ]

    def _begin_masks(self, sequences: Seq[Sequence]) -> GrammarMasks | None:
        return self.masker.begin([sequence.grammar for sequence in sequences])
