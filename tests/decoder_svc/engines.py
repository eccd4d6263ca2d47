"""Engines over tiny models, driven step by step without sockets or threads, and the reference's answers."""

import random
import time
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from common.messages import GenerateRequest, MediaItem, SequenceTokens
from decoder_svc.engine import Engine, EngineLimits, Event
from decoder_svc.kv_budget import make_kv_cache
from decoder_svc.media_needs import MediaBudget, MediaWanted
from decoder_svc.model.decode_graphs import DecodeGraphs, Record
from decoder_svc.model.text import TextModel
from tests.decoder_svc.model.pairs import Pair
from tests.decoder_svc.requests import MERGE_SIZE, PAD_ID, generate_request, picture

BLOCK_SIZE = 4
OVERLAPS_STEPS = False
"""Whether engines overlap their steps, unless a test says otherwise: the fixture `steps` sets it."""


def make_engine(
    model: TextModel,
    *,
    num_blocks: int = 64,
    max_model_len: int = 200,
    max_tokens_per_step: int = 64,
    max_sequences: int = 8,
    max_waiting: int = 100,
    embedding_cache_bytes: int = 0,
    eos_token_ids: Seq[int] = (),
    overlaps_steps: bool | None = None,
    record: Record | None = None,
    block_size: int = BLOCK_SIZE,
) -> Engine:
    """An engine with a small cache, and with recorded decode steps where `record` is given."""
    cache = make_kv_cache(model, num_blocks, block_size)
    limits = EngineLimits(
        max_model_len=max_model_len,
        max_tokens_per_step=max_tokens_per_step,
        max_sequences=max_sequences,
        max_waiting=max_waiting,
        embedding_cache_bytes=embedding_cache_bytes,
    )
    graphs = None
    if record is not None:
        graphs = DecodeGraphs(model, cache, max_sequences=max_sequences, max_model_len=max_model_len, record=record)
    return Engine(
        model,
        cache,
        limits,
        eos_token_ids=eos_token_ids,
        spatial_merge_size=MERGE_SIZE,
        overlaps_steps=OVERLAPS_STEPS if overlaps_steps is None else overlaps_steps,
        graphs=graphs,
    )


@dataclass
class Driver:
    """Runs an engine and keeps what it told. `deliver` gives an embedding for a key, or None while it is on its way."""

    engine: Engine
    deliver: Callable[[str], Tensor | None]
    outputs: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    ends: dict[tuple[str, int], SequenceTokens] = field(default_factory=dict)
    events: dict[str, list[SequenceTokens]] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], list[Any]] = field(default_factory=dict)
    wanted: list[tuple[str, list[str]]] = field(default_factory=list)
    charged: int = 0

    def add(self, *requests: GenerateRequest, now: float | None = None) -> None:
        for request in requests:
            for choice, output in enumerate(request.outputs):
                self.outputs[request.request_id, choice] = list(output)
            self.note(self.engine.add(request, time.monotonic() if now is None else now))

    def note(self, events: Iterable[Event]) -> None:
        for event in events:
            if isinstance(event, MediaWanted):
                self.wanted.append((event.request_id, event.keys))
            elif isinstance(event, MediaBudget):
                self.charged -= event.released_bytes
            else:
                self._note_tokens(event)
        assert self.charged == self.engine.pool.needed_bytes

    def _note_tokens(self, event: SequenceTokens) -> None:
        name = (event.request_id, event.choice)
        self.events.setdefault(event.request_id, []).append(event)
        assert name not in self.ends, "told of a sequence that had ended"
        output = self.outputs.setdefault(name, [])
        if event.error is None:
            assert event.offset == len(output), "a token was skipped or told twice"
        output += event.tokens
        self.logprobs.setdefault(name, []).extend(event.logprobs or [])
        if event.finish_reason is not None:
            self.ends[name] = event

    def give(self, key: str, embedding: Tensor) -> None:
        self.charged += embedding.nbytes
        self.note(self.engine.add_embedding(key, embedding, time.monotonic()))

    def step(self) -> bool:
        """Deliver what can be delivered of what was asked for, then run one step."""
        asked = {key for _, keys in self.wanted for key in keys}
        for key in sorted(asked - set(self.engine.pool.tensors)):
            if (embedding := self.deliver(key)) is not None:
                self.give(key, embedding)
        events, has_run = self.engine.step()
        self.note(events)
        self.engine.blocks.check()
        return has_run

    def run(self, max_steps: int = 3000) -> "Driver":
        for _ in range(max_steps):
            if not self.engine.has_sequences:
                self.step()  # what the device was still at
                self.check_idle()
                return self
            self.step()
        raise AssertionError("the engine did not finish")

    def check_idle(self) -> None:
        """Nothing of any request is left."""
        assert not self.engine.has_sequences
        assert self.engine.blocks.num_used == 0
        self.engine.blocks.check()
        assert self.engine.pool.needed_bytes == self.charged == 0
        assert not self.engine.pool.has_needs


@dataclass(frozen=True)
class World:
    """The reference and our model with the same weights, and pictures with their embeddings."""

    pair: Pair
    pixels: Mapping[str, Tensor]
    grids: Mapping[str, tuple[int, int, int]]
    embeddings: Mapping[str, Tensor]

    def prompt(self, *parts: int | Seq[int]) -> tuple[list[int], list[MediaItem]]:
        """Token ids and media of text (a list of ids) and pictures (a number) in order."""
        ids: list[int] = []
        media: list[MediaItem] = []
        for part in parts:
            if isinstance(part, int):
                item = picture(part, len(ids), self.grids[picture(part, 0).key])
                media.append(item)
                ids += [PAD_ID] * item.num_tokens
            else:
                ids += part
        return ids, media

    def reference(self, ids: Seq[int], media: Seq[MediaItem], max_tokens: int) -> list[int]:
        """Greedy tokens by transformers."""
        arguments: dict[str, Any] = {
            "input_ids": torch.tensor([list(ids)]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
            "mm_token_type_ids": torch.tensor([[int(token == PAD_ID) for token in ids]]),
        }
        if media:
            arguments["pixel_values"] = torch.cat([self.pixels[item.key] for item in media])
            arguments["image_grid_thw"] = torch.tensor([item.grid for item in media])
        with torch.inference_mode():
            output = self.pair.reference.generate(
                **arguments, max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
            )
        return list(output[0, len(ids) :].tolist())


def make_world(pair: Pair) -> World:
    """Three pictures of different sizes."""
    generator = torch.Generator().manual_seed(7)
    sizes: list[tuple[int, int, int]] = [(1, 4, 4), (1, 4, 8), (1, 8, 6)]
    pixels, grids, embeddings = {}, {}, {}
    for number, grid in enumerate(sizes):
        key = picture(number, 0).key
        grids[key] = grid
        pixels[key] = torch.randn(grid[1] * grid[2], 1536, generator=generator)
        embeddings[key] = pair.payload(pixels[key], [list(grid)])
    return World(pair, pixels, grids, embeddings)


def driver(world: World, *, deliver: Callable[[str], Tensor | None] | None = None, **limits: Any) -> Driver:
    return Driver(make_engine(world.pair.model, **limits), deliver or world.embeddings.__getitem__)


def request_of(world: World, *parts: int | list[int], **fields: Any) -> GenerateRequest:
    ids, media = world.prompt(*parts)
    return generate_request(ids, media=media, **fields)


def solo(world: World, request: GenerateRequest) -> list[list[int]]:
    """What a request gives when it is alone in a large engine."""
    alone = driver(world, num_blocks=200, overlaps_steps=False)
    alone.add(request)
    alone.run()
    return [alone.outputs[request.request_id, choice] for choice in range(request.sampling.n)]


class LateDelivery:
    """Embeddings that arrive some steps after they were asked for, in an order of chance."""

    def __init__(self, world: World, seed: int) -> None:
        self._embeddings = world.embeddings
        self._random = random.Random(seed)

    def __call__(self, key: str) -> Tensor | None:
        return self._embeddings[key] if self._random.random() < 0.3 else None
