"""The gateway's share of what scales the tiers: counted where work enters, so it is there with no encoder alive.

Owns the metrics of both tiers. How many replicas follow from it is `common.autoscale`'s. Runs on the event loop.
"""

from common.autoscale import DecoderUse, Share, TierName, decoder_share, encoder_share
from common.autoscale_shares import OwnShare
from common.metrics import Gauge
from gateway_svc.routing.decoder_pool import DecoderPool
from gateway_svc.routing.encoder_pool import EncoderPool

REPLICAS = Gauge("tandem_autoscale_replicas", "Work that this gateway sees, in replicas: sum over gateways", ["tier"])
BACKLOG_SECONDS = Gauge(
    "tandem_autoscale_backlog_seconds", "Time one encoder takes for what this gateway waits for: sum over gateways"
)
BACKLOG_PATCHES = Gauge(
    "tandem_autoscale_backlog_patches", "Patches that this gateway waits for, after caches: sum over gateways"
)
OFFERED_SECONDS = Gauge(
    "tandem_autoscale_offered_seconds", "Encoder time that each second's new work takes: sum over gateways"
)
OCCUPANCY = Gauge("tandem_autoscale_occupancy", "Decoders that this gateway fills: sum over gateways")
HELD = Gauge("tandem_autoscale_held_requests", "Requests that wait since no decoder is there: sum over gateways")
ENCODER_RATE = Gauge("tandem_autoscale_encoder_patches_per_s", "Rate of one encoder: mean over gateways")


class Autoscale:
    """The signals of one gateway."""

    def __init__(self, encoders: EncoderPool, decoders: DecoderPool, instance_id: str) -> None:
        self._encoders = encoders
        self._decoders = decoders
        self._instance_id = instance_id
        self.measure()

    def share(self, tier: TierName) -> Share:
        """This gateway's share."""
        return self._encoder_share() if tier == "encoder" else self._decoder_share()

    def own(self, tier: TierName) -> OwnShare:
        """The share with the name of the gateway."""
        return OwnShare(gateway=self._instance_id, share=self.share(tier))

    def measure(self) -> None:
        """Set the metrics; all are there from the start, and 0 without traffic."""
        encoder, decoder = self._encoder_share(), self._decoder_share()
        REPLICAS.labels("encoder").set(encoder.replicas)
        REPLICAS.labels("decoder").set(decoder.replicas)
        BACKLOG_SECONDS.set(encoder.backlog_seconds)
        BACKLOG_PATCHES.set(encoder.backlog_patches)
        OFFERED_SECONDS.set(encoder.offered_seconds)
        OCCUPANCY.set(decoder.occupancy)
        HELD.set(decoder.held)
        ENCODER_RATE.set(encoder.patches_per_s)

    def _encoder_share(self) -> Share:
        demand = self._encoders.demand
        return encoder_share(
            backlog_patches=demand.backlog_patches,
            offered_patches_per_s=demand.patches_per_s(),
            patches_per_s=self._encoders.patches_per_s,
            ready=len(self._encoders.ready()),
            loads={p.control.endpoint: float(p.num_own_patches) for p in self._encoders.ours},
        )

    def _decoder_share(self) -> Share:
        loads = {}
        for link in self._decoders.ours:
            report, peer = link.load, link.peer
            if report is None or peer is None:
                continue
            loads[link.endpoint] = DecoderUse(
                kv_share=report.kv_share,
                running=report.running,
                waiting=report.waiting,
                slots=peer.limits.max_sequences,
                wait_s=report.queue_s,
                own=self._decoders.num_runs(link),
            )
        return decoder_share(loads, held=self._decoders.num_held)
