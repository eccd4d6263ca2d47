"""The chart's `values.schema.json`: `python -m tests.deploy.helm.values_schema` writes it anew.

Owns what the chart's values may be: no key but those that are known, and for `settings` of a tier the flags of that
service as the code has them, with their types. A test compares the file with this module, so a setting that comes, goes
or changes its type does so in the chart, or the build fails.
"""

import dataclasses
import json
import types
import typing
from pathlib import Path
from typing import Any

from common.settings import CommonSettings
from decoder_svc.config import DecoderSettings
from encoder_svc.config import EncoderSettings
from gateway_svc.config import GatewaySettings
from tests.docs.tables import field_texts
from tests.paths import REPOSITORY

CHART = REPOSITORY / "deploy" / "helm" / "tandem"
SCHEMA_FILE = CHART / "values.schema.json"
SERVICES: dict[str, type[CommonSettings]] = {
    "gateway": GatewaySettings,
    "encoder": EncoderSettings,
    "decoder": DecoderSettings,
}
# What the chart itself decides, from other values.
OWNED_BY_CHART = {
    "model", "revision", "served_model_name", "redis", "http_host", "http_port", "port", "control_endpoint",
    "data_endpoint", "curve_key_file", "allow_insecure_bind", "instance_id", "drain_timeout_s", "log_level",
    "log_format", "devices", "encoders", "decoders", "gateways", "kubernetes_api", "discovery_relist_s",
    "api_keys", "api_key_file",
}  # fmt: skip

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "array", "items": TEXT}
# Objects of the Kubernetes API, which checks them itself.
ANY_OBJECT: Schema = {"type": "object"}
ANY_OBJECTS: Schema = {"type": "array", "items": ANY_OBJECT}
LABELS: Schema = {"type": "object", "additionalProperties": TEXT}
PORTS: Schema = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 1, "maximum": 65_535}}
QUANTITY: Schema = {"type": ["string", "integer"], "pattern": r"^$|^[0-9]+(\.[0-9]+)?(m|[kMGTPE]i?)?$"}
NAME: Schema = {"type": "string", "pattern": r"^$|^[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?$"}


def whole(minimum: int, maximum: int | None = None) -> Schema:
    """An integer within bounds."""
    return {"type": "integer", "minimum": minimum, **({"maximum": maximum} if maximum is not None else {})}


def choice(*values: str) -> Schema:
    """One of some words."""
    return {"enum": list(values)}


def closed(properties: Schema) -> Schema:
    """An object that has no other keys."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def settings_schema(cls: type[CommonSettings]) -> Schema:
    """The settings of a service by flag, but for those that the chart decides."""
    hints, texts = typing.get_type_hints(cls), field_texts(cls)
    names = sorted(field.name for field in dataclasses.fields(cls) if field.name not in OWNED_BY_CHART)
    return closed(
        {
            name.replace("_", "-"): {**value_schema(hints[name]), "description": " ".join(texts[name].split())}
            for name in names
        }
    )


def value_schema(hint: Any) -> Schema:
    """What a setting of this type may be in the values; null leaves the default."""
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)
    schemas = [_one_value(kind) for kind in kinds if kind is not types.NoneType]
    return {"anyOf": [*schemas, {"type": "null"}]}


def _one_value(kind: Any) -> Schema:
    origin = typing.get_origin(kind)
    if origin is typing.Literal:
        return choice(*typing.get_args(kind))
    if origin is tuple:
        return {"type": "array", "items": _one_value(typing.get_args(kind)[0])}
    if origin is dict:
        return {"type": "object", "additionalProperties": _one_value(typing.get_args(kind)[1])}
    return {"type": {bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}[kind]}


def tier_schema(tier: str) -> Schema:
    """The values of one tier."""
    count = {"anyOf": [whole(0), {"type": "string", "pattern": "^[0-9]+%$"}]}
    probe = closed({"periodSeconds": whole(1), "timeoutSeconds": whole(1), "failureThreshold": whole(1)})
    # A probe that is stricter restarts pods that are only busy.
    liveness = closed({"periodSeconds": whole(5), "timeoutSeconds": whole(5), "failureThreshold": whole(3)})
    own: Schema = (
        {"apiKeys": closed({"existingSecret": NAME, "key": {"type": "string", "minLength": 1}}),
         "service": closed({"type": choice("ClusterIP", "NodePort", "LoadBalancer"), "port": PORTS["items"],
                            "annotations": LABELS})}
        if tier == "gateway"
        else {"enabled": FLAG, "gpu": closed({"count": whole(0, 64), "resource": TEXT}), "sharedMemory": QUANTITY}
    )  # fmt: skip
    return closed(
        {
            **own,
            "replicas": whole(0),
            "image": image_schema(),
            "settings": settings_schema(SERVICES[tier]),
            "extraEnv": ANY_OBJECTS,
            "extraVolumes": ANY_OBJECTS,
            "extraVolumeMounts": ANY_OBJECTS,
            "preStopSeconds": whole(0, 300),
            "drainSeconds": whole(1, 7200),
            "loadSeconds": whole(5, 36_000),
            "resources": ANY_OBJECT,
            "strategy": closed({"maxSurge": count, "maxUnavailable": count}),
            "pdb": closed({"enabled": FLAG, "maxUnavailable": count}),
            "topologySpread": FLAG,
            "podAnnotations": LABELS,
            "podLabels": LABELS,
            **placement_schema(),
            "runtimeClassName": NAME,
            "serviceAccount": closed({"create": FLAG, "name": NAME, "annotations": LABELS}),
            "liveness": liveness,
            "readiness": probe,
        }
    )


def image_schema() -> Schema:
    """A tier's image."""
    digest = {"type": "string", "pattern": "^$|^sha256:[0-9a-f]{64}$"}
    return closed({"repository": {"type": "string", "minLength": 1}, "tag": TEXT, "digest": digest})


def placement_schema() -> Schema:
    """Where pods may run."""
    return {"nodeSelector": LABELS, "tolerations": ANY_OBJECTS, "affinity": ANY_OBJECT, "priorityClassName": NAME}


def model_schema() -> Schema:
    """Where the checkpoint is."""
    pull = choice("Always", "IfNotPresent", "Never")
    hub = {
        "id": TEXT, "revision": TEXT, "existingClaim": NAME, "cacheSize": QUANTITY, "tokenSecret": NAME,
        "tokenKey": TEXT, "endpoint": TEXT,
    }  # fmt: skip
    return closed(
        {
            "name": TEXT,
            "source": choice("hub", "pvc", "hostPath", "image", "bundled"),
            "hub": closed(hub),
            "pvc": closed({"claimName": NAME, "path": TEXT}),
            "hostPath": closed({"path": {"type": "string", "pattern": "^$|^/"}}),
            "image": closed({"reference": TEXT, "pullPolicy": pull, "path": TEXT}),
            "bundled": closed({"path": {"type": "string", "pattern": "^/"}}),
        }
    )


def autoscaling_schema() -> Schema:
    """Who changes the replicas, and between which bounds."""
    bounds = {"enabled": FLAG, "min": whole(0), "max": whole(1)}
    builtin = {
        "replicas": whole(1, 5), "intervalSeconds": whole(1, 60), "dryRun": FLAG, "deletionCost": FLAG,
        "resources": ANY_OBJECT,
    }  # fmt: skip
    keda = {"trigger": choice("metrics-api", "prometheus"), "prometheusAddress": TEXT, "pollingSeconds": whole(1, 300)}
    return closed(
        {
            "mode": choice("none", "hpa", "keda", "builtin"),
            # A shorter window lets a tier flap while new pods load.
            "windowSeconds": whole(120, 3600),
            "encoder": closed(bounds),
            # Only encoders may go to zero: text and cached pictures need none.
            "decoder": closed({**bounds, "min": whole(1)}),
            "gateway": closed({**bounds, "min": whole(1), "cpuUtilization": whole(1, 100)}),
            "hpa": closed({"metric": TEXT, "selector": LABELS}),
            "keda": closed(keda),
            "builtin": closed(builtin),
        }
    )


def monitoring_schema() -> Schema:
    """Objects for Prometheus and Grafana."""
    monitor = closed({"enabled": FLAG, "intervalSeconds": whole(1), "labels": LABELS})
    return closed(
        {
            "podMonitor": monitor,
            "serviceMonitor": monitor,
            "rules": closed({"enabled": FLAG, "labels": LABELS}),
            "dashboards": closed({"enabled": FLAG, "labels": LABELS, "annotations": LABELS}),
        }
    )


def network_schema() -> Schema:
    """NetworkPolicies and the two ways in."""
    policy = {
        "enabled": FLAG, "gatewayFrom": ANY_OBJECTS, "metricsFrom": ANY_OBJECTS, "apiServerCidrs": TEXTS,
        "apiServerPorts": PORTS, "mediaCidrs": TEXTS, "mediaExceptCidrs": TEXTS, "mediaPorts": PORTS,
        "extraEgress": ANY_OBJECTS,
    }  # fmt: skip
    ingress = {
        "enabled": FLAG, "className": TEXT, "host": {"type": "string", "minLength": 1}, "path": TEXT, "tlsSecret": NAME,
        "timeoutSeconds": whole(1), "maxBodyMegabytes": whole(1), "annotations": LABELS,
    }  # fmt: skip
    route = {
        "enabled": FLAG, "parentRefs": ANY_OBJECTS, "hostnames": TEXTS, "timeoutSeconds": whole(1, 99_999),
        "annotations": LABELS,
    }  # fmt: skip
    return {"networkPolicy": closed(policy), "ingress": closed(ingress), "httpRoute": closed(route)}


def values_schema() -> Schema:
    """The whole file."""
    discovery = {
        "mode": choice("kubernetes", "dns"), "relistSeconds": whole(60, 300), "extraEncoders": TEXTS,
        "extraDecoders": TEXTS,
    }  # fmt: skip
    valkey = {
        "enabled": FLAG, "image": image_schema(), "maxmemory": {"type": "string", "pattern": "^[0-9]+(kb|mb|gb)?$"},
        "existingSecret": NAME, "passwordKey": TEXT, "resources": ANY_OBJECT, **placement_schema(),
    }  # fmt: skip
    image = {
        "registry": TEXT, "tag": TEXT, "pullPolicy": choice("Always", "IfNotPresent", "Never"),
        "pullSecrets": {"type": "array", "items": NAME},
    }  # fmt: skip
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the tandem chart",
        **closed(
            {
                "nameOverride": NAME,
                "fullnameOverride": NAME,
                "commonLabels": LABELS,
                "image": closed(image),
                "model": model_schema(),
                "curve": closed({"existingSecret": NAME, "key": {"type": "string", "minLength": 1}, "insecure": FLAG}),
                "logs": closed(
                    {"level": choice("debug", "info", "warning", "error"), "format": choice("text", "json")}
                ),
                "ipFamily": choice("IPv4", "IPv6"),
                "discovery": closed(discovery),
                **{tier: tier_schema(tier) for tier in SERVICES},
                "valkey": closed(valkey),
                "redis": closed({"url": TEXT, "existingSecret": NAME, "urlKey": TEXT}),
                "autoscaling": autoscaling_schema(),
                **network_schema(),
                "monitoring": monitoring_schema(),
                # Helm's own, for a chart that is part of another.
                "global": ANY_OBJECT,
            }
        ),
    }


def schema_text() -> str:
    """The file's content."""
    return json.dumps(values_schema(), indent=1, ensure_ascii=False) + "\n"


def main() -> None:
    """Write the file."""
    SCHEMA_FILE.write_text(schema_text())


if __name__ == "__main__":
    main()
