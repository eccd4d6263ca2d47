"""The training plan: which stage a step belongs to, its batch and its learning rate.

Owns numbers only; a pure function of the step, so that a resumed run goes on as if it had never stopped. Stages:
`dense` teaches the tower alone (colour, shape and region of each token), `joint` everything on mostly small pictures,
`simple` the same on fewer shapes; the later ones, on all sizes, are described in demo/README.md.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from demo.conversations import WHICH_SHARE
from demo.questions import KIND_WEIGHTS

AREAS = ((9216.0, 25600.0), (25600.0, 65536.0), (65536.0, 147456.0), (147456.0, 262144.0))


@dataclass(frozen=True)
class Stage:
    """`kinds` are a batch's chances; `rows` of a batch and chances of `areas` are by area class."""

    name: str
    steps: int
    kinds: dict[str, float]
    rows: dict[str, tuple[int, int, int, int]]
    areas: tuple[float, float, float, float]
    late_areas: tuple[float, float, float, float]
    late: float  # share of the stage before the late areas
    hold: float  # share of the stage before the learning rate's linear decay
    floor: float  # learning rate at the end, as a share
    warmup: int
    side: float  # weight of the dense labels' loss beside the answers'
    peak: float = 1.0  # learning rate before the decay, as a share
    counts: tuple[float, ...] = ()  # chances of one to four shapes, where not the scenes' own
    moves: bool = False  # whether a video's dense labels tell region and motion
    focus: float = 0.0  # weight of the loss that guides attention to the shapes that a question names
    lists: bool = False  # whether that loss also follows a list's words
    sides: float = 0.0  # weight of the loss that reads a relation's two sides where its answer begins
    pictures: float = 0.0  # weight of the loss that reads which of two pictures is meant (train.py says where)
    which: float = WHICH_SHARE  # share of the questions about two pictures that ask which of them has something
    sinks: bool = False  # whether that loss takes names as a whole, and guides it somewhere when they fit nothing
    weights: Mapping[str, float] = field(default_factory=lambda: KIND_WEIGHTS)  # of the kinds of question
    sharpen: float = 1.0  # query and key norms are multiplied by this as the stage begins
    norm_boost: float = 1.0  # of their learning rate
    span: int = 0  # steps over which the shares above are counted, where not `steps`
    begun: int = 0  # how many of them went by before this stage


_AIM = Stage(
    "aim",
    200,
    {"one": 0.72, "two": 0.13, "video": 0.15},
    {"one": (24, 14, 7, 4), "two": (13, 7, 4, 2), "video": (10, 5, 3, 1)},
    (0.58, 0.27, 0.11, 0.04),
    (0.58, 0.27, 0.11, 0.04),
    late=1.0,
    hold=0.0,
    floor=0.0,
    warmup=1,
    side=0.2,
    peak=0.4,
    moves=True,
    sharpen=1.5,
    norm_boost=5.0,
    span=2150,
)
# Each of the later stages goes on from the one before, with what is said.
_SETTLE = replace(
    _AIM,
    name="settle",
    steps=800,
    late_areas=(0.38, 0.3, 0.2, 0.12),
    late=0.5,
    hold=0.25,
    peak=0.36,
    focus=0.2,
    sharpen=1.0,
    span=1900,
)
_FINISH = replace(
    _SETTLE, name="finish", steps=400, kinds={"one": 0.76, "two": 0.14, "video": 0.1}, sinks=True, begun=800
)
_COMPARE = replace(
    _FINISH,
    name="compare",
    steps=200,
    kinds={"one": 0.8, "two": 0.14, "video": 0.06},
    areas=(0.5, 0.28, 0.14, 0.08),
    late_areas=(0.38, 0.3, 0.19, 0.13),
    hold=0.35,
    peak=0.2,
    sides=0.5,
    span=900,
    begun=0,
    weights={"list": 1.8, "colour": 0.9, "shape": 0.7, "where": 0.9, "count": 1.8, "exists": 0.9, "relation": 2.6},
)
_ENUMERATE = replace(_COMPARE, name="enumerate", steps=700, lists=True, begun=200)
_POLISH = replace(
    _ENUMERATE,
    name="polish",
    steps=1000,
    kinds={"one": 0.84, "two": 0.12, "video": 0.04},
    areas=(0.48, 0.28, 0.15, 0.09),
    late_areas=(0.4, 0.29, 0.19, 0.12),
    warmup=20,
    span=0,
    begun=0,
    weights={"list": 2, "colour": 0.7, "shape": 0.7, "where": 0.8, "count": 2, "exists": 1, "relation": 3},
)
_PICK = replace(
    _POLISH,
    name="pick",
    steps=3500,
    kinds={"one": 0.7, "two": 0.26, "video": 0.04},
    hold=0.2,
    warmup=40,
    pictures=0.4,
    which=0.24,
    weights={"list": 2.4, "colour": 0.8, "shape": 0.8, "where": 0.8, "count": 2.2, "exists": 1, "relation": 2},
)
STAGES = (
    Stage(
        "dense",
        900,
        {"dense": 1.0},
        {"dense": (48, 22, 10, 6)},
        (0.7, 0.25, 0.05, 0.0),
        (0.45, 0.3, 0.17, 0.08),
        late=0.6,
        hold=0.6,
        floor=0.3,
        warmup=40,
        side=1.0,
    ),
    Stage(
        "joint",
        500,
        {"one": 0.76, "two": 0.12, "video": 0.12},
        {"one": (26, 15, 9, 6), "two": (14, 9, 5, 3), "video": (11, 7, 4, 2)},
        (0.6, 0.3, 0.1, 0.0),
        (0.6, 0.3, 0.1, 0.0),
        late=1.0,
        hold=1.0,
        floor=1.0,
        warmup=40,
        side=0.2,
    ),
    Stage(
        "simple",
        400,
        {"one": 0.84, "video": 0.16},
        {"one": (28, 14, 7, 4), "video": (11, 5, 3, 1)},
        (0.8, 0.2, 0.0, 0.0),
        (0.8, 0.2, 0.0, 0.0),
        late=1.0,
        hold=1.0,
        floor=1.0,
        warmup=1,
        side=0.2,
        peak=0.4,
        counts=(0.45, 0.35, 0.12, 0.08),
    ),
    _AIM,
    _SETTLE,
    _FINISH,
    _COMPARE,
    _ENUMERATE,
    _POLISH,
    _PICK,
)
MUON_LR, ADAM_LR = 0.02, 3e-3


@dataclass(frozen=True)
class Step:
    number: int
    stage: int
    kind: str
    area: tuple[float, float]
    rows: int
    scale: float  # of the learning rates
    side: float  # weight of the dense labels' loss

    @property
    def plan(self) -> Stage:
        """The stage, for all that is the same in each of its steps."""
        return STAGES[self.stage]

    @property
    def guides(self) -> tuple[tuple[float, ...], bool, bool, Mapping[str, float], bool, float]:
        """What BatchMaker.make takes after the rows."""
        plan = self.plan
        return plan.counts, plan.moves, plan.sinks, plan.weights, plan.lists, plan.which


def step_of(number: int) -> Step:
    """The plan of one step; `number` counts over all stages."""
    start, index = 0, 0
    while number >= start + STAGES[index].steps:
        start, index = start + STAGES[index].steps, index + 1
    stage = STAGES[index]
    span = stage.span or stage.steps
    rng, inside = random.Random(f"plan/{number}"), number - start
    kind = rng.choices(list(stage.kinds), list(stage.kinds.values()))[0]
    inside += stage.begun
    areas = stage.late_areas if inside >= stage.late * span else stage.areas
    area = rng.choices(range(4), areas)[0]
    warm = min(1.0, (inside + 1) / stage.warmup)
    scale = warm
    if inside >= stage.hold * span:
        left = (span - inside) / (span * (1 - stage.hold))
        scale = min(scale, stage.floor + (1 - stage.floor) * left)
    return Step(
        number,
        index,
        kind,
        AREAS[area],
        stage.rows[kind][area],
        scale * stage.peak,
        stage.side * warm,
    )


def total_steps() -> int:
    return sum(stage.steps for stage in STAGES)
