"""A rank other than 0 of a decoder: `python -m decoder_svc.rank DESCRIPTOR`, started by rank 0 and by nobody else.

Loads its share of the language model and runs every step that rank 0 begins, until rank 0 closes the channel or is
gone. Opens no port, reads no setting, and leaves signals to rank 0, whose drain needs it to the end. One thread.
"""

import signal
import socket
import sys
from pathlib import Path

import structlog
import torch

from common.errors import TandemError
from common.logs import configure_logs
from common.tensors import DTYPES, use_threads
from decoder_svc.kv_budget import affordable_blocks, make_kv_cache
from decoder_svc.kv_cache import KVCache
from decoder_svc.model.parallel import Shard
from decoder_svc.model.text import TextModel
from decoder_svc.model.weights import load_text_model
from decoder_svc.tensor_parallel import Channel, ProcessRanks, RankSetup

logger = structlog.get_logger(__name__)

CANNOT_LOAD_CODE = 2


def run(channel: Channel) -> int:
    """Load, then follow; returns the exit code."""
    try:
        setup = channel.receive_setup()
        configure_logs(f"decoder rank {setup.rank}", setup.log_level, setup.log_format)
        ranks, model, kv_cache = _load(setup, channel)
    except EOFError:
        return 0  # rank 0 was stopped, or could not load itself
    except TandemError as error:
        logger.error("a rank cannot load", reason=str(error))
        return CANNOT_LOAD_CODE
    logger.info("rank is ready", device=str(model.device), kv_cache_bytes=kv_cache.num_bytes)
    while True:
        try:
            header = channel.receive_message()
        except EOFError:
            return 0
        step = ranks.receive_step(header)
        hidden, _ = model.hidden_states(step, kv_cache)
        model.logits(hidden)


def _load(setup: RankSetup, channel: Channel) -> tuple[ProcessRanks, TextModel, KVCache]:
    ranks = ProcessRanks(Shard(setup.rank, setup.size), ())
    use_threads(setup.threads)
    kv_dtype = DTYPES[setup.kv_dtype]
    model = load_text_model(
        Path(setup.checkpoint_dir),
        dtype=DTYPES[setup.dtype],
        device=setup.device,
        block_size=setup.block_size,
        ranks=ranks,
        compile_layers=setup.compile_layers,
        kv_dtype=kv_dtype,
    )
    channel.send_number(affordable_blocks(model, setup.kv_cache_bytes, setup.block_size, kv_dtype))
    kv_cache = make_kv_cache(model, channel.receive_number(), setup.block_size, kv_dtype)
    ranks.meet(Path(setup.meeting_file), torch.device(setup.device), model.dtype)
    return ranks, model, kv_cache


def main() -> None:
    """Entry point."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise SystemExit(run(Channel(socket.socket(fileno=int(sys.argv[1])))))


if __name__ == "__main__":
    main()
