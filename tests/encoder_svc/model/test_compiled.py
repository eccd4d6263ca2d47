"""The compiled tower: the results of the other one, one graph for all sizes, and no start where it cannot be made."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from prometheus_client import REGISTRY
from torch import Tensor

from common.errors import ConfigError
from common.messages import Grid
from encoder_svc.model.compiled import compile_tower, run_all_graphs
from encoder_svc.model.vision import VisionTower
from encoder_svc.model.weights import load_vision_tower
from encoder_svc.runner import TowerItem, TowerRunner
from tests.encoder_svc.embeddings import FINGERPRINT, key
from tests.encoder_svc.towers import tiny_tower
from tests.servable import save_servable

GRIDS: list[list[Grid]] = [[(1, 4, 4)], [(1, 2, 2)], [(1, 16, 24), (3, 4, 6)], [(2, 2, 2), (1, 8, 8), (1, 2, 2)]]


def uncompiled(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
    """A compiler that lets a graph run as it was captured."""
    return graph.forward


def num_compilations() -> float:
    return REGISTRY.get_sample_value("tandem_encoder_compilations_total") or 0.0


def pixels(tower: VisionTower, grids: Sequence[Grid]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(t * h * w, tower.patch_width, generator=generator) for t, h, w in grids]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    """What another test compiled is no part of this one."""
    torch._dynamo.reset()


def assert_equal_results(plain: VisionTower, compiled: VisionTower, tolerance: float) -> None:
    for grids in GRIDS:
        values = pixels(plain, grids)
        torch.testing.assert_close(compiled(values, grids), plain(values, grids), rtol=tolerance, atol=tolerance)


def test_what_is_captured_is_the_tower_and_no_size_is_captured_apart() -> None:
    plain, compiled = tiny_tower(), tiny_tower()
    compile_tower(compiled, uncompiled)
    before = num_compilations()
    run_all_graphs(compiled)
    made = num_compilations() - before
    assert made >= 4, "before and behind the attention, and both kinds of merger"
    assert_equal_results(plain, compiled, 1e-6)
    assert num_compilations() - before == made
    assert REGISTRY.get_sample_value("tandem_encoder_tower_compiled") == 1


async def test_the_compute_thread_compiles_nothing_that_the_start_has_compiled() -> None:
    compiled = tiny_tower()
    compile_tower(compiled, uncompiled)
    run_all_graphs(compiled)
    before = num_compilations()
    runner = TowerRunner(compiled, fingerprint=FINGERPRINT, wire_dtype="float32")
    for grids in GRIDS:
        items = zip(grids, pixels(compiled, grids), strict=True)
        await runner.run([TowerItem(key(n), grid, values.numpy()) for n, (grid, values) in enumerate(items)])
    assert num_compilations() == before
    runner.close()


def test_a_tower_that_cannot_be_compiled_is_a_wrong_setting_and_says_why() -> None:
    def broken(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Any:
        raise RuntimeError("no working C++ compiler was found")

    tower = tiny_tower()
    compile_tower(tower, broken)
    with pytest.raises(ConfigError, match=r"--compile-tower: .*no working C\+\+ compiler was found"):
        run_all_graphs(tower)


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny model."""
    return save_servable(tmp_path / "model")[0]


@pytest.fixture
def code_of_earlier_runs(pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own cache, beside pytest's: a graph that no earlier run has compiled is compiled, for a minute."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(pytestconfig.cache.mkdir("inductor")))


@pytest.fixture
def no_code_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of compiled code in which there is nothing."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))


def load(checkpoint: Path, dtype: torch.dtype, device: str) -> tuple[VisionTower, VisionTower]:
    """The tower as it is, and compiled."""
    plain, compiled = (
        load_vision_tower(checkpoint, dtype=dtype, device=device, is_compiled=is_compiled)
        for is_compiled in (False, True)
    )
    return plain, compiled


def errors(tower: VisionTower, exact: VisionTower) -> Tensor:
    """How far a tower is from a float32 one, in the mean of each batch."""
    results = [[one(pixels(exact, grids), grids).float().cpu() for one in (tower, exact)] for grids in GRIDS]
    return torch.stack([(got - expected).abs().mean() for got, expected in results])


def check_inductor_s_tower(checkpoint: Path, dtype: torch.dtype, device: str) -> None:
    """In float32 the results are the same; in half precision, where fusing rounds otherwise, they are as exact."""
    before = num_compilations()
    plain, compiled = load(checkpoint, dtype, device)
    made = num_compilations()
    assert made > before
    if dtype == torch.float32:
        assert_equal_results(plain, compiled, 2e-5 if device == "cpu" else 1e-3)
    else:
        exact = load_vision_tower(checkpoint, dtype=torch.float32, device="cpu")
        assert (errors(compiled, exact) <= 1.2 * errors(plain, exact)).all()
    assert num_compilations() == made


@pytest.mark.slow
@needs_compiler
@pytest.mark.usefixtures("code_of_earlier_runs")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_s_tower_gives_the_results_of_the_other_one(checkpoint: Path, dtype: torch.dtype) -> None:
    check_inductor_s_tower(checkpoint, dtype, "cpu")


@pytest.mark.slow
@pytest.mark.usefixtures("no_code_yet")
def test_without_a_compiler_the_tower_is_not_loaded_and_the_reason_is_told(checkpoint: Path) -> None:
    with (
        torch._inductor.config.patch({"cpp.cxx": ("/no/such/compiler",)}),
        pytest.raises(ConfigError, match=r"--compile-tower: .*compiler"),
    ):
        load_vision_tower(checkpoint, dtype=torch.float32, device="cpu", is_compiled=True)


@pytest.mark.cuda
@pytest.mark.usefixtures("code_of_earlier_runs")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inductor_s_tower_gives_the_results_of_the_other_one_on_a_gpu(checkpoint: Path, dtype: torch.dtype) -> None:
    check_inductor_s_tower(checkpoint, dtype, "cuda")
