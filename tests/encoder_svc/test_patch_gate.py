"""Room for patches: never more inside than there is room for, in the order of asking, and nobody waits for ever."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from encoder_svc.patch_gate import PatchGate


async def hold(gate: PatchGate, patches: int, entered: list[int], leave: asyncio.Event, name: int = 0) -> None:
    async with gate.room_for(patches):
        entered.append(name)
        await leave.wait()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_what_does_not_fit_waits_and_lets_nothing_younger_pass() -> None:
    gate, entered = PatchGate(100), []
    leaves = [asyncio.Event() for _ in range(4)]
    tasks = [
        asyncio.create_task(hold(gate, patches, entered, leaves[name], name))
        for name, patches in enumerate((60, 50, 10, 30))
    ]
    await turns()
    assert (entered, gate.inside) == ([0], 60)
    leaves[0].set()
    await turns()
    assert (entered, gate.inside) == ([0, 1, 2, 3], 90)
    for leave in leaves:
        leave.set()
    await asyncio.gather(*tasks)
    assert gate.inside == 0


async def test_what_is_larger_than_the_room_enters_alone() -> None:
    gate, entered = PatchGate(100), []
    leave = asyncio.Event()
    large = asyncio.create_task(hold(gate, 1000, entered, leave, 1))
    small = asyncio.create_task(hold(gate, 1, entered, leave, 2))
    await turns()
    assert entered == [1]
    leave.set()
    await asyncio.gather(large, small)
    assert gate.inside == 0


async def test_one_that_leaves_the_queue_lets_those_behind_it_in() -> None:
    gate, entered = PatchGate(100), []
    leave = asyncio.Event()
    tasks = [
        asyncio.create_task(hold(gate, patches, entered, leave, name)) for name, patches in enumerate((60, 90, 40))
    ]
    await turns()
    tasks[1].cancel()
    await turns()
    assert entered == [0, 2]
    leave.set()
    await asyncio.gather(tasks[0], tasks[2])
    assert gate.inside == 0


@given(st.lists(st.tuples(st.integers(1, 120), st.integers(0, 12), st.booleans()), max_size=25))
def test_no_order_of_coming_going_and_cancelling_loses_room(arrivals: list[tuple[int, int, bool]]) -> None:
    async def play() -> None:
        gate, most = PatchGate(100), 0

        async def visit(patches: int, stay: int) -> None:
            nonlocal most
            async with gate.room_for(patches):
                most = max(most, gate.inside if gate.inside > patches else 0)
                await turns(stay)

        tasks = []
        for patches, stay, is_cancelled in arrivals:
            task = asyncio.create_task(visit(patches, stay))
            tasks.append(task)
            await turns(stay % 3)
            if is_cancelled:
                task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert gate.inside == 0
        assert most <= 100

    asyncio.run(play())
