"""Turns scenes and questions into training batches: patches, dense labels, token rows and positions.

Owns the layout of a batch: a row is a prefix (the picture or pictures, or a video) that several branches share, each
branch one question with its answer, blind to the other branches. So every question is a first question and the tower
runs once a picture. Runs in the data worker; a batch is a pure function of (seed, step, rank).
"""

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from PIL import Image, ImageDraw
from tokenizers import Tokenizer

from demo.clips import Clip, ask_clip, draw_clip, paint_clip
from demo.conversations import (
    WHICH_ANSWERS,
    WHICH_SHARE,
    as_typed,
    branch_text,
    picture_prefix,
    picture_turns,
    talk_turn,
)
from demo.questions import KIND_WEIGHTS, MIN_OFFSET, NOTHING, Question, offsets
from demo.scenes import COLOURS, REGIONS, SHAPES, Scene, Shape, draw_scene, picture_of, polygon_of, region_of

IGNORED = -100
SLOTS, SLOT_LENGTH = 2, 60  # branches are packed into this many slots of this many tokens a row
MIN_IMAGE_PIXELS, MAX_IMAGE_PIXELS = 16384, 262144
MIN_VIDEO_PIXELS, MAX_VIDEO_PIXELS = 4096, 1572864
FLAT_REGIONS = tuple(name for row in REGIONS for name in row)


@dataclass
class Branch:
    """Token ids and labels; `focus` has, for each answer, the place that predicts it and what it is about."""

    ids: list[int] = field(default_factory=list)
    labels: list[int] = field(default_factory=list)
    focus: list[tuple[int, Question]] = field(default_factory=list)


@dataclass
class Row:
    """One prefix with its branches, before padding."""

    ids: list[int] = field(default_factory=list)
    vision_rows: list[int] = field(default_factory=list)  # flat tower row of each prefix token, or -1
    pictures: list[int] = field(default_factory=list)  # of each prefix token, where there are two, or IGNORED
    positions: list[tuple[int, int, int]] = field(default_factory=list)
    next_position: int = 0
    slots: list[list["Branch"]] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # where each vision run begins in the prefix

    def add_text(self, ids: list[int]) -> None:
        for token in ids:
            self.ids.append(token)
            self.vision_rows.append(-1)
            self.pictures.append(IGNORED)
            self.positions.append((self.next_position,) * 3)
            self.next_position += 1

    def add_vision(self, pad_id: int, picture: int, first_row: int, rows: int, columns: int) -> None:
        start = self.next_position
        self.starts.append(len(self.ids))
        self.pictures[-1] = picture  # the mark before it, where what fits nothing is looked for
        for index in range(rows * columns):
            self.ids.append(pad_id)
            self.vision_rows.append(first_row + index)
            self.pictures.append(picture)
            self.positions.append((start, start + index // columns, start + index % columns))
        self.next_position = start + max(rows, columns)


def image_size(height: int, width: int) -> tuple[int, int]:
    """The processor's size of an image: multiples of 32 within the pixel limits."""
    tall, wide = round(height / 32) * 32, round(width / 32) * 32
    if tall * wide > MAX_IMAGE_PIXELS:
        beta = math.sqrt(height * width / MAX_IMAGE_PIXELS)
        return max(32, math.floor(height / beta / 32) * 32), max(32, math.floor(width / beta / 32) * 32)
    if tall * wide < MIN_IMAGE_PIXELS:
        beta = math.sqrt(MIN_IMAGE_PIXELS / (height * width))
        return math.ceil(height * beta / 32) * 32, math.ceil(width * beta / 32) * 32
    return tall, wide


def video_size(frames: int, height: int, width: int) -> tuple[int, int]:
    """The processor's size of a video's frames."""
    tall, wide = round(height / 32) * 32, round(width / 32) * 32
    if round(frames / 2) * 2 * tall * wide > MAX_VIDEO_PIXELS:
        beta = math.sqrt(frames * height * width / MAX_VIDEO_PIXELS)
        return max(32, math.floor(height / beta / 32) * 32), max(32, math.floor(width / beta / 32) * 32)
    return tall, wide


def sampled_frames(total: int, fps: float) -> list[int]:
    count = min(max(int(total / fps * 2), 4), 768, total)
    return [int(i) for i in np.linspace(0, total - 1, count).round()]


def patches_of(frames: list[Image.Image]) -> np.ndarray:
    """uint8 [N, C * len(frames) * 256] patches in merge-block order of one picture, or of a pair of frames."""
    pixels = np.stack([np.asarray(frame) for frame in frames])
    count, height, width, _ = pixels.shape
    blocks = pixels.reshape(count, height // 32, 2, 16, width // 32, 2, 16, 3)
    return blocks.transpose(1, 4, 2, 5, 7, 0, 3, 6).reshape(height * width // 256, -1)


def dense_labels(scenes: list[Scene], rows: int, columns: int, moves: bool) -> np.ndarray:
    """int64 [rows * columns, 5]: colour, shape, region, motion and index of the shape that covers each merged token.

    The last class of the first three is "none"; IGNORED where a token is covered by too little to say. Several scenes
    (the frames of a pair) count by their mean coverage; their region and motion only where `moves` asks for them.
    """
    labels = np.tile(np.array([len(COLOURS), len(SHAPES), 9, IGNORED, IGNORED]), (rows * columns, 1))
    best = np.zeros(rows * columns)
    for index in range(len(scenes[0].shapes)):
        cover = np.zeros(rows * columns)
        for scene in scenes:
            across, down = columns * 8 / scene.width, rows * 8 / scene.height
            mask = Image.new("L", (columns * 8, rows * 8), 0)
            corners = [(x * across, y * down) for x, y in polygon_of(scene.shapes[index])]
            ImageDraw.Draw(mask).polygon(corners, fill=255)
            cover += np.asarray(mask.reduce(8), dtype=np.float64).reshape(-1) / (255 * len(scenes))
        shape, place, motion = scenes[0].shapes[index], IGNORED, IGNORED
        if len(scenes) == 1 or moves:
            place, motion = place_and_motion([scene.shapes[index] for scene in scenes], scenes[0])
        wins = cover > best
        labels[wins] = COLOURS.index(shape.colour), SHAPES.index(shape.kind), place, motion, index
        best = np.maximum(best, cover)
    labels[(best > 0.02) & (best < 0.2)] = IGNORED
    return labels


def place_and_motion(seen: list[Shape], scene: Scene) -> tuple[int, int]:
    """The region of a shape's mean centre over the frames, and which way it moves (an index of DIRECTIONS)."""
    first, last = seen[0], seen[-1]
    middle = replace(first, x=(first.x + last.x) / 2, y=(first.y + last.y) / 2)
    region, is_clear = region_of(middle, scene)
    place = FLAT_REGIONS.index(region) if is_clear else IGNORED
    across, down = last.x - first.x, last.y - first.y
    if max(abs(across), abs(down)) < 0.5:
        return place, IGNORED
    if abs(across) > abs(down):
        return place, int(across > 0)
    return place, 2 + int(down > 0)


@dataclass
class Vision:
    """Everything the tower sees in one batch: one entry a picture or a pair of frames."""

    patches: list[np.ndarray] = field(default_factory=list)
    grids: list[tuple[int, int]] = field(default_factory=list)  # merged rows, columns
    labels: list[np.ndarray] = field(default_factory=list)

    def add(self, frames: list[Image.Image], scenes: list[Scene], moves: bool) -> int:
        rows, columns = frames[0].height // 32, frames[0].width // 32
        self.patches.append(patches_of(frames))
        self.grids.append((rows, columns))
        self.labels.append(dense_labels(scenes, rows, columns, moves))
        return len(self.grids) - 1

    def tensors(self) -> dict[str, torch.Tensor]:
        longest = max(len(p) for p in self.patches)
        patches = np.zeros((len(self.patches), longest, self.patches[0].shape[1]), np.uint8)
        labels = np.full((len(self.patches), longest // 4, 5), IGNORED, np.int64)
        for index, (patch, label) in enumerate(zip(self.patches, self.labels, strict=True)):
            patches[index, : len(patch)] = patch
            labels[index, : len(label)] = label
        return {
            "patches": torch.from_numpy(patches),
            "grids": torch.tensor(self.grids),
            "dense": torch.from_numpy(labels),
        }


@dataclass
class Media:
    """What one row shows: frames with their scenes, one entry a picture or a pair of frames."""

    entries: list[tuple[list[Image.Image], list[Scene]]]
    scenes: list[Scene] = field(default_factory=list)
    clip: Clip | None = None
    stamps: list[float] = field(default_factory=list)
    index: list[int] = field(default_factory=list)  # of each entry in the batch's Vision


class BatchMaker:
    """Draws batches of the tokens that the checkpoint's own tokenizer makes."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        (self.image_pad,), (self.video_pad,) = self.encode("<|image_pad|>"), self.encode("<|video_pad|>")

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids

    def make(
        self,
        step: int,
        rank: int,
        kind: str,
        area: tuple[float, float],
        rows: int,
        counts: tuple[float, ...] = (),
        moves: bool = True,
        sinks: bool = True,
        weights: Mapping[str, float] = KIND_WEIGHTS,
        lists: bool = True,
        which: float = WHICH_SHARE,
    ) -> dict[str, torch.Tensor]:
        """kind: one, two (pictures), video or dense (no text). Deterministic by (seed, step, rank)."""
        rng = random.Random(f"{self.seed}/{step}/{rank}")
        vision = Vision()
        drawn = [
            self.draw_clip_row(rng, area) if kind == "video" else self.draw_image_row(rng, kind, area, counts)
            for _ in range(rows)
        ]
        for media in drawn:
            for frames, scenes in media.entries:
                media.index.append(vision.add(frames, scenes, moves))
        batch = vision.tensors()
        if kind == "dense":
            return batch
        stride = batch["patches"].shape[1] // 4
        made = [self.text_row(rng, media, vision, stride, weights, lists, which) for media in drawn]
        if kind == "one":
            made.append(self.talk_row(rng))
        batch |= pad_rows(made)
        return batch | self.focus(made, drawn, vision, batch["prefix_ids"].shape[1], sinks)

    def focus(
        self, rows: list[Row], drawn: list[Media], vision: Vision, prefix: int, sinks: bool
    ) -> dict[str, torch.Tensor]:
        """focus_at int64 [Q, 3] (row, slot, place), focus_on bool [Q, 2, S]; int64 sides [Q, 2], told, found [Q].

        `told` is the picture that a question names, `found` the one that it is about, where there are two.
        """
        at, on, sides, told, found = [], [], [], [], []
        for index, (row, media) in enumerate(zip(rows, drawn, strict=False)):
            for slot, place, mask, question in focus_masks(row, media, vision, prefix, sinks):
                at.append((index, slot, place))
                on.append(mask)
                sides.append(sides_of(question, media))
                found.append(question.picture if len(media.scenes) == 2 else IGNORED)
                told.append(IGNORED if question.answer in WHICH_ANSWERS else found[-1])
        masks = np.stack(on) if on else np.zeros((0, 2, prefix), np.bool_)
        places = torch.tensor(at, dtype=torch.int64).view(-1, 3)
        labels = torch.tensor(sides, dtype=torch.int64).view(-1, 2)
        pictures = {"told": torch.tensor(told, dtype=torch.int64), "found": torch.tensor(found, dtype=torch.int64)}
        return {"focus_at": places, "focus_on": torch.from_numpy(masks), "sides": labels} | pictures

    def draw_image_row(
        self, rng: random.Random, kind: str, area: tuple[float, float], counts: tuple[float, ...]
    ) -> Media:
        entries, scenes = list[tuple[list[Image.Image], list[Scene]]](), list[Scene]()
        for _ in range(2 if kind == "two" else 1):
            scene = draw_scene(rng, *area, count=rng.choices((1, 2, 3, 4), counts)[0] if counts else 0)
            height, width = image_size(scene.height, scene.width)
            picture = picture_of(scene, rng)
            if picture.size != (width, height):
                picture = picture.resize((width, height), Image.Resampling.BICUBIC)
            entries.append(([picture], [scene]))
            scenes.append(scene)
        return Media(entries, scenes)

    def draw_clip_row(self, rng: random.Random, area: tuple[float, float]) -> Media:
        clip = draw_clip(rng, *area)
        wanted = sampled_frames(len(clip.frames), clip.fps)
        first = clip.frames[0]
        height, width = video_size(len(wanted), first.height, first.width)
        pictures = [p.resize((width, height), Image.Resampling.BICUBIC) for p in paint_clip(clip, rng, wanted)]
        if len(wanted) % 2:
            wanted, pictures = wanted + wanted[-1:], pictures + pictures[-1:]
        pairs = range(0, len(wanted), 2)
        entries = [(pictures[i : i + 2], [clip.frames[w] for w in wanted[i : i + 2]]) for i in pairs]
        stamps = [(wanted[i] + wanted[i + 1]) / clip.fps / 2 for i in pairs]
        return Media(entries, clip=clip, stamps=stamps)

    def text_row(
        self,
        rng: random.Random,
        media: Media,
        vision: Vision,
        stride: int,
        weights: Mapping[str, float],
        lists: bool,
        which: float,
    ) -> Row:
        """The prefix with its vision runs, then as many branches as fit."""
        clip, scenes, asked_first = media.clip, media.scenes, ""
        if clip is None and rng.random() < 0.05:
            questions = picture_turns(rng, scenes, weights, which)
            asked_first = questions[0].text
        prefix = picture_prefix(rng, len(scenes), media.stamps, asked_first)
        row, pad = Row(), self.image_pad if clip is None else self.video_pad
        for number, (piece, index) in enumerate(zip(prefix.split("<PAD>"), [*media.index, -1], strict=True)):
            row.add_text(self.encode(piece))
            if index >= 0:
                picture = number if len(scenes) == 2 else IGNORED
                row.add_vision(pad, picture, index * stride, *vision.grids[index])
        if asked_first:
            self.fill(row, lambda: questions[:1], lists, is_asked=True)
        elif clip is None:
            self.fill(row, lambda: picture_turns(rng, scenes, weights, which), lists)
        else:
            self.fill(row, lambda: [as_typed(rng, ask_clip(clip, rng))], lists)
        return row

    def talk_row(self, rng: random.Random) -> Row:
        row = Row()
        row.add_text(self.encode(picture_prefix(rng, 0, [])))
        self.fill(row, lambda: [talk_turn(rng)], lists=False)
        return row

    def fill(self, row: Row, draw: Callable[[], list[Question]], lists: bool, is_asked: bool = False) -> None:
        """Branches into the row's slots until three in a row do not fit."""
        room, misses = [SLOT_LENGTH] * SLOTS, 0
        row.slots = [[] for _ in range(SLOTS)]
        while misses < 3 and not (is_asked and any(row.slots)):
            branch = self.branch(draw(), is_asked, lists)
            slot = next((i for i, left in enumerate(room) if left >= len(branch.ids)), -1)
            if slot < 0:
                misses += 1
                continue
            row.slots[slot].append(branch)
            room[slot] -= len(branch.ids)

    def branch(self, turns: list[Question], is_asked: bool, lists: bool) -> Branch:
        """The turns one after another; labels are the answers' tokens and their ends, nothing else."""
        branch = Branch()
        for number, turn in enumerate(turns):
            asked = self.encode(branch_text("" if is_asked else turn.text, number))
            answer = self.encode(turn.answer + "<|im_end|>")
            branch.ids += asked + answer
            branch.labels += [IGNORED] * len(asked) + answer
            start = len(branch.ids) - len(answer)
            branch.focus.append((start - 1, turn))
            if lists and turn.listed:
                branch.focus += self.list_focus(turn, answer, start)
        return branch

    def list_focus(self, turn: Question, answer: list[int], start: int) -> list[tuple[int, Question]]:
        """A list's words are predicted from the shape that they name, its marks from the shapes still to come."""
        found, number = [], 0
        words = [self.tokenizer.decode([token]).strip() for token in answer]
        found.append((start - 1, replace(turn, exact=turn.listed[0])))
        for place, word in enumerate(words):
            if word in COLOURS:
                shape = replace(turn, exact=turn.listed[number])
                found += [(start + place - 1, shape), (start + place, shape)]
                number += 1
            elif word in (",", "and", ".") and number:
                left = tuple(i for group in turn.listed[number:] for i in group)
                found.append((start + place - 1, replace(turn, exact=left or (NOTHING,))))
        return found


def focus_masks(
    row: Row, media: Media, vision: Vision, prefix: int, sinks: bool
) -> list[tuple[int, int, np.ndarray, Question]]:
    """(slot, place, bool [2, prefix], question) of each answer about known shapes: the vision tokens of its two names.

    A video's first name is looked for in its first pair of frames, the second in its last. With `sinks` a name counts
    as a whole, and one that fits nothing is looked for at the mark before the picture.
    """
    found = []
    for number, slot in enumerate(row.slots):
        base = 0
        for branch in slot:
            for place, question in branch.focus:
                mask = np.zeros((2, prefix), np.bool_)
                about = (question.exact, question.exact) if sinks and question.exact else question.about
                for side, indices in enumerate(about):
                    entry = question.picture if media.clip is None else -side
                    owner = vision.labels[media.index[entry]][:, 4]
                    start = row.starts[entry]
                    mask[side, start : start + len(owner)] = np.isin(owner, indices)
                    mask[side, start - 1] = NOTHING in indices
                if mask.any():
                    found.append((number, base + place, mask, question))
            base += len(branch.ids)
    return found


def sides_of(question: Question, media: Media) -> tuple[int, int]:
    """Whether the first of a relation's two shapes is right of and below the second (1) or not (0), or IGNORED."""
    first, second = question.about
    if question.exact or first == second or not media.scenes:
        return IGNORED, IGNORED
    scene = media.scenes[question.picture]
    apart = offsets(scene, scene.shapes[first[0]], scene.shapes[second[0]])
    across, down = (int(v > 0) if abs(v) >= MIN_OFFSET else IGNORED for v in apart)
    return across, down


def pad_rows(rows: list[Row]) -> dict[str, torch.Tensor]:
    """Right-padded tensors: the prefix [B, S], the slots [B, K, L] and what belongs to the tokens of each.

    Segment 0 is padding. Position ids are [3, B, S + K * L].
    """
    count, prefix, length = len(rows), max(len(r.ids) for r in rows), SLOT_LENGTH
    prefix_ids, vision_rows = np.zeros((count, prefix), np.int64), np.full((count, prefix), -1, np.int64)
    pictures = np.full((count, prefix), IGNORED, np.int64)
    positions = np.zeros((count, prefix + SLOTS * length, 3), np.int64)
    slot_ids, segments = np.zeros((2, count, SLOTS, length), np.int64)
    labels = np.full((count, SLOTS, length), IGNORED, np.int64)
    for index, row in enumerate(rows):
        size = len(row.ids)
        prefix_ids[index, :size], vision_rows[index, :size] = row.ids, row.vision_rows
        pictures[index, :size] = row.pictures
        positions[index, :size] = row.positions
        for number, slot in enumerate(row.slots):
            start = 0
            for segment, branch in enumerate(slot, 1):
                ids, targets = branch.ids, branch.labels
                here, base = slice(start, start + len(ids)), prefix + number * length
                slot_ids[index, number, here], labels[index, number, here] = ids, targets
                segments[index, number, here] = segment
                steps = row.next_position + np.arange(len(ids))
                positions[index, base + start : base + start + len(ids)] = steps[:, None]
                start += len(ids)
    arrays = {
        "prefix_ids": prefix_ids,
        "vision_rows": vision_rows,
        "pictures": pictures,
        "slot_ids": slot_ids,
        "labels": labels,
        "segments": segments,
    }
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    tensors["positions"] = torch.from_numpy(positions).permute(2, 0, 1).contiguous()
    tensors["prefix_lengths"] = torch.tensor([len(r.ids) for r in rows])
    return tensors
