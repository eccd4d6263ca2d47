"""The patch embedding: patches of pixels to the tower's width, from normalised floats or from the bytes of a picture.

Owns the three forms of a patch and the weights that each needs. Bytes cost a quarter of the memory and no arithmetic
before the matrix product, since the normalisation is folded into the weights; a still image's two frames are equal, so
its patches have one, and their weight is the sum over both. Knows nothing of grids. Runs in the compute thread.
Legend: `P` patches, `T` frames and `p` pixels a side of one, `C` width of the tower.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig

from common.errors import CheckpointError
from common.processor_config import ImageSettings, ProcessorConfig
from encoder_svc.model.kernels import row_tiles

# Bytes are brought to [-1, 1) first: exact in every dtype, and no large mean has to cancel against the bias.
PIXEL_OFFSET, PIXEL_SCALE = 128.0, 1 / 128


@dataclass(frozen=True)
class _Projection:
    """Weight [C, columns] and bias [C] of one form of patches."""

    weight: Tensor
    bias: Tensor


class PatchEmbed(nn.Module):
    """A convolution whose kernel equals its stride, hence one matrix product a patch."""

    def __init__(self, config: Qwen3VLVisionConfig) -> None:
        super().__init__()
        self.temporal, self.patch = patch_sizes(config)
        self.channels = config.in_channels
        kernel = (self.temporal, self.patch, self.patch)
        self.proj = nn.Conv3d(config.in_channels, config.hidden_size, kernel_size=kernel, stride=kernel)
        self._folded: dict[int, _Projection] = {}  # by the columns of a patch of bytes

    @property
    def patch_width(self) -> int:
        """Columns of a patch of normalised floats, or of a video's bytes: channels * T * p * p."""
        return self.channels * self.temporal * self.patch**2

    @property
    def _bias(self) -> Tensor:
        assert self.proj.bias is not None
        return self.proj.bias

    def fold(self, processor: ProcessorConfig) -> None:
        """Prepare for bytes that were not normalised as the processor says. Once, when the weights are there."""
        image, video = ((s.image_mean, s.image_std, s.rescale_factor) for s in (processor.image, processor.video))
        if self.temporal == 1 and image != video:
            raise CheckpointError(
                "the checkpoint normalises images and videos differently and has temporal_patch_size 1, so that their "
                "patches cannot be told apart: this is not supported"
            )
        self._folded = {
            self.patch_width: self._fold_frames(processor.video),
            self.patch_width // self.temporal: self._fold_still(processor.image),
        }

    def accepts(self, patches: Tensor) -> bool:
        """Whether these are patches [P, columns] of a form that `forward` takes."""
        if patches.dim() != 2:
            return False
        if patches.dtype == torch.uint8:
            return patches.shape[1] in self._folded
        return patches.is_floating_point() and patches.shape[1] == self.patch_width

    def forward(self, patches: Tensor, out: Tensor | None = None) -> Tensor:
        """Embed patches of one form, on the weights' device.

        patches  [P, channels*T*p*p] of any float dtype: normalised, columns in the order (channels, T, p, p); or
                 uint8 as in the picture, columns (T, p, p, channels), without T for a still image
        out      [P, C], written, if given
        returns  [P, C] in the dtype of the weights
        """
        weight = self.proj.weight
        if out is None:
            out = torch.empty(len(patches), weight.shape[0], dtype=weight.dtype, device=weight.device)
        if patches.dtype == torch.uint8:
            projection = self._folded[patches.shape[1]]
        else:
            projection = _Projection(weight.flatten(1), self._bias)
        for rows in row_tiles(len(patches), patches.shape[1] * weight.element_size(), weight.device):
            values = patches[rows].to(weight.dtype)
            if patches.dtype == torch.uint8:
                values = values.sub_(PIXEL_OFFSET).mul_(PIXEL_SCALE)
            out[rows] = F.linear(values, projection.weight, projection.bias)
        return out

    def _fold_frames(self, settings: ImageSettings) -> _Projection:
        """For bytes of all T frames."""
        weight, bias = self._fold_normalisation(settings)
        return _Projection(*self._in_dtype(weight.permute(0, 2, 3, 4, 1), bias))

    def _fold_still(self, settings: ImageSettings) -> _Projection:
        """For bytes of one frame that stands for T equal ones."""
        weight, bias = self._fold_normalisation(settings)
        return _Projection(*self._in_dtype(weight.sum(2).permute(0, 2, 3, 1), bias))

    def _fold_normalisation(self, settings: ImageSettings) -> tuple[Tensor, Tensor]:
        """Weight [C, channels, T, p, p] and bias [C] in float64, for bytes brought to [-1, 1).

        A byte x is normalised to (x * rescale - mean) / std, and x is offset + centred / scale.
        """
        weight, bias = self.proj.weight.double(), self._bias.double()
        mean, std = (
            torch.tensor(values, dtype=torch.float64, device=weight.device)[:, None, None, None]
            for values in (settings.image_mean, settings.image_std)
        )
        factor = settings.rescale_factor / std / PIXEL_SCALE
        shift = (settings.rescale_factor * PIXEL_OFFSET - mean) / std
        return weight * factor, bias + (weight * shift).flatten(1).sum(1)

    def _in_dtype(self, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        dtype = self.proj.weight.dtype
        return weight.flatten(1).to(dtype).contiguous(), bias.to(dtype)


def patch_sizes(config: Qwen3VLVisionConfig) -> tuple[int, int]:
    """Frames and pixels a side of one patch. transformers' type also allows lists, which no checkpoint uses."""
    temporal, patch = config.temporal_patch_size, config.patch_size
    if not isinstance(temporal, int) or not isinstance(patch, int):
        raise CheckpointError(
            f"patch_size {patch} and temporal_patch_size {temporal} of the vision tower must be integers"
        )
    return temporal, patch
