"""The vision tower: patches of images and videos in, the wire payload out.

Owns the order of the parts, the DeepStack taps and the checks of its input. Knows nothing of media, requests or the
wire. No state between calls. Runs in the compute thread.
Legend: `P` patches of all items, `C` tower width, `H` text width (`out_hidden_size`), `L` DeepStack levels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from common.errors import CheckpointError, InvalidRequest
from encoder_svc.model.attention import AttentionBackend, SdpaAttention
from encoder_svc.model.blocks import PatchEmbed, PatchMerger, VisionBlock, patch_sizes
from encoder_svc.model.position import Grid, patch_coordinates, position_embeds, rotary_cos_sin


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
        """Columns of `pixel_values`: channels * temporal patch * patch * patch."""
        temporal, patch = patch_sizes(self.config)
        return self.config.in_channels * temporal * patch**2

    @property
    def dtype(self) -> torch.dtype:
        """The compute dtype, which is the dtype of the payload."""
        return self.pos_embed.weight.dtype

    @property
    def device(self) -> torch.device:
        """Where the tower computes."""
        return self.pos_embed.weight.device

    @torch.inference_mode()
    def forward(self, pixel_values: Tensor, grid_thw: Sequence[Grid]) -> Tensor:
        """Encode the packed patches of images and videos.

        pixel_values  [P, channels*temporal*patch*patch], any float dtype, items one after another
        grid_thw      (frames, rows, columns) in patches of each item
        returns       [P / merge**2, H*(1+L)]: main embeddings, then level 0, level 1, ...

        Source: transformers 5.24, modeling_qwen3_vl.py, `Qwen3VLVisionModel.forward`.
        """
        self.check_input(pixel_values, grid_thw)
        merge_size = self.config.spatial_merge_size
        lengths = [h * w for t, h, w in grid_thw for _ in range(t)]
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(self.device, torch.int32)
        coordinates = patch_coordinates(grid_thw, merge_size, self.device)
        cos, sin = rotary_cos_sin(coordinates, self.config.hidden_size // self.config.num_heads, self._theta)
        rotary = cos[:, None], sin[:, None]

        hidden = self.patch_embed(pixel_values.to(self.device))
        hidden = hidden + position_embeds(self.pos_embed.weight, grid_thw, merge_size).to(hidden.dtype)
        levels = []
        for idx, block in enumerate(self.blocks):
            hidden = block(hidden, rotary, cu_seqlens, lengths, self.attention)
            if idx in self._merger_of_block:
                levels.append(self.deepstack_merger_list[self._merger_of_block[idx]](hidden))
        return torch.cat([self.merger(hidden), *levels], dim=1)

    @property
    def _theta(self) -> float:
        return float((self.config.rope_parameters or {}).get("rope_theta", 10000.0))

    def check_input(self, pixel_values: Tensor, grid_thw: Sequence[Grid]) -> None:
        """Refuse patches and grids that do not belong together."""
        if pixel_values.dim() != 2 or pixel_values.shape[1] != self.patch_width:
            raise InvalidRequest(
                f"pixel_values has shape {list(pixel_values.shape)}; expected [patches, {self.patch_width}]"
            )
        merge_size = self.config.spatial_merge_size
        if not grid_thw or any(len(grid) != 3 or min(grid) < 1 for grid in grid_thw):
            raise InvalidRequest("grid_thw must hold (frames, rows, columns), all at least 1, for each media item")
        for t, h, w in grid_thw:
            if h % merge_size or w % merge_size:
                raise InvalidRequest(
                    f"grid {t}x{h}x{w} has rows or columns that {merge_size} does not divide; resize it"
                )
        expected = sum(t * h * w for t, h, w in grid_thw)
        if pixel_values.shape[0] != expected:
            raise InvalidRequest(
                f"pixel_values has {pixel_values.shape[0]} rows, but its grids need {expected}; send the matching grids"
            )


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
