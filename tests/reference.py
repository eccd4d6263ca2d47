"""The reference's answers: transformers' `generate` on the same weights, pixel values and prompt.

Builds the prompt on its own way (one string with its placeholders expanded by hand, tokenized whole), so that it does
not share the gateway's path. Can also spoil the model in the ways that broken engines do.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer

from common.processor_config import ProcessorConfig
from encoder_svc.preprocess import preprocess_image, preprocess_video
from encoder_svc.video_decode import probe_video


@dataclass(frozen=True)
class Media:
    """A picture or video file."""

    kind: str  # "image" or "video"
    data: bytes


@dataclass(frozen=True)
class Turn:
    """One message: its role, and text and media in order."""

    role: str
    parts: Sequence[str | Media]


class Reference:
    """transformers' model with its tokenizer."""

    def __init__(self, model: Any, tokenizer: Tokenizer, processor: ProcessorConfig) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.processor = processor

    def generate(
        self, turns: Sequence[Turn], max_tokens: int, swap: Callable[[Media], Media] = lambda m: m
    ) -> list[int]:
        """Greedy token ids. `swap` may replace media by others of the same size, behind the prompt's back."""
        text = "".join(f"<|im_start|>{turn.role}\n{self._content(turn)}<|im_end|>\n" for turn in turns)
        ids = self.tokenizer.encode(f"{text}<|im_start|>assistant\n").ids
        media = [swap(part) for turn in turns for part in turn.parts if isinstance(part, Media)]
        with torch.inference_mode():
            output = self.model.generate(
                **self._inputs(ids, media),
                max_new_tokens=max_tokens,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        return list(output[0, len(ids) :].tolist())

    def _content(self, turn: Turn) -> str:
        return "".join(part if isinstance(part, str) else self._placeholders(part) for part in turn.parts)

    def _placeholders(self, media: Media) -> str:
        merge = self.processor.image.merge_size**2
        if media.kind == "image":
            _, h, w = preprocess_image(media.data, self.processor).grid_thw
            return f"<|vision_start|>{'<|image_pad|>' * (h * w // merge)}<|vision_end|>"
        probe = probe_video(media.data, self.processor)
        pads = "<|video_pad|>" * (probe.grid_thw[1] * probe.grid_thw[2] // merge)
        groups = "".join(f"<{seconds:.1f} seconds><|vision_start|>{pads}<|vision_end|>" for seconds in probe.timestamps)
        return f"<|vision_start|>{groups}<|vision_end|>"

    def _inputs(self, ids: list[int], media: Sequence[Media]) -> dict[str, torch.Tensor]:
        tokens = self.processor.tokens
        kinds = [1 if i == tokens.image_token_id else 2 if i == tokens.video_token_id else 0 for i in ids]
        inputs = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
            "mm_token_type_ids": torch.tensor([kinds]),
        }
        for kind, suffix, prepare in (("image", "", preprocess_image), ("video", "_videos", preprocess_video)):
            prepared = [prepare(item.data, self.processor) for item in media if item.kind == kind]
            if prepared:
                inputs[f"pixel_values{suffix}"] = torch.cat([torch.from_numpy(p.pixel_values) for p in prepared])
                inputs[f"{kind}_grid_thw"] = torch.tensor([p.grid_thw for p in prepared])
        return inputs


@contextmanager
def without_level(model: Any, level: int) -> Iterator[None]:
    """One DeepStack level is lost, as in engines that drop it."""
    merger = model.model.visual.deepstack_merger_list[level]
    handle = merger.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def without_aligned_corners(model: Any) -> Iterator[None]:
    """Position embeddings are interpolated with half-pixel centres, as in engines that take the default."""
    visual = model.model.visual
    assert visual.interpolation_align_corners is True
    visual.interpolation_align_corners = False
    try:
        yield
    finally:
        visual.interpolation_align_corners = True
