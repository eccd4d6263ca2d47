"""The sampler: distributions by hand, penalties over prompt and output, and randomness that knows no batch mates."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor

from common.messages import SamplingParams
from decoder_svc.model.kernels import select_kernels
from decoder_svc.prompt_logprobs import PromptLogprobs
from decoder_svc.sampler import SampledToken, Sampler
from decoder_svc.scheduler import Chunk
from decoder_svc.sequence import Sequence
from decoder_svc.transfers import Readback
from tests.decoder_svc.requests import sequence_of
from tests.decoder_svc.sampling import sample_with

EOS = 4
KERNELS = select_kernels("cpu")
# Probabilities 0.5, 0.25, 0.125, 0.0625, 0.0625 of tokens 0 to 4.
HALVES = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).log()
DRAWS = 1500


def sequence(output: list[int] | None = None, prompt: list[int] | None = None, **fields: Any) -> Sequence:
    sampling = SamplingParams(**{"seed": 1, "max_tokens": 99, "temperature": 0.0, **fields})
    return sequence_of(prompt or [0], output=output or [], sampling=sampling)


def sample(logits: Tensor, *sequences: Sequence, eos: tuple[int, ...] = (EOS,)) -> list[SampledToken]:
    return sample_with(Sampler(eos, KERNELS), logits.expand(len(sequences), -1).clone(), sequences)


def token(logits: Tensor, drawn: Sequence) -> int:
    return sample(logits, drawn)[0].token_id


def frequencies(logits: Tensor, num_draws: int = DRAWS, **fields: Any) -> dict[int, float]:
    """How often each token is drawn over as many seeds."""
    drawn = [sequence(**{"temperature": 1.0, **fields, "seed": s}) for s in range(num_draws)]
    counts = Counter(result.token_id for result in sample(logits, *drawn))
    return {token_id: count / num_draws for token_id, count in counts.items()}


def check_distribution(found: dict[int, float], expected: dict[int, float], num_draws: int = DRAWS) -> None:
    """Nothing impossible was drawn, and Pearson's statistic is below a bound that chance passes once in 10^6 times."""
    assert set(found) <= set(expected)
    statistic = sum(num_draws * (found.get(t, 0.0) - p) ** 2 / p for t, p in expected.items())
    assert statistic < 40, (found, expected)


def test_zero_temperature_takes_the_most_likely_and_the_first_of_equals() -> None:
    assert token(HALVES, sequence()) == 0
    assert token(torch.tensor([1.0, 3.0, 3.0]), sequence(prompt=[0])) == 1


def test_a_greedy_row_takes_the_same_token_alone_and_beside_rows_that_are_adjusted_or_drawn() -> None:
    plain = sequence()
    mates = [sequence(temperature=1.0), sequence(logit_bias={3: 9.0}), sequence(num_logprobs=1), sequence(min_tokens=5)]
    assert plain.takes_most_likely
    assert not any(mate.takes_most_likely for mate in mates)
    for mate in mates:
        assert sample(HALVES, mate, plain, eos=(0,))[1] == sample(HALVES, plain)[0]


def test_a_tiny_temperature_is_greedy_and_never_overflows() -> None:
    for temperature in (1e-30, 1e-6, 2e-5):
        assert token(1000 * HALVES, sequence(temperature=temperature)) == 0


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, {0: 1 / 2, 1: 1 / 4, 2: 1 / 8, 3: 1 / 16, 4: 1 / 16}),
        ({"temperature": 0.5}, {0: 64 / 86, 1: 16 / 86, 2: 4 / 86, 3: 1 / 86, 4: 1 / 86}),
        ({"top_k": 2}, {0: 2 / 3, 1: 1 / 3}),
        ({"top_k": 1}, {0: 1.0}),
        ({"top_k": 99}, {0: 1 / 2, 1: 1 / 4, 2: 1 / 8, 3: 1 / 16, 4: 1 / 16}),
        ({"top_p": 0.6}, {0: 2 / 3, 1: 1 / 3}),
        ({"top_p": 0.45}, {0: 1.0}),
        ({"top_p": 1e-9}, {0: 1.0}),
        ({"top_k": 3, "top_p": 0.8}, {0: 2 / 3, 1: 1 / 3}),  # top_p counts what top_k has left: 4/7, 2/7, 1/7
        ({"min_p": 0.2}, {0: 4 / 7, 1: 2 / 7, 2: 1 / 7}),
        ({"min_p": 1.0}, {0: 1.0}),
        ({"temperature": 0.5, "min_p": 0.2}, {0: 64 / 80, 1: 16 / 80}),
    ],
)
def test_frequencies_match_the_distribution_computed_by_hand(
    fields: dict[str, Any], expected: dict[int, float]
) -> None:
    check_distribution(frequencies(HALVES, **fields), expected)


def test_filters_keep_the_right_tokens_wherever_they_stand_in_the_vocabulary() -> None:
    shuffled = HALVES[[3, 0, 4, 2, 1]]
    check_distribution(frequencies(shuffled, top_k=2), {1: 2 / 3, 4: 1 / 3})


def test_a_draw_depends_on_seed_choice_and_position_alone() -> None:
    logits = torch.randn(50, generator=torch.Generator().manual_seed(0))

    def drawn(seed: int, choice: int, position: int, others: int) -> int:
        mates = [sequence(temperature=2.0, seed=s, top_k=3) for s in range(others)]
        one = sequence_of(
            [0],
            output=[1] * position,
            choice=choice,
            sampling=SamplingParams(seed=seed, max_tokens=9, temperature=1.0),
        )
        return sample(logits, *mates, one)[-1].token_id

    alone = {(s, c, p): drawn(s, c, p, 0) for s in range(6) for c in range(3) for p in range(3)}
    assert alone == {key: drawn(*key, others=5) for key in alone}
    for axis in range(3):
        groups: dict[tuple[int, ...], set[int]] = {}
        for key, token_id in alone.items():
            groups.setdefault(key[:axis] + key[axis + 1 :], set()).add(token_id)
        assert any(len(tokens) > 1 for tokens in groups.values()), f"axis {axis} changes nothing"


def test_extreme_seeds_are_accepted() -> None:
    for seed in (-(1 << 63), (1 << 63) - 1):
        assert token(HALVES, sequence(seed=seed, temperature=1.0)) in range(5)


def test_frequency_and_presence_penalties_count_the_output_alone() -> None:
    logits = torch.tensor([3.0, 2.0, 1.0])
    assert token(logits, sequence(prompt=[0, 0, 0], frequency_penalty=2.0, presence_penalty=2.0)) == 0
    assert token(logits, sequence(output=[0], presence_penalty=1.5)) == 1
    assert token(logits, sequence(output=[0, 0], presence_penalty=0.9)) == 0
    assert token(logits, sequence(output=[0, 0], frequency_penalty=0.6)) == 1
    assert token(logits, sequence(output=[0, 1, 1], frequency_penalty=-2.0)) == 1


def test_repetition_penalty_counts_prompt_and_output_and_divides_or_multiplies_by_sign() -> None:
    logits = torch.tensor([3.0, 2.0, -1.0, -1.5])
    assert token(logits, sequence(prompt=[0], repetition_penalty=1.6)) == 1
    assert token(logits, sequence(prompt=[0], output=[1], repetition_penalty=1.4)) == 0
    assert token(logits, sequence(prompt=[0, 1, 2], output=[1], repetition_penalty=0.1, logit_bias={0: -11})) == 1
    negative = torch.tensor([-1.0, -1.5])
    assert token(negative, sequence(prompt=[0], repetition_penalty=2.0)) == 1


def test_penalties_are_independent_of_how_often_the_prompt_repeats_a_token() -> None:
    logits = torch.tensor([3.0, 2.0])
    assert token(logits, sequence(prompt=[0] * 50, repetition_penalty=1.4)) == 0


def test_logit_bias_is_added_and_can_ban_or_force() -> None:
    assert token(HALVES, sequence(logit_bias={2: 100.0})) == 2
    assert token(HALVES, sequence(logit_bias={0: -100.0})) == 1
    check_distribution(
        frequencies(HALVES, logit_bias={1: math.log(2), 4: -100.0}), {0: 8 / 19, 1: 8 / 19, 2: 2 / 19, 3: 1 / 19}
    )


def test_min_tokens_bans_every_stop_token_until_they_are_reached() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, 9.0])
    waiting = {"min_tokens": 2, "stop_token_ids": [3]}
    assert token(logits, sequence(output=[0], **waiting)) == 2
    assert token(logits, sequence(output=[0, 0], **waiting)) == EOS


def test_ignoring_the_end_bans_it_for_ever_but_no_stop_token() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 3.0, 9.0])
    assert token(logits, sequence(output=[0] * 50, ignore_eos=True, stop_token_ids=[3])) == 3


def test_a_model_without_an_end_token_samples_all_the_same() -> None:
    drawn = sequence(min_tokens=5, ignore_eos=True)
    assert sample(HALVES, drawn, eos=())[0].token_id == 0


def test_log_probabilities_are_those_of_the_model_before_any_change() -> None:
    drawn = sequence(num_logprobs=2, logit_bias={3: 100.0}, temperature=0.5, top_k=1)
    [result] = sample(HALVES, drawn)
    assert result.token_id == 3
    assert result.logprobs is not None
    assert result.logprobs.logprob == pytest.approx(math.log(1 / 16))
    assert [token_id for token_id, _ in result.logprobs.top] == [0, 1]
    assert [p for _, p in result.logprobs.top] == pytest.approx([math.log(1 / 2), math.log(1 / 4)])


def test_log_probabilities_come_only_where_they_were_asked_for() -> None:
    none, only_chosen, many = sample(HALVES, sequence(), sequence(num_logprobs=0), sequence(num_logprobs=99))
    assert none.logprobs is None
    assert only_chosen.logprobs is not None
    assert only_chosen.logprobs.top == []
    assert many.logprobs is not None
    assert len(many.logprobs.top) == 5


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_is_flagged_and_touches_no_other(bad: float) -> None:
    rows = HALVES.repeat(3, 1)
    rows[1, 2] = bad
    drawn = [sequence(temperature=1.0, seed=seed) for seed in range(3)]
    results = sample_with(Sampler([EOS], KERNELS), rows, drawn)
    assert [result.is_finite for result in results] == [True, False, True]
    assert [results[0], results[2]] == sample(HALVES, drawn[0], drawn[2])


def test_half_precision_logits_and_inference_tensors_are_adjusted_too() -> None:
    with torch.inference_mode():
        as_from_model = torch.tensor([[3.0, 2.0, 1.0]])
    penalised = sequence(output=[0], presence_penalty=2.5)
    assert sample_with(Sampler([], KERNELS), as_from_model, [penalised])[0].token_id == 1
    assert (
        sample_with(Sampler([], KERNELS), torch.tensor([[3.0, 2.0, 1.0]], dtype=torch.bfloat16), [penalised])[
            0
        ].token_id
        == 1
    )


def test_only_allowed_tokens_come_whatever_their_scores() -> None:
    assert token(HALVES, sequence(allowed_token_ids=[3, 2, 3])) == 2
    found = frequencies(HALVES, allowed_token_ids=[1, 3])
    check_distribution(found, {1: 4 / 5, 3: 1 / 5})


def test_a_bad_word_of_one_token_never_comes_and_a_longer_one_is_kept_from_its_end() -> None:
    words = {"bad_words_ids": [[0], [2, 1]]}
    assert token(HALVES, sequence(**words)) == 1
    assert token(HALVES, sequence(output=[2], **words)) == 2
    assert token(HALVES, sequence(output=[2, 3], **words)) == 1
    assert token(HALVES, sequence(prompt=[2], **words)) == 1, "the prompt is not part of a bad word"


def test_a_row_without_any_possible_token_says_so_and_touches_no_other() -> None:
    stuck = sequence(allowed_token_ids=[1], bad_words_ids=[[1]])
    drawn = sequence(allowed_token_ids=[1], bad_words_ids=[[1]], temperature=1.0)
    results = sample(HALVES, stuck, sequence(), drawn)
    assert [result.is_possible for result in results] == [False, True, False]
    assert all(result.is_finite for result in results)


def test_equal_scores_at_the_edge_of_top_k_go_to_the_lower_ids_in_any_batch() -> None:
    logits = torch.tensor([1.0, 3.0, 1.0, 1.0, 1.0])
    one = sequence(temperature=1.0, top_k=2, seed=5)
    mates = [sequence(temperature=1.0, top_k=k, seed=5) for k in (3, 4, 2)]
    assert sample(logits, one)[0] == sample(logits, *mates, one)[-1]


def test_log_probabilities_of_the_prompt_are_those_of_its_own_tokens() -> None:
    for count in (0, 1):
        asked = sequence(prompt=[0, 1, 4], num_prompt_logprobs=count)
        asked.prompt_logprobs = []
        readback = Readback(torch.device("cpu"))
        told = PromptLogprobs.of([Chunk(asked, 0, 2)], HALVES.repeat(2, 1), readback)
        assert asked.prompt_logprobs == [], "nothing is known before it is read"
        readback.start()
        told.keep(readback.wait())
        found = asked.prompt_logprobs
        assert [entry.logprob for entry in found] == pytest.approx([math.log(1 / 4), math.log(1 / 16)])
        assert [[token_id for token_id, _ in entry.top] for entry in found] == [[0] * count] * 2
