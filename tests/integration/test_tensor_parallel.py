"""`tandem decoder --tp 2` as real processes: the tokens of one process, one fetch for all ranks, and one fate."""

import asyncio
import contextlib
import ipaddress
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
from PIL import Image

from common.processes import Command
from deploy.local import free_port
from gateway_svc.text.detokenizer import TokenTable
from tests.common.sockets import eventually
from tests.forked import ForkedChild
from tests.integration.conftest import text_message
from tests.integration.turns import generated, messages_of, telling_checkpoint
from tests.media_samples import encoded, picture
from tests.reference import Media, Turn
from tests.servable import save_servable
from tests.stack import Stack, running_stack
from tests.tiny_models import DECODER_SHARD

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

MAX_TOKENS = 16


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_servable(tmp_path_factory.mktemp("checkpoint") / "tiny")[0]


@contextlib.asynccontextmanager
async def split_stack(folder: Path, model: Path) -> AsyncIterator[Stack]:
    """Ranks that share one core take turns at every sum, and twice as long."""
    async with running_stack(folder, model, by_role={"decoder": {"TANDEM_TP": "2"}}, is_pinned=False) as stack:
        yield stack


def image(width: int, height: int, seed: int) -> Media:
    return Media("image", encoded(Image.fromarray(picture(width, height, seed))))


CASES = [
    [Turn("user", ["What is this?"])],
    [Turn("system", ["the quick brown fox"]), Turn("user", ["compare 123"])],
    [Turn("user", [image(200, 150, 1), "What is in the picture?"])],
    [Turn("user", ["First ", image(96, 240, 2), " then ", image(128, 128, 3), " what?"])],
    [Turn("user", [*(image(90, 70, seed) for seed in range(4, 8)), "all"])],
    [Turn("user", [image(200, 150, 1), "again"])],
]


def ranks_of(pid: int | None) -> list[psutil.Process]:
    """The other ranks of a decoder."""
    assert pid is not None
    return psutil.Process(pid).children()


def is_gone(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("is_moe", [False, True], ids=["dense", "moe"])
async def test_two_processes_give_the_tokens_of_one(is_moe: bool, tmp_path: Path) -> None:
    directory, reference = telling_checkpoint(tmp_path / "model", is_moe=is_moe)
    table = TokenTable(reference.tokenizer)
    expected = [await asyncio.to_thread(reference.generate, turns, MAX_TOKENS) for turns in CASES]
    async with split_stack(tmp_path, directory) as stack:
        alone = [await generated(stack, messages_of(turns), MAX_TOKENS) for turns in CASES]
        together = await asyncio.gather(*(generated(stack, messages_of(turns), MAX_TOKENS) for turns in CASES))
        for turns, answers, tokens in zip(CASES, zip(alone, together, strict=True), expected, strict=True):
            assert len(set(tokens)) >= 6, "an output that repeats itself proves little"
            for answer in answers:
                assert answer == [list(table.bytes_of(token)) for token in tokens], turns
        # Each of the seven pictures came once, for both ranks, and its tokens were given to the other one.
        assert await stack.metric("decoder-0", "tandem_decoder_ranks") == 2
        assert await stack.metric("decoder-0", "tandem_decoder_fetches_total") == 7
        assert await stack.metric("decoder-0", "tandem_decoder_broadcast_bytes_total") > 7 * 48 * 4 * 4
        pid = stack.local.children["decoder-0"].pid
        _nothing_listens_beyond_this_machine(psutil.Process(pid), *ranks_of(pid))


def _nothing_listens_beyond_this_machine(*processes: psutil.Process) -> None:
    for process in processes:
        listening = [c.laddr for c in process.net_connections("inet") if c.status == psutil.CONN_LISTEN]
        assert listening, "gloo listens in every rank"
        assert all(ipaddress.ip_address(address.ip).is_loopback for address in listening), listening


@pytest.fixture
async def stack(dense: Path, tmp_path: Path) -> AsyncIterator[Stack]:
    async with split_stack(tmp_path, dense) as stack:
        yield stack


async def has_begun(stack: Stack) -> None:
    """Return when the decoder has run some steps."""
    async with asyncio.timeout(60):
        while await stack.metric("decoder-0", "tandem_decoder_step_seconds_count") < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_a_rank_that_dies_ends_the_decoder_at_once(stack: Stack) -> None:
    (rank,) = ranks_of(stack.local.children["decoder-0"].pid)
    running = asyncio.create_task(generated(stack, text_message("go on"), 3000))
    await has_begun(stack)
    rank.kill()
    async with asyncio.timeout(20):
        assert await stack.local.children["decoder-0"].wait() != 0
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_drain_finishes_what_runs_although_every_process_gets_the_signal(stack: Stack) -> None:
    pid = stack.local.children["decoder-0"].pid
    ranks = ranks_of(pid)
    running = asyncio.create_task(generated(stack, text_message("go on"), 40))
    await has_begun(stack)
    for process in (*ranks, psutil.Process(pid)):
        process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        assert len(await running) == 40
        assert await stack.local.children["decoder-0"].wait() == 0
    assert all(map(is_gone, ranks))


@contextlib.asynccontextmanager
async def decoder_alone(folder: Path, *arguments: str) -> AsyncIterator[ForkedChild]:
    """A decoder that nobody asks, from its start on."""
    words = ["python", "-m", "decoder_svc", "--control-endpoint", f"ipc://{folder}/c", "--http-port", str(free_port())]
    child = ForkedChild(Command("decoder", [*words, *arguments], {}, folder / "log"))
    await child.start()
    try:
        yield child
    finally:
        child.kill()


def log_of(child: ForkedChild) -> str:
    assert child.command.log_file is not None
    return child.command.log_file.read_text()


async def code_of(child: ForkedChild) -> int:
    """The exit code of a decoder that ends without a traceback."""
    async with asyncio.timeout(60):
        code = await child.wait()
    assert "Traceback" not in log_of(child)
    return code


async def ranks_once_ready(child: ForkedChild) -> list[psutil.Process]:
    await eventually(lambda: "decoder is ready" in log_of(child), 60)
    return ranks_of(child.pid)


async def test_a_rank_that_dies_while_nothing_runs_ends_the_decoder_too(dense: Path, tmp_path: Path) -> None:
    async with decoder_alone(tmp_path, "--model", str(dense), "--tp", "2") as decoder:
        (rank,) = await ranks_once_ready(decoder)
        rank.kill()
        assert await code_of(decoder) == 1
        assert "a rank of this decoder has ended" in log_of(decoder)


async def test_ranks_go_with_a_rank_0_that_is_killed(dense: Path, tmp_path: Path) -> None:
    async with decoder_alone(tmp_path, "--model", str(dense), "--tp", "2") as decoder:
        ranks = await ranks_once_ready(decoder)
        assert len(ranks) == 1
        decoder.kill()
        await decoder.wait()
        await eventually(lambda: all(map(is_gone, ranks)), 20)


async def error_of(folder: Path, *arguments: str) -> str:
    """What a decoder that cannot start says, once it has ended with code 2."""
    async with decoder_alone(folder, "--log-level", "error", *arguments) as decoder:
        assert await code_of(decoder) == 2
        (line,) = [line for line in log_of(decoder).splitlines() if line.startswith("tandem decoder: ")]
    return line


@pytest.mark.parametrize("tp", [3, 8])
async def test_a_split_that_the_model_does_not_allow_is_one_line(dense: Path, tmp_path: Path, tp: int) -> None:
    error = await error_of(tmp_path, "--model", str(dense), "--tp", str(tp))
    assert f"--tp {tp} does not divide" in error
    assert "use one of [1, 2, 4]" in error


async def test_a_checkpoint_that_no_rank_can_load_is_one_line_of_rank_0(dense: Path, tmp_path: Path) -> None:
    broken = shutil.copytree(dense, tmp_path / "broken")
    (broken / DECODER_SHARD).write_bytes(b"no safetensors")
    error = await error_of(tmp_path, "--model", str(broken), "--tp", "2")
    assert f"{DECODER_SHARD} is not a valid safetensors file" in error


# A killed rank is missed by the load, which ends with 2, or by the watch, which ends with 1: whichever is first.
@pytest.mark.parametrize(
    ("to_rank_0", "number", "codes"), [(True, signal.SIGTERM, {0}), (False, signal.SIGKILL, {1, 2})]
)
async def test_a_start_that_is_broken_off_leaves_no_process(
    dense: Path, tmp_path: Path, to_rank_0: bool, number: signal.Signals, codes: set[int]
) -> None:
    async with decoder_alone(tmp_path, "--model", str(dense), "--tp", "2") as decoder:
        (rank,) = await eventually(lambda: ranks_of(decoder.pid), 60)
        # Nobody can be ready yet: the rank has only just begun to import torch.
        (psutil.Process(decoder.pid) if to_rank_0 else rank).send_signal(number)
        assert await code_of(decoder) in codes
        await eventually(lambda: is_gone(rank))
