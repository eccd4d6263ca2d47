"""The reference and our language model with the same tiny weights, and prompts in the form of both."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoder_svc.model.text import TextModel
from decoder_svc.model.weights import load_text_model
from decoder_svc.positions import MediaSpan, mrope_positions
from tests.decoder_svc.model.packing import Prompt
from tests.tiny_models import save_checkpoint, tiny_config, tiny_model


@dataclass(frozen=True)
class Pair:
    """The reference and our language model with the same weights."""

    reference: Any
    model: TextModel

    def payload(self, pixel_values: Tensor, grids: list[list[int]]) -> Tensor:
        """The vision payload, by the reference's tower: [V, H*(1+L)]."""
        out = self.reference.model.visual(pixel_values, grid_thw=torch.tensor(grids))
        return torch.cat([out.pooler_output, *out.deepstack_features], dim=1)


@dataclass(frozen=True)
class Case:
    """A prompt in our form, with the reference's arguments for the same."""

    prompt: Prompt
    arguments: dict[str, Any]


def make_pair(directory: Path, *, is_moe: bool, is_tied: bool) -> Pair:
    reference = tiny_model(tiny_config(is_moe=is_moe, is_tied=is_tied))
    save_checkpoint(reference, directory)
    return Pair(reference, load_text_model(directory, dtype=torch.float32, device="cpu"))


def make_case(pair: Pair, seed: int, images: list[list[int]], videos: list[list[int]]) -> Case:
    """Text, images with text between, videos as frame groups behind two text tokens each, text."""
    generator = torch.Generator().manual_seed(seed)
    config = pair.reference.config
    types: list[int] = [0] * 3
    spans: list[MediaSpan] = []
    for kind, grids in ((1, images), (2, [[1, h, w] for t, h, w in videos for _ in range(t)])):
        for grid in grids:
            spans.append(MediaSpan(len(types), (grid[0], grid[1], grid[2]), 2))
            types += [kind] * spans[-1].num_tokens + [0, 0]
    token_types = torch.tensor([*types, 0, 0, 0])
    ids = torch.randint(0, 280, token_types.shape, generator=generator)
    ids[token_types == 1], ids[token_types == 2] = config.image_token_id, config.video_token_id
    positions, _ = mrope_positions(len(ids), spans)
    arguments: dict[str, Any] = {"input_ids": ids[None], "mm_token_type_ids": token_types[None]}
    payloads = []
    for name, grids in (("image", images), ("video", videos)):
        if grids:
            rows = sum(t * h * w for t, h, w in grids)
            pixels = torch.randn(rows, 1536, generator=generator)
            payloads.append(pair.payload(pixels, grids))
            arguments["pixel_values" if name == "image" else "pixel_values_videos"] = pixels
            arguments[f"{name}_grid_thw"] = torch.tensor(grids)
    embeds = torch.cat(payloads) if payloads else None
    prompt = Prompt(ids, torch.from_numpy(positions), token_types.nonzero()[:, 0], embeds)
    return Case(prompt, arguments)
