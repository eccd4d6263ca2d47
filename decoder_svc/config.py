"""Settings of the decoder service, read once in `__main__`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from common.settings import CommonSettings, DtypeName, Port

OnOffAuto = Literal["auto", "on", "off"]


@dataclass(frozen=True, kw_only=True)
class DecoderSettings(CommonSettings):
    """Settings of `tandem decoder`."""

    control_endpoint: str = "tcp://127.0.0.1:7201"
    """ZMQ address to bind for gateways."""

    http_port: Port = 7200
    """Port of /health, /ready and /metrics."""

    encoders: tuple[str, ...] = ()
    """Encoders, as for the gateway: CONTROL,DATA addresses, of which a decoder uses the second; or dns:HOST:7101,7102;
    or kubernetes:SERVICE. May be given several times."""

    kubernetes_api: str | None = None
    """URL of the Kubernetes API server that sources with kubernetes: ask; by default the pod's own, or that of the
    kubeconfig."""

    discovery_relist_s: Annotated[float, Parameter(validator=Number(gte=1, lte=3600))] = 120.0
    """Seconds after which the endpoints of a Service are listed anew, whatever a watch told; 60 to 300 suit most."""

    device: str = "auto"
    """Device of the language model: cpu, cuda, cuda:1, or auto."""

    dtype: DtypeName = "auto"
    """Compute dtype of the language model: auto takes the checkpoint's."""

    tp: Annotated[int, Parameter(validator=Number(gte=1, lte=64))] = 1
    """Processes of this machine that the model is split over (tensor parallelism), each on a device of its own: of
    --device cuda those from cuda:0 on."""

    threads: int = 0
    """Threads of the model on CPU, of all --tp processes together; 0 takes the cores that this process may use."""

    cores: str = ""
    """Cores that this process and those of --tp keep to, such as 0-3,8; by default all that it may use."""

    max_model_len: int = 0
    """Tokens of one prompt and its answer together; 0 takes the checkpoint's context, or what the KV cache holds."""

    kv_cache_bytes: int = 0
    """Memory of the KV cache, for each of --tp; 0 takes 1 GiB on CPU, and 85 % of what is free after loading on
    CUDA."""

    kv_cache_dtype: DtypeName = "auto"
    """Dtype of the KV cache: auto takes the compute dtype. Another one is read by attention in plain torch, which is
    slower: for float32 models that lack memory."""

    block_size: int = 0
    """Tokens in one block of the KV cache; 0 takes 16, and 256 on CUDA where flash-attn is installed, which reads no
    smaller ones."""

    max_tokens_per_step: int = 0
    """Tokens of one engine step: running streams first, then pieces of prompts; 0 takes 2048, and 768 on CPU, where
    streams would wait long for a larger step."""

    max_sequences: int = 64
    """Sequences that run together."""

    overlap_steps: OnOffAuto = "auto"
    """Launch each engine step before the tokens of the one before are read, so that a GPU does not wait for the host:
    auto does so on CUDA."""

    cuda_graphs: Literal["auto", "off"] = "auto"
    """Record decode steps as CUDA graphs at start: auto does so where flash-attn is used and --tp is 1."""

    compile_layers: bool = False
    """Let torch.compile fuse the small operations of layers, on CUDA alone; each form is compiled when it is first
    needed. Needs Triton and a C compiler on the machine."""

    max_waiting: int = 1024
    """Requests that may wait, above which new ones are refused as overloaded."""

    fetch_bytes: int = 512 << 20
    """Bytes of embeddings that are being fetched or wait for their prefill."""

    share_memory: bool = True
    """Map embeddings of encoders that allow it (same user, same host, not in another container) instead of receiving
    them: a fraction of the time, and of the CPU on both sides."""

    embedding_cache_bytes: int = 64 << 20
    """Memory for embeddings that no request needs any more, kept for the next one."""
