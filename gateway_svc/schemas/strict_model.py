"""The bases of everything that clients send: types are taken strictly, and so are the names of fields.

Messages and their parts ignore fields that they do not know, as OpenAI does there: clients send back what other servers
answered, with whatever those added. Everything else refuses them by name, as OpenAI does too, since a wish that is
misspelt or not served would be left aside in silence. Null asks for nothing and is welcome under any name. Pure.
"""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, ValidationInfo, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from common.errors import InvalidRequest
from gateway_svc.schemas.plain_json import check_plain

UnknownFields = Literal["refuse", "ignore"]
REFUSED_FIELD = "refused_field"
"""The type of a validation error whose context names a `field` of its place, and `near` or `remedy`."""
IGNORE_UNKNOWN: Mapping[str, bool] = {"ignores_unknown": True}
"""The context of a validation that leaves fields aside which a body's own model does not know."""
_MAX_COMPARED = 64  # characters of a name that is compared with others


class StrictModel(BaseModel):
    """A part of a body that may have further fields, which are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class NotServed(NamedTuple):
    """A field that is refused when it asks for something: its values that do not, and what to do instead."""

    harmless: tuple[object, ...] = ()
    remedy: str = "leave it out"

    def asks(self, value: object) -> bool:
        """Whether a value asks for something. 1 and 1.0 are the same, 1 and true are not."""
        return value is not None and all(
            value != other or isinstance(value, bool) is not isinstance(other, bool) for other in self.harmless
        )


NotServedFields = Mapping[str, NotServed]


class ClosedModel(StrictModel):
    """A part of a body that has the fields of its model and no others."""

    model_config = ConfigDict(extra="forbid")  # so that the documentation says it; see `_keep_known`
    not_served: ClassVar[NotServedFields] = {}
    _known: ClassVar[frozenset[str]] = frozenset()

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        cls._known = frozenset(field.alias or name for name, field in cls.model_fields.items())

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """With the values that fields which are not served may have."""
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).setdefault("properties", {})
        for name, not_served in cls.not_served.items():
            if not_served.harmless:
                properties[name] = {"enum": [*not_served.harmless, None], "description": "Without effect."}
        return schema

    @model_validator(mode="before")
    @classmethod
    def _keep_known(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, dict) or value.keys() <= cls._known:
            return value
        return {name: item for name, item in value.items() if name in cls._known or cls._refused(name, item, info)}

    @classmethod
    def _refused(cls, name: str, value: object, info: ValidationInfo) -> bool:
        """False for a field that asks for nothing. Raises for others."""
        if (not_served := cls.not_served.get(name)) is not None:
            if not_served.asks(value):
                raise PydanticCustomError(
                    REFUSED_FIELD, "is not supported", {"field": name, "remedy": not_served.remedy}
                )
        elif value is not None and not cls._ignores(info):
            near = get_close_matches(name, cls._known, n=1, cutoff=0.75) if len(name) <= _MAX_COMPARED else []
            raise PydanticCustomError(REFUSED_FIELD, "is not known", {"field": name, "near": near[0] if near else None})
        return False

    @classmethod
    def _ignores(cls, info: ValidationInfo) -> bool:
        return False


class RequestBody(ClosedModel):
    """A whole body, checked before any object of it is made."""

    @classmethod
    def refuse_multitudes(cls, body: dict[str, Any]) -> None:
        """Refuse lists that are too long while they are still plain: an object of each item would cost far more."""

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, body: object) -> object:
        if isinstance(body, dict):
            cls.refuse_multitudes(body)
        check_plain(body)
        return body

    @classmethod
    def _ignores(cls, info: ValidationInfo) -> bool:
        return info.context is IGNORE_UNKNOWN


def check_count(value: object, limit: int, param: str) -> int:
    """The number of items of a list; anything else has none. Raises InvalidRequest for too many."""
    if not isinstance(value, list):
        return 0
    if len(value) > limit:
        raise InvalidRequest(f"{param} has {len(value)} items, above the limit of {limit}: send fewer", param=param)
    return len(value)
