"""`tandem encoder --devices` in a fleet: a request's pictures spread over its processes and come back in order."""

import dataclasses
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from PIL import Image
from rich.console import Console

from deploy.local import LocalStack, UpSettings, free_port, plan
from encoder_svc.config import EncoderSettings
from encoder_svc.devices import PORT_STEP, settings_of_each
from gateway_svc.text.detokenizer import TokenTable
from tests.forked import ForkedChild
from tests.integration.turns import generated, messages_of, telling_checkpoint
from tests.media_samples import encoded, picture
from tests.reference import Media, Reference, Turn
from tests.stack import FOR_TESTS, Stack

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NUM_PICTURES, MAX_TOKENS = 12, 24


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Reference]:
    return telling_checkpoint(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
async def stack(served: tuple[Path, Reference], tmp_path: Path) -> AsyncIterator[Stack]:
    """As `tandem up` starts it, with one command for both encoders."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    up = UpSettings(model=str(served[0]), port=free_port(), data_dir=tmp_path)
    planned = plan(up, run_dir, tmp_path)
    port = free_port()
    first = EncoderSettings(
        model=str(served[0]),
        devices=("cpu,cpu",),
        control_endpoint=f"ipc://{run_dir}/c",
        data_endpoint=f"ipc://{run_dir}/d",
        http_port=port if port + PORT_STEP <= 65_535 else port - PORT_STEP,
    )
    each = settings_of_each(first)
    members = [word for own in each for word in ("--encoders", f"{own.control_endpoint},{own.data_endpoint}")]
    encoder, *others = planned.services
    addresses = ["--control-endpoint", first.control_endpoint, "--data-endpoint", first.data_endpoint]
    arguments = [sys.executable, "-m", "encoder_svc", "--devices", "cpu,cpu", *addresses]
    arguments += ["--dtype", "float32", "--http-port", str(first.http_port)]
    planned.services[:] = [
        dataclasses.replace(encoder, arguments=arguments, cores=frozenset()),
        *(dataclasses.replace(other, arguments=[*_without_encoders(other.arguments), *members]) for other in others),
    ]
    planned.services[:] = [
        dataclasses.replace(command, environment={**FOR_TESTS, **command.environment}) for command in planned.services
    ]
    del planned.ready_urls["encoder-0"]
    for index, own in enumerate(each):
        planned.ready_urls[f"device-{index}"] = f"http://127.0.0.1:{own.http_port}/ready"
    local = LocalStack(planned)
    local.children.update({command.name: ForkedChild(command) for command in planned.services[1:]})
    stack = Stack(planned, local, up)
    try:
        await local.start()
        for index in range(2):
            local.children[f"device-{index}"] = local.children["encoder-0"]
        await local.wait_ready(Console(quiet=True))
        await stack.wait_for(encoders=2, decoders=1)
        yield stack
    finally:
        await local.stop()


def _without_encoders(arguments: Any) -> list[str]:
    words = list(arguments)
    while "--encoders" in words:
        at = words.index("--encoders")
        del words[at : at + 2]
    return words


async def test_pictures_spread_over_devices_and_come_back_in_order(
    stack: Stack, served: tuple[Path, Reference]
) -> None:
    reference = served[1]
    pictures = [encoded(Image.fromarray(picture(96, 64, seed))) for seed in range(NUM_PICTURES)]
    turns = [Turn("user", [*(Media("image", data) for data in pictures), "all"])]
    expected = reference.generate(turns, MAX_TOKENS)
    turned = [Turn("user", [*(Media("image", data) for data in pictures[::-1]), "all"])]
    assert reference.generate(turned, MAX_TOKENS) != expected, "the order would not show"
    table = TokenTable(reference.tokenizer)
    assert await generated(stack, messages_of(turns), MAX_TOKENS) == [list(table.bytes_of(token)) for token in expected]
    counts = [await stack.metric(f"device-{i}", "tandem_encoder_preprocess_seconds_count") for i in range(2)]
    assert sum(counts) == NUM_PICTURES
    assert all(count > 0 for count in counts), counts

    # One process that dies takes nothing of the other with it, and is started anew.
    parent = stack.local.children["encoder-0"].pid
    assert parent is not None
    first, second = psutil.Process(parent).children()
    second.kill()
    await stack.wait_for(encoders=1, decoders=1)
    await stack.wait_for(encoders=2, decoders=1)
    assert first.is_running()
    assert await stack.metric("device-0", "tandem_encoder_preprocess_seconds_count") == counts[0]
    children = psutil.Process(parent).children()
    os.kill(parent, signal.SIGTERM)
    assert await stack.local.children["encoder-0"].wait() == 0
    assert not any(child.is_running() for child in children)
