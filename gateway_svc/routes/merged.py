"""Several asynchronous generators as one, in the order in which they give something.

The first that fails ends them all. Pure asyncio; runs in the task that iterates, with a task for each source.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")
MAX_WAITING = 1024


async def merged(sources: Sequence[AsyncGenerator[T, None]]) -> AsyncGenerator[tuple[int, T], None]:
    """Number of the source and its item, until all have ended. Closing it closes them all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as alone:
            async for item in alone:
                yield 0, item
        return
    items: asyncio.Queue[tuple[int, T] | None] = asyncio.Queue(MAX_WAITING)

    async def pump(number: int, source: AsyncGenerator[T, None]) -> None:
        try:
            async with aclosing(source):
                async for item in source:
                    await items.put((number, item))
        finally:
            # At a full queue the reader looks at the tasks anyway once it has read on.
            if not items.full():
                items.put_nowait(None)

    tasks = [asyncio.create_task(pump(number, source)) for number, source in enumerate(sources)]
    try:
        while not (items.empty() and all(task.done() for task in tasks)):
            numbered = await items.get()
            if numbered is not None:
                yield numbered
            for task in tasks:
                if task.done():
                    task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
