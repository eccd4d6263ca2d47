"""The vision tower: patches of images and videos in, the wire payload out.

Owns the order of the parts, the DeepStack taps and the checks of its input. Knows nothing of media, requests or the
wire. Remembers nothing between calls but tables of frame sizes. Runs in the compute thread.
Legend: `P` patches of all items, `C` tower width, `H` text width (`out_hidden_size`), `L` DeepStack levels.
"""

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from common.errors import CheckpointError, InvalidRequest
from encoder_svc.model.attention import AttentionBackend, SdpaAttention
from encoder_svc.model.blocks import PatchMerger, VisionBlock
from encoder_svc.model.patch_embed import PatchEmbed
from encoder_svc.model.position import FrameTableCache, Grid

FRAME_TABLE_BYTES = 64 << 20  # a frame of 1024 x 1024 pixels needs 4 MiB at a width of 384 in bfloat16


class VisionTower(nn.Module):
    """Qwen3-VL's vision tower for packed items. Parameter names are the checkpoint's below `visual.`."""

    def __init__(self, config: Qwen3VLVisionConfig, attention: AttentionBackend | None = None) -> None:
        super().__init__()
        _check_config(config)
        self.config = config
        self.attention: AttentionBackend = attention if attention is not None else SdpaAttention()
        self.patch_embed = PatchEmbed(config)
        self.pos_embed = nn.Embedding(config.num_position_embeddings, config.hidden_size)
        self.blocks = nn.ModuleList(VisionBlock(config) for _ in range(config.depth))
        self.merger = PatchMerger(config, has_joined_norm=False)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, has_joined_norm=True) for _ in config.deepstack_visual_indexes
        )
        # The merger of each tapped block. The payload holds the levels in the order of the blocks, as the reference.
        self._merger_of_block = {block: idx for idx, block in enumerate(config.deepstack_visual_indexes)}
        self._frame_tables = FrameTableCache(
            merge_size=config.spatial_merge_size,
            head_dim=config.hidden_size // config.num_heads,
            theta=float((config.rope_parameters or {}).get("rope_theta", 10000.0)),
            budget_bytes=FRAME_TABLE_BYTES,
        )

    def pack(self) -> "VisionTower":
        """Lay the weights out for the processor; the tower. Once, when they are there."""
        for module in self.modules():
            if isinstance(module, VisionBlock | PatchMerger):
                module.pack()
        return self

    @property
    def num_levels(self) -> int:
        """L, the number of DeepStack levels in the payload."""
        return len(self._merger_of_block)

    @property
    def out_width(self) -> int:
        """Columns of the payload: H * (1 + L)."""
        return self.config.out_hidden_size * (1 + self.num_levels)

    @property
    def patch_width(self) -> int:
        """Columns of normalised `pixel_values`: channels * temporal patch * patch * patch."""
        return self.patch_embed.patch_width

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype, which is the dtype of the payload."""
        return self.pos_embed.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the tower computes."""
        return self.pos_embed.weight.device

    @torch.inference_mode()
    def forward(self, pixel_values: Tensor | Sequence[Tensor], grid_thw: Sequence[Grid]) -> Tensor:
        """Encode the packed patches of images and videos.

        pixel_values  patches of each item, in any of the forms of `PatchEmbed`; or [P, channels*temporal*patch*patch]
                      of any float dtype, normalised, items one after another
        grid_thw      (frames, rows, columns) in patches of each item
        returns       [P / merge**2, H*(1+L)]: main embeddings, then level 0, level 1, ...

        Source: transformers 5.24, modeling_qwen3_vl.py, `Qwen3VLVisionModel.forward`.
        """
        self.check_input(pixel_values, grid_thw)
        lengths = [h * w for t, h, w in grid_thw for _ in range(t)]
        cu_seqlens = _sent(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32), self.device)
        rotary = self._frame_tables.rotary(self.pos_embed.weight, grid_thw)
        hidden = self._embed([pixel_values] if isinstance(pixel_values, Tensor) else pixel_values, grid_thw)

        payload = hidden.new_empty(len(hidden) // self.config.spatial_merge_size**2, self.out_width)
        main, *levels = torch.split(payload, self.config.out_hidden_size, dim=1)
        next_level = iter(levels)
        for idx, block in enumerate(self.blocks):
            block(hidden, rotary, cu_seqlens, lengths, self.attention)
            if idx in self._merger_of_block:
                self.deepstack_merger_list[self._merger_of_block[idx]](hidden, next(next_level))
        self.merger(hidden, main)
        return payload

    def _embed(self, parts: Sequence[Tensor], grid_thw: Sequence[Grid]) -> Tensor:
        """Patch embeddings with their positions, [P, C]. Parts of one form that follow each other go together."""
        num_patches = sum(t * h * w for t, h, w in grid_thw)
        hidden = self.pos_embed.weight.new_empty(num_patches, self.config.hidden_size)
        start = 0
        for _, run in groupby(parts, key=lambda part: (part.dtype, part.shape[1])):
            some = list(run)
            patches = (torch.cat(some) if len(some) > 1 else some[0]).to(self.device)
            self.patch_embed(patches, out=hidden[start : start + len(patches)])
            start += len(patches)
        start = 0
        for t, h, w in grid_thw:
            frames = hidden[start : start + t * h * w].view(t, h * w, -1)
            frames += self._frame_tables.get(self.pos_embed.weight, h, w).position
            start += t * h * w
        return hidden

    def check_input(self, pixel_values: Tensor | Sequence[Tensor], grid_thw: Sequence[Grid]) -> None:
        """Refuse patches and grids that do not belong together."""
        is_packed = isinstance(pixel_values, Tensor)
        parts = [pixel_values] if isinstance(pixel_values, Tensor) else list(pixel_values)
        for part in parts:
            if not self.patch_embed.accepts(part):
                raise InvalidRequest(
                    f"pixel_values has shape {list(part.shape)} and dtype {part.dtype}; expected "
                    f"[patches, {self.patch_width}] of floats, or bytes where the tower has a processor's settings"
                )
        self._check_grids(grid_thw)
        counts = [t * h * w for t, h, w in grid_thw]
        expected = [sum(counts)] if is_packed else counts
        if [len(part) for part in parts] != expected:
            raise InvalidRequest(
                f"pixel_values has {[len(part) for part in parts]} rows, but its grids need {expected}; send the "
                "matching grids"
            )

    def _check_grids(self, grid_thw: Sequence[Grid]) -> None:
        merge_size = self.config.spatial_merge_size
        if not grid_thw or any(len(grid) != 3 or min(grid) < 1 for grid in grid_thw):
            raise InvalidRequest("grid_thw must hold (frames, rows, columns), all at least 1, for each media item")
        for t, h, w in grid_thw:
            if h % merge_size or w % merge_size:
                raise InvalidRequest(
                    f"grid {t}x{h}x{w} has rows or columns that {merge_size} does not divide; resize it"
                )


def _sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device. Without page-locked memory a GPU's copy would wait for what runs there."""
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def _check_config(config: Qwen3VLVisionConfig) -> None:
    """Refuse what the tower cannot compute, before any weight is read."""
    rope_type = (config.rope_parameters or {}).get("rope_type", "axial")
    if rope_type != "axial":
        raise CheckpointError(f"the vision tower's rope_type {rope_type!r} is not supported; only 'axial' is")
    if int(config.num_position_embeddings**0.5) ** 2 != config.num_position_embeddings:
        raise CheckpointError(f"num_position_embeddings {config.num_position_embeddings} is not a square number")
    indexes = list(config.deepstack_visual_indexes)
    if len(set(indexes)) != len(indexes) or any(not 0 <= idx < config.depth for idx in indexes):
        raise CheckpointError(
            f"deepstack_visual_indexes {indexes} must be different blocks of the {config.depth}, counted from 0"
        )
