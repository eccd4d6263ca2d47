"""Training is a pure function of the seed: run twice, or stopped and resumed, it gives the same bits."""

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

import pytest
import torch
from torch import Tensor

from demo.plan import AREAS, STAGES, step_of, total_steps
from demo.train import Trainer

FIRST_JOINT = STAGES[0].steps
NUMBERS = (FIRST_JOINT - 1, FIRST_JOINT, total_steps() - 1)


def train(trainer: Trainer, numbers: Sequence[int]) -> dict[str, Tensor]:
    """The trainer's state after these steps of the plan, one small picture a batch."""
    maker = trainer.batch_maker()
    for number in numbers:
        step = step_of(number)
        trainer.step(maker.make(number, 0, step.kind, AREAS[0], 1, *step.guides), step)
    return trainer.state()


def trainer_at(folder: Path, seed: int = 1) -> Trainer:
    torch.set_num_threads(1)
    return Trainer(folder, seed, rank=0, ranks=1)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    return train(trainer_at(tmp_path_factory.mktemp("once")), NUMBERS)


def differing(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name], b[name])]


def test_the_same_seed_gives_the_same_weights_bit_for_bit(trained: dict[str, Tensor], tmp_path: Path) -> None:
    assert differing(trained, train(trainer_at(tmp_path), NUMBERS)) == []


def test_another_seed_gives_other_weights_and_other_pictures(tmp_path: Path) -> None:
    one, two = trainer_at(tmp_path), trainer_at(tmp_path, seed=2)
    one.enter(1)
    two.enter(1)
    names = differing(one.state(), two.state())
    assert any("language_model" in name for name in names)
    assert any("visual" in name for name in names)
    first, second = (t.batch_maker().make(0, 0, "dense", AREAS[0], 1)["patches"] for t in (one, two))
    assert not torch.equal(first, second)


def test_a_run_that_was_stopped_and_resumed_gives_the_same_weights(trained: dict[str, Tensor], tmp_path: Path) -> None:
    before = trainer_at(tmp_path)
    train(before, NUMBERS[:2])
    before.save()
    after = trainer_at(tmp_path, seed=9)  # its own first weights are replaced by the saved ones
    after.seed = before.seed
    after.resume()
    assert differing(trained, train(after, NUMBERS[2:])) == []


def test_a_step_of_the_plan_is_a_pure_function_of_its_number() -> None:
    for number in (0, *NUMBERS):
        assert astuple(step_of(number)) == astuple(step_of(number))
