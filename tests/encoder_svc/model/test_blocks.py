"""What the blocks owe to attention kernels: dense q, k and v on a GPU, heads outside on a CPU, and exact rotation."""

import pytest
import torch

from encoder_svc.model.blocks import VisionAttention, rotate
from tests.tiny_models import tiny_config


def attention() -> VisionAttention:
    torch.manual_seed(0)
    built = VisionAttention(tiny_config().vision_config).requires_grad_(False)
    for parameter in built.parameters():
        parameter.normal_(std=0.1)
    return built


def test_q_k_and_v_are_dense_where_gpu_kernels_read_them() -> None:
    q, k, v = attention().empty_qkv(torch.empty(5, 32, device="meta")).unbind(1)
    assert all(part.shape == (5, 2, 16) and part.is_contiguous() for part in (q, k, v))


def test_patches_of_a_head_lie_together_on_a_cpu() -> None:
    q, _, _ = attention().empty_qkv(torch.empty(5, 32)).unbind(1)
    assert q.shape == (5, 2, 16)
    assert q.transpose(0, 1).is_contiguous()


@pytest.mark.parametrize("is_gpu_layout", [False, True])
def test_projection_writes_rotated_q_and_k_and_plain_v_in_either_layout(is_gpu_layout: bool) -> None:
    subject, normed = attention(), torch.randn(5, 32)
    angles = torch.randn(5, 1, 1, 8)
    layout = torch.empty(3, 5, 2, 16).transpose(0, 1) if is_gpu_layout else subject.empty_qkv(normed)
    subject.project(normed, angles.cos(), angles.sin(), layout)
    q, k, v = subject.qkv(normed).view(5, 3, 2, 16).unbind(1)
    torch.testing.assert_close(layout[:, 2], v, rtol=0, atol=0)
    for got, plain in ((layout[:, 0], q), (layout[:, 1], k)):
        # A pair of numbers, one of each half, turns by its angle like a complex number.
        turned = torch.complex(*plain.chunk(2, -1)) * torch.polar(torch.ones(5, 1, 8), angles[:, 0])
        torch.testing.assert_close(got, torch.cat([turned.real, turned.imag], -1), rtol=0, atol=1e-5)


def test_rotation_is_computed_in_float32_and_rounded_once() -> None:
    x = torch.randn(3, 2, 2, 16).bfloat16()
    angles = torch.randn(3, 1, 1, 8)
    got, exact = torch.empty_like(x), torch.empty(x.shape)
    rotate(x, angles.cos(), angles.sin(), got)
    rotate(x.float(), angles.cos(), angles.sin(), exact)
    assert torch.equal(got, exact.bfloat16())
