"""The processes of one decoder that is split by `--tp`: rank 0 leads, each other rank runs its share of every step.

Owns the channel from rank 0 to each other rank, the meeting of all in torch.distributed, and what they do together.
All of it stays on this machine: channels are socket pairs, the meeting place is a file in a private folder, and gloo
and NCCL are held to the loopback interface. A header that arrives over a channel begins a step; a channel that closes
ends the rank. In rank 0 the engine thread takes the steps; the others have one thread.
"""

import os
import socket
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import ModelFailure
from common.logs import LogFormat, LogLevel
from common.metrics import Counter, Gauge
from common.tensors import pick_device
from decoder_svc.model.parallel import Shard, pad_columns
from decoder_svc.model_input import ModelInput
from decoder_svc.step_tensors import StepSizes, pack_integers, unpack_step

RANKS = Gauge("tandem_decoder_ranks", "Processes that hold the model together")
BROADCAST_BYTES = Counter(
    "tandem_decoder_broadcast_bytes_total", "Bytes of steps' inputs given to the other ranks, each counted once"
)

# For all to meet once they have loaded, and for one operation of a step: /health has said so long before.
TIMEOUT = timedelta(seconds=600)
LOOPBACK = "lo"
_NUMBER = struct.Struct("<q")
_MAX_MESSAGE_BYTES = 1 << 16
_GONE = "the other end of a rank's channel is gone"


class RankSetup(msgspec.Struct):
    """What a rank is told first: which share of what it is to load, and where all meet."""

    rank: int
    size: int
    checkpoint_dir: str
    dtype: str
    kv_dtype: str
    device: str
    block_size: int
    kv_cache_bytes: int
    threads: int
    compile_layers: bool
    meeting_file: str
    log_level: LogLevel
    log_format: LogFormat


def rank_device(name: str, rank: int) -> str:
    """The device of a rank: CPU for all, or the GPUs that follow the named one. Raises ConfigError for one too many."""
    kind, _, index = pick_device(name).partition(":")
    return kind if kind == "cpu" else pick_device(f"{kind}:{int(index or 0) + rank}")


class Channel:
    """One end of a socket pair between rank 0 and another rank."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    def send_setup(self, setup: RankSetup) -> None:
        """Tell a rank what it is."""
        self.send_message(msgspec.msgpack.encode(setup))

    def receive_setup(self) -> RankSetup:
        """What this rank is. Raises EOFError."""
        return msgspec.msgpack.decode(self.receive_message(), type=RankSetup)

    def send_message(self, data: bytes) -> None:
        """Bytes of any number. Raises EOFError."""
        self.send_number(len(data))
        self.send(data)

    def receive_message(self) -> bytes:
        """What `send_message` sent. Raises EOFError."""
        length = self.receive_number()
        assert 0 < length <= _MAX_MESSAGE_BYTES
        return self.receive(length)

    def send_number(self, value: int) -> None:
        """One integer. Raises EOFError."""
        self.send(_NUMBER.pack(value))

    def receive_number(self) -> int:
        """One integer. Raises EOFError."""
        value: int = _NUMBER.unpack(self.receive(_NUMBER.size))[0]
        return value

    def send(self, data: bytes) -> None:
        """Bytes whose number the other end knows. Raises EOFError when the other end is gone."""
        try:
            self._socket.sendall(data)
        except ConnectionError as exc:
            raise EOFError(_GONE) from exc

    def receive(self, count: int) -> bytes:
        """So many bytes, however long they take. Raises EOFError when the other end is gone."""
        data = b""
        while len(data) < count:
            try:
                piece = self._socket.recv(count - len(data))
            except ConnectionResetError as exc:  # it left something unread
                raise EOFError(_GONE) from exc
            if not piece:
                raise EOFError(_GONE)
            data += piece
        return data

    def close(self) -> None:
        """The other end reads to the end, and no further."""
        self._socket.close()


@contextmanager
def while_loading() -> Iterator[None]:
    """In rank 0: a rank that is gone before it was ready ends the start, with a reason that a person can follow."""
    try:
        yield
    except EOFError as exc:
        raise ModelFailure("one of the --tp processes ended while it loaded: its own log lines say why") from exc


def agree_on_blocks(own: int, channels: Sequence[Channel]) -> int:
    """The KV blocks of rank 0 and all others: as many as the one with least room can hold.

    Waits until the others have loaded too. Raises ModelFailure when one has ended meanwhile.
    """
    with while_loading():
        num_blocks = min([own, *(channel.receive_number() for channel in channels)])
        for channel in channels:
            channel.send_number(num_blocks)
    return num_blocks


class ProcessRanks:
    """What the ranks do together, over torch.distributed. A `Ranks`."""

    def __init__(self, shard: Shard, channels: Sequence[Channel]) -> None:
        """`channels` are rank 0's to all others."""
        self.shard = shard
        self._channels = channels
        self._is_in_step = False
        self._device, self._dtype = torch.device("cpu"), torch.float32

    def meet(self, meeting_file: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Wait for all ranks; from then on they compute together, each on its device, all in one dtype."""
        self._device, self._dtype = device, dtype
        # Each process that joins a group listens: on loopback, and behind a file, no other machine can reach it.
        os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = LOOPBACK
        is_cuda = device.type == "cuda"
        if is_cuda:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if is_cuda else "gloo",
            store=dist.FileStore(str(meeting_file), self.shard.size),  # type: ignore[attr-defined]
            rank=self.shard.rank,
            world_size=self.shard.size,
            timeout=TIMEOUT,
            device_id=device if is_cuda else None,
        )
        dist.barrier()
        RANKS.set(self.shard.size)

    @property
    def is_in_step(self) -> bool:
        """Whether the others are in the middle of a step."""
        return self._is_in_step

    def begin_step(self, model_input: ModelInput) -> None:
        """Rank 0: sizes over the channels, tensors by broadcast; embeddings go once, however many ranks there are."""
        if self.shard.rank > 0:
            return
        self._is_in_step = True
        sizes = StepSizes.of(model_input)
        for channel in self._channels:
            channel.send_message(sizes.pack())
        parts = [pack_integers(model_input)]
        if model_input.vision_embeds is not None:
            parts.append(model_input.vision_embeds.to(self._dtype).contiguous())
        for part in parts:
            dist.broadcast(part, src=0)
            BROADCAST_BYTES.inc(part.nbytes)

    def receive_step(self, header: bytes) -> ModelInput:
        """Other ranks: the step that rank 0 began with this header."""
        sizes = StepSizes.unpack(header)
        integers = torch.empty(sum(sizes.lengths), dtype=torch.int64, device=self._device)
        dist.broadcast(integers, src=0)
        vision = None
        if sizes.width:
            vision = torch.empty(sizes.num_vision, sizes.width, dtype=self._dtype, device=self._device)
            dist.broadcast(vision, src=0)
        return unpack_step(sizes, integers, vision)

    def sum(self, term: Tensor) -> Tensor:
        """[T, H] of each rank -> their sum, in place."""
        dist.all_reduce(term)
        return term

    def join_columns(self, part: Tensor, num_columns: int) -> Tensor:
        """Logits [R, columns of this rank] -> at rank 0 [R, num_columns]."""
        joined = part
        if part.shape[0]:
            own = pad_columns(part, num_columns, self.shard.size).contiguous()
            parts = [torch.empty_like(own) for _ in range(self.shard.size)] if self.shard.rank == 0 else None
            dist.gather(own, parts, dst=0)
            joined = part if parts is None else torch.cat(parts, dim=1)[:, :num_columns]
        elif self.shard.rank == 0:
            joined = part.new_empty(0, num_columns)
        self._is_in_step = False
        return joined
