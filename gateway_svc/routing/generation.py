"""The story of one request: a decoder, its media, its tokens, and another decoder when the first is lost.

Owns the attempts and the tokens so far, which are what makes a request resumable: randomness is keyed by seed, choice
and position, so the continuation elsewhere is the same. Late and duplicate tokens are dropped by attempt and offset.
Whatever way the story ends, nothing of it stays at a decoder or an encoder. Runs on the event loop.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence

import msgspec
import structlog

from common.embedding_cache import EmbeddingCache
from common.errors import (
    DeadlineExceeded,
    DecoderUnavailable,
    ModelFailure,
    PeerUnreachable,
    ProtocolError,
    TandemError,
    error_info,
)
from common.link import Link
from common.messages import Cancel, GenerateRequest, MediaAt, MediaNeeded, SequenceTokens
from common.metrics import Counter
from common.wire import error_from_detail
from gateway_svc.backend import GenerationEvent, MediaOutcome, MediaReport
from gateway_svc.media.item import LoadedMedia
from gateway_svc.routing.changes import wait_for_change
from gateway_svc.routing.decoder_pool import DecoderEvent, DecoderLost, DecoderPool, Run
from gateway_svc.routing.encoder_pool import EncoderPool
from gateway_svc.routing.media_resolver import ENCODER_WAIT_S, MediaResolver

logger = structlog.get_logger(__name__)

RESUMED = Counter("tandem_gateway_resumed_total", "Requests that went on at another decoder")
MAX_ATTEMPTS = 8
MAX_LOST_IN_A_ROW = 3  # decoders that a request may see die before a token of it: it may be what ends them
DECODER_WAIT_S = 60.0
CANCEL_WAIT_S = 2.0


class Generation:
    """One request from its first decoder to its last token."""

    def __init__(
        self,
        request: GenerateRequest,
        media: Sequence[LoadedMedia],
        deadline: float,
        *,
        decoders: DecoderPool,
        encoders: EncoderPool,
        cache: EmbeddingCache | None,
        encoder_wait_s: float = ENCODER_WAIT_S,
        decoder_wait_s: float = DECODER_WAIT_S,
    ) -> None:
        self._request = request
        self._media = media
        self._deadline = deadline
        self._decoders = decoders
        self._decoder_wait_s = decoder_wait_s
        self._outputs: list[list[int]] = [list(o) for o in request.outputs] or [[] for _ in range(request.sampling.n)]
        self._finished: set[int] = set()
        self._reported: set[str] = set()
        self._asked: set[str] = set()  # keys that some decoder needed
        self._resolving: set[str] = set()  # keys that a source is being looked for
        self._failed_links: list[Link] = []
        self._num_lost_in_a_row = 0
        self._run: Run | None = None
        self._events: asyncio.Queue[DecoderEvent | MediaReport | TandemError] = asyncio.Queue()
        self._media_tasks: set[asyncio.Task[None]] = set()
        self._resolver = MediaResolver(
            request.request_id,
            media,
            fingerprint=request.fingerprint,
            wire_dtype=request.wire_dtype,
            encoders=encoders,
            cache=cache,
            deadline=deadline,
            encoder_wait_s=encoder_wait_s,
            on_found=self._on_media_found,
        )

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Tokens and media reports until every choice has finished. Raises TandemError; closing it cancels all."""
        # One timer for the request: one for each token would be a tenth of the gateway's work.
        late = DeadlineExceeded("the request did not finish in the time that it was given")
        time_left_s = max(0.0, self._deadline - time.monotonic())
        alarm = asyncio.get_running_loop().call_later(time_left_s, self._events.put_nowait, late)
        try:
            for attempt in range(self._request.attempt, self._request.attempt + MAX_ATTEMPTS):
                num_tokens = self._num_tokens_so_far
                run = await self._begin(attempt)
                async with contextlib.aclosing(self._follow(run)) as events:
                    async for event in events:
                        yield event
                if len(self._finished) == len(self._outputs):
                    return
                if self._num_tokens_so_far > num_tokens:
                    self._num_lost_in_a_row = 0
                if self._num_lost_in_a_row >= MAX_LOST_IN_A_ROW:
                    raise ModelFailure(
                        f"{MAX_LOST_IN_A_ROW} decoders in a row ended while they worked on this request, which is not "
                        "sent to another: change it, or report it to whoever runs this server"
                    )
                RESUMED.inc()
                logger.warning("a decoder was lost; the request goes on elsewhere", request_id=self._request.request_id)
            raise DecoderUnavailable(f"the request was lost by {MAX_ATTEMPTS} decoders in a row", retry_after_s=1.0)
        finally:
            alarm.cancel()
            await self._close()

    @property
    def _num_tokens_so_far(self) -> int:
        return sum(map(len, self._outputs))

    def end_choice(self, choice: int) -> None:
        """One choice is long enough for the client: its decoder goes on with the others alone."""
        if choice in self._finished:
            return
        self._finished.add(choice)
        if self._run is not None:
            self._run.link.send_or_keep(Cancel(request_id=self._request.request_id, choice=choice))

    async def _begin(self, attempt: int) -> Run:
        """Send the request, with the tokens so far, to the best decoder; wait for one when there is none."""
        while True:
            changed = self._decoders.changes.next
            link = self._decoders.pick(self._failed_links, self._request)
            if link is not None:
                try:
                    self._run = self._decoders.begin(link, self._attempt(attempt), self._events.put_nowait)
                    return self._run
                except PeerUnreachable:  # it left this moment, or does not read
                    if link not in self._failed_links:
                        self._failed_links.append(link)
                        continue
            error = DecoderUnavailable("no decoder is available: try again later", retry_after_s=1.0)
            with self._decoders.holding():
                await wait_for_change(changed, min(self._deadline, time.monotonic() + self._decoder_wait_s), error)

    def _attempt(self, attempt: int) -> GenerateRequest:
        return msgspec.structs.replace(
            self._request,
            attempt=attempt,
            outputs=self._outputs if any(self._outputs) else [],
            finished=sorted(self._finished),
            time_left_s=max(0.0, self._deadline - time.monotonic()),
        )

    async def _follow(self, run: Run) -> AsyncGenerator[GenerationEvent, None]:
        """Events of one attempt; returns when all choices have finished or the decoder is lost."""
        while len(self._finished) < len(self._outputs):
            event = await self._next()
            if isinstance(event, MediaReport):
                yield event
            elif event.attempt != run.attempt:
                continue  # said before the request went elsewhere
            elif isinstance(event, DecoderLost):
                self._num_lost_in_a_row += not event.was_draining
                self._give_up(run)
                return
            elif isinstance(event, MediaNeeded):
                for report in self._need(event):
                    yield report
            elif (tokens := self._accept(run, event)) is not None:
                yield tokens
            elif self._run is None:
                return  # the decoder could not serve it; another may

    async def _next(self) -> "DecoderEvent | MediaReport":
        """What happens next. Raises the error that an item ended with, or DeadlineExceeded."""
        event = await self._events.get()
        if isinstance(event, TandemError):
            raise event
        return event

    def _need(self, event: MediaNeeded) -> list[MediaReport]:
        """Look for sources. Items that a new attempt does not ask for are the decoder's already."""
        # What is being looked for is told to the decoder of the time: a new attempt needs no second search.
        if keys := [key for key in event.keys if key not in self._resolving]:
            self._resolving.update(keys)
            task = asyncio.create_task(self._resolve(keys, event.failed_source), name="resolve-media")
            self._media_tasks.add(task)
            task.add_done_callback(self._media_tasks.discard)
        self._asked.update(event.keys)
        if event.failed_source is not None:
            return []
        present = [item for item in self._media if item.key not in self._asked and item.key not in self._reported]
        self._reported.update(item.key for item in present)
        return [MediaReport(item.key, "decoder", self._num_tokens(item)) for item in present]

    async def _resolve(self, keys: Sequence[str], failed_source: str | None) -> None:
        try:
            await self._resolver.resolve(keys, failed_source)
        except* TandemError as group:
            self._events.put_nowait(first_error(group))
        except* Exception as group:
            logger.error("resolving media failed", exc_info=group)
            self._events.put_nowait(TandemError("an internal error kept the media from being encoded"))

    def _on_media_found(self, item: LoadedMedia, source: str, was_encoded: bool) -> None:
        self._resolving.discard(item.key)
        if self._run is not None:
            self._run.link.send_or_keep(MediaAt(request_id=self._request.request_id, key=item.key, source=source))
        if item.key not in self._reported:
            self._reported.add(item.key)
            outcome: MediaOutcome = "encoded" if was_encoded else "cache"
            self._events.put_nowait(MediaReport(item.key, outcome, self._num_tokens(item)))

    def _num_tokens(self, item: LoadedMedia) -> int:
        return next(entry.num_tokens for entry in self._request.media if entry.key == item.key)

    def _accept(self, run: Run, event: SequenceTokens) -> SequenceTokens | None:
        """New tokens of one choice, without those that were seen before; None when there are none."""
        if event.finish_reason == "error" and event.error is not None:
            error = error_from_detail(event.error)
            if isinstance(error, ModelFailure | ProtocolError):
                self._decoders.blame(run)
            tried = [*self._failed_links, run.link]
            is_last = all(link in tried for link in self._decoders.ready)
            if is_last or not error_info(error).is_retryable or isinstance(error, DeadlineExceeded):
                raise error
            self._give_up(run)
            return None
        if event.finish_reason in ("hand_over", "cancelled"):
            self._give_up(run)
            return None
        if event.choice in self._finished:
            return None  # a resumed request carries its finished choices along, and they end once more
        output = self._outputs[event.choice] if event.choice < len(self._outputs) else None
        seen = -1 if output is None else len(output) - event.offset
        if output is None or seen < 0:
            self._answered_nonsense(run)
            return None
        tokens = event.tokens[seen:]
        output.extend(tokens)
        if output:
            self._resolver.release()
        if event.finish_reason is not None:
            self._finished.add(event.choice)
        elif not tokens:
            return None
        logprobs = event.logprobs[seen:] if event.logprobs is not None else None
        return msgspec.structs.replace(event, offset=len(output) - len(tokens), tokens=tokens, logprobs=logprobs)

    def _answered_nonsense(self, run: Run) -> None:
        """Another decoder may do better, a few times; this one is not asked for long if it goes on like that."""
        logger.error("a decoder skipped tokens, or answered for a choice that is not there", decoder=run.instance_id)
        self._decoders.blame(run)
        self._num_lost_in_a_row += 1
        if all(link in (*self._failed_links, run.link) for link in self._decoders.ready):
            raise ProtocolError("a decoder skipped tokens of an answer, or answered for a choice that is not there")
        self._give_up(run)

    def _give_up(self, run: Run) -> None:
        self._decoders.end(run, is_finished=False)
        self._failed_links.append(run.link)
        self._run = None

    async def _close(self) -> None:
        if self._run is not None:
            # Elsewhere, choices that had ended before may still be running.
            is_first = self._run.attempt == self._request.attempt
            self._decoders.end(self._run, is_finished=is_first and len(self._finished) == len(self._outputs))
            self._run = None
        try:
            for task in self._media_tasks:
                task.cancel()
            if self._media_tasks:
                await asyncio.wait(self._media_tasks, timeout=CANCEL_WAIT_S)
        finally:
            self._resolver.release()


def first_error(group: BaseExceptionGroup[TandemError]) -> TandemError:
    """One error of a group, for the one answer that the client gets."""
    error = group.exceptions[0]
    return first_error(error) if isinstance(error, BaseExceptionGroup) else error
