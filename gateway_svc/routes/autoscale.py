"""`/autoscale/v1/{tier}`: the work of a tier in replicas, of this gateway or of all.

Owns the route's shape. This gateway's share is its fleet's to tell, the others' are collected by
`common.autoscale_shares`. Runs in the request's task.
"""

from collections.abc import Callable
from typing import Literal

import msgspec
from fastapi import FastAPI
from starlette.responses import Response

from common.autoscale import TierName, needed
from common.autoscale_shares import Collected, OwnShare, ShareCollector
from gateway_svc.routes.api import ERROR_RESPONSES, json_response


def add_autoscale_route(
    app: FastAPI, own_share: Callable[[TierName], OwnShare], gateways: ShareCollector | None
) -> None:
    """`/autoscale/v1/{tier}`: for KEDA's metrics-api, for `tandem autoscaler`, and for people."""

    @app.get("/autoscale/v1/{tier}", tags=["operation"], response_model=None, responses=ERROR_RESPONSES)
    async def show_autoscale(tier: TierName, scope: Literal["all", "self"] = "all") -> Response:
        """The work of a tier in replicas, of all gateways together or of this one."""
        own = own_share(tier)
        if scope == "self":
            return json_response(own)
        collected = (
            await gateways.collect(tier, own)
            if gateways is not None
            else Collected(tier, {own.gateway: own.share}, asked=1, answered=1)
        )
        share = collected.total
        body = {
            **msgspec.to_builtins(share),
            "desired": needed(share.replicas),
            "gateways": {"asked": collected.asked, "answered": collected.answered},
        }
        return json_response(body)
