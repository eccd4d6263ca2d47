"""A block by the compiled kernels means what its layers mean, at every remainder of tiles, and rows stay apart."""

from collections.abc import Iterator
from typing import TypeVar

import pytest
import torch
from torch import nn

from encoder_svc.model import blocks
from encoder_svc.model.amx import amx_library
from encoder_svc.model.attention import SdpaAttention
from encoder_svc.model.blocks import PatchMerger, VisionBlock
from tests.tiny_models import tiny_config

needs_amx = pytest.mark.skipif(amx_library() is None, reason="no AMX here, or no compiled kernel")

Module = TypeVar("Module", bound=nn.Module)

# Published towers have heads of 64 and 72, and inner widths that 32 does not divide.
SHAPES = [(128, 2, 256), (288, 4, 304), (32, 2, 16)]


def block(width: int, heads: int, inner: int) -> VisionBlock:
    """A block in bfloat16, not packed."""
    sizes = {"hidden_size": width, "num_heads": heads, "intermediate_size": inner}
    return filled(VisionBlock(tiny_config(vision=sizes).vision_config))


def merger(width: int, *, has_joined_norm: bool) -> PatchMerger:
    """A merger of 2 x 2 patches in bfloat16, not packed."""
    config = tiny_config(vision={"hidden_size": width, "num_heads": 1, "out_hidden_size": 64})
    return filled(PatchMerger(config.vision_config, has_joined_norm=has_joined_norm))


def filled(module: Module) -> Module:
    """With weights of a trained model's size, in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    for name, parameter in module.requires_grad_(False).named_parameters():
        parameter.normal_(std=0.7 / parameter.shape[-1] ** 0.5 if parameter.dim() == 2 else 0.1, generator=generator)
        if "norm" in name and name.endswith("weight"):
            parameter.add_(1.0)
    return module.bfloat16()


def run(subject: VisionBlock, hidden: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    out = hidden.clone()
    angles = torch.randn(len(hidden), 1, 1, subject.attn.head_dim // 2, generator=torch.Generator().manual_seed(1))
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    subject(out, (angles.cos(), angles.sin()), cu_seqlens, lengths, SdpaAttention())
    return out


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def rows(count: int, width: int) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(2)).bfloat16()


@needs_amx
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lengths", [[1], [33], [300, 20, 300, 101]])
@torch.inference_mode()
def test_compiled_block_is_as_near_to_float64_as_its_layers_are(
    shape: tuple[int, int, int], lengths: list[int]
) -> None:
    plain, compiled = block(*shape), block(*shape)
    compiled.pack()
    assert compiled.attn.qkv.weight is None
    assert compiled.mlp.linear_fc2.weight is None
    hidden = rows(sum(lengths), shape[0])
    of_layers, got = run(plain, hidden, lengths), run(compiled, hidden, lengths)
    exact = run(plain.double(), hidden.double(), lengths)
    ours, theirs = ((x.double() - exact).abs() for x in (got, of_layers))
    assert got.dtype == torch.bfloat16
    assert ours.mean() <= 1.1 * theirs.mean()
    assert ours.max() <= 2 * theirs.max()


@needs_amx
@torch.inference_mode()
def test_a_row_s_result_depends_on_nothing_but_its_segment() -> None:
    subject = block(128, 2, 256)
    subject.pack()
    hidden = rows(500, 128)
    whole = run(subject, hidden, [100, 400])
    assert torch.equal(run(subject, hidden[:100], [100]), whole[:100])


@needs_amx
@torch.inference_mode()
def test_nan_stays_in_its_segment_and_is_not_hidden() -> None:
    subject = block(128, 2, 256)
    subject.pack()
    hidden = rows(90, 128)
    hidden[70, 5] = torch.nan
    got = run(subject, hidden, [64, 26])
    assert not got[:64].isnan().any()
    assert got[64:].isnan().all()


@needs_amx
@torch.inference_mode()
def test_activations_far_from_zero_are_those_of_the_layers() -> None:
    plain, compiled = block(128, 2, 256), block(128, 2, 256)
    for subject in (plain, compiled):
        subject.norm2.weight.mul_(100.0)
    compiled.pack()
    hidden = rows(64, 128)
    expected = run(plain, hidden, [64]).double()
    assert (run(compiled, hidden, [64]).double() - expected).abs().max() <= 2**-6 * expected.abs().max()


@needs_amx
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("has_joined_norm", [False, True])
@pytest.mark.parametrize("num_patches", [4, 4 * 301])
@torch.inference_mode()
def test_compiled_merger_is_as_near_to_float64_as_its_layers_are(has_joined_norm: bool, num_patches: int) -> None:
    plain, compiled = (merger(96, has_joined_norm=has_joined_norm) for _ in range(2))
    compiled.pack()
    assert compiled.linear_fc1.weight is None
    hidden = 3 * rows(num_patches, 96)
    of_layers, payload = torch.empty(num_patches // 4, 64).bfloat16(), torch.zeros(num_patches // 4, 128).bfloat16()
    exact = torch.empty(num_patches // 4, 64, dtype=torch.float64)
    plain(hidden, of_layers)
    compiled(hidden, payload[:, 64:])
    plain.double()(hidden.double(), exact)
    assert not payload[:, :64].any()
    ours, theirs = ((x.double() - exact).abs() for x in (payload[:, 64:], of_layers))
    assert ours.mean() <= 1.1 * theirs.mean()
    assert ours.max() <= 2 * theirs.max()


@pytest.mark.parametrize(
    ("vision", "dtype"),
    [({"hidden_act": "silu"}, torch.bfloat16), ({"hidden_size": 48}, torch.bfloat16), ({}, torch.float32)],
)
@torch.inference_mode()
def test_other_sizes_activations_and_dtypes_go_layer_by_layer(vision: dict[str, object], dtype: torch.dtype) -> None:
    subject = VisionBlock(tiny_config(vision=vision).vision_config).to(dtype)
    subject.pack()
    assert subject._native is None


@torch.inference_mode()
def test_without_the_library_a_block_goes_layer_by_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "amx_library", lambda: None)
    subject, plain = block(128, 2, 256), block(128, 2, 256)
    subject.pack()
    assert subject._native is None
    expected = run(plain, rows(40, 128), [40]).float()
    assert (run(subject, rows(40, 128), [40]).float() - expected).abs().max() <= 2e-2 * expected.abs().max()
