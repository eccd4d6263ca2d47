"""The experts: each token's own few, summed by their weights, in either form of the product."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from decoder_svc.model.moe import Experts

NUM_EXPERTS, HIDDEN, INNER, TOP_K = 6, 32, 48, 2


@pytest.fixture
def experts() -> Experts:
    torch.manual_seed(3)
    made = Experts(NUM_EXPERTS, HIDDEN, INNER, F.silu)
    for parameter in made.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    return made.requires_grad_(False)


def one_by_one(experts: Experts, hidden: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Each token through each of its experts, alone."""
    out = torch.zeros_like(hidden)
    for token in range(hidden.shape[0]):
        for slot in range(chosen.shape[1]):
            expert = int(chosen[token, slot])
            gate, up = (experts.gate_up_proj[expert] @ hidden[token]).chunk(2)
            out[token] += weights[token, slot] * (experts.down_proj[expert] @ (F.silu(gate) * up))
    return out


@pytest.mark.parametrize("num_tokens", [1, 5, 40])
def test_tokens_get_the_weighted_sum_of_their_experts(experts: Experts, num_tokens: int) -> None:
    hidden = torch.randn(num_tokens, HIDDEN)
    weights, chosen = torch.rand(num_tokens, NUM_EXPERTS).topk(TOP_K, dim=1)
    chosen[chosen == 4] = 5  # an expert that nobody chose
    found = experts(hidden, weights, chosen)
    assert torch.allclose(found, one_by_one(experts, hidden, weights, chosen), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_and_the_looped_form_are_equal(experts: Experts, dtype: torch.dtype) -> None:
    experts = experts.to(dtype)
    ends = torch.tensor([3, 3, 10, 11, 11, 16])
    gathered = torch.randn(16, HIDDEN, dtype=dtype)
    assert torch.allclose(experts.grouped(gathered, ends), experts.looped(gathered, ends), rtol=0.02, atol=1e-3)


def test_a_token_does_not_depend_on_those_beside_it(experts: Experts) -> None:
    hidden = torch.randn(9, HIDDEN)
    weights, chosen = torch.rand(9, NUM_EXPERTS).topk(TOP_K, dim=1)
    together = experts(hidden, weights, chosen)
    alone = torch.cat([experts(hidden[i : i + 1], weights[i : i + 1], chosen[i : i + 1]) for i in range(9)])
    assert torch.allclose(together, alone, atol=1e-6)
