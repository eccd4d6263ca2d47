"""Bytes of pictures, with the normalisation folded into the weights, against normalised patches and the convolution."""

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from common.errors import CheckpointError
from common.processor_config import ProcessorConfig
from encoder_svc.model.patch_embed import PatchEmbed
from encoder_svc.preprocess import PreparedMedia, normalised, pack_frames, read_image
from tests.media_samples import DEMO_PROCESSOR, picture, png
from tests.tiny_models import tiny_config

CLIP = {"image_mean": (0.48145466, 0.4578275, 0.40821073), "image_std": (0.26862954, 0.26130258, 0.27577711)}
# Rounding of the result alone is half of 2**-8 in bfloat16 and half of 2**-11 in float16; the weights are rounded too.
TOLERANCES = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


def processor(**video: Any) -> ProcessorConfig:
    """Images with other statistics than videos, so that one taken for the other shows."""
    return msgspec.structs.replace(
        DEMO_PROCESSOR,
        image=msgspec.structs.replace(DEMO_PROCESSOR.image, **CLIP),
        video=msgspec.structs.replace(DEMO_PROCESSOR.video, **video),
    )


def embed(dtype: torch.dtype = torch.float32, **vision: Any) -> PatchEmbed:
    torch.manual_seed(3)
    return PatchEmbed(tiny_config(vision=vision).vision_config).to(dtype).requires_grad_(False)


def exact(subject: PatchEmbed, prepared: PreparedMedia, settings: Any) -> torch.Tensor:
    """The convolution in float64 over the reference's normalised patches."""
    values = torch.from_numpy(normalised(prepared, settings).pixel_values).double()
    frames = values.view(len(values), 3, subject.temporal, subject.patch, subject.patch)
    weight, bias = subject.proj.weight.double(), subject.proj.bias
    assert bias is not None
    return torch.nn.functional.conv3d(frames, weight, bias.double()).flatten(1)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_bytes_of_stills_and_videos_equal_the_convolution_of_normalised_patches(dtype: torch.dtype) -> None:
    subject = embed(dtype)
    subject.fold(processor())
    still = read_image(png(150, 90), processor())
    video = pack_frames([picture(64, 32, seed) for seed in range(5)], (3, 2, 4), processor().video)
    for prepared, settings in ((still, processor().image), (video, processor().video)):
        expected = exact(subject, prepared, settings)
        got = subject(torch.from_numpy(prepared.pixel_values))
        assert got.dtype == dtype
        assert (got.double() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


def test_a_grey_between_black_and_white_stays_exact_where_the_bias_has_to_cancel() -> None:
    subject = embed(torch.bfloat16)
    subject.fold(processor())
    grey = PreparedMedia(np.full((4, 768), 128, np.uint8), (1, 2, 2))
    expected = exact(subject, grey, processor().image)
    got = subject(torch.from_numpy(grey.pixel_values)).double()
    assert (got - expected).abs().max() <= 2**-8 * expected.abs().max()


def test_a_still_image_takes_half_the_columns_and_half_the_weight() -> None:
    subject = embed()
    subject.fold(processor())
    assert subject.accepts(torch.zeros(4, 768, dtype=torch.uint8))
    assert subject.accepts(torch.zeros(4, 1536, dtype=torch.uint8))
    assert subject.accepts(torch.zeros(4, 1536, dtype=torch.float16))
    assert not subject.accepts(torch.zeros(4, 768))
    assert not subject.accepts(torch.zeros(4, 1536, dtype=torch.int32))
    assert not subject.accepts(torch.zeros(1536, dtype=torch.uint8))


def test_bytes_are_not_taken_before_the_settings_are_known() -> None:
    assert not embed().accepts(torch.zeros(4, 768, dtype=torch.uint8))


def test_one_frame_a_patch_with_two_normalisations_is_refused() -> None:
    subject = embed(temporal_patch_size=1)
    with pytest.raises(CheckpointError, match="temporal_patch_size 1"):
        subject.fold(processor())
    subject.fold(processor(**CLIP))
    assert subject.accepts(torch.zeros(4, 768, dtype=torch.uint8))
