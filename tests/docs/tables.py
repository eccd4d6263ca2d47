"""The tables of `docs/` that repeat what the code says: `python -m tests.docs.tables` writes them anew.

Owns their layout and their places: between `<!-- begin NAME -->` and `<!-- end NAME -->`. A test compares each with the
code, so a setting, a metric, a message or an error that changes changes its line here, or the build fails.
"""

import ast
import dataclasses
import importlib
import inspect
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import inspect as shape
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from common import messages
from common.errors import ERROR_TABLE
from common.settings import CommonSettings
from decoder_svc.config import DecoderSettings
from deploy.autoscaler.config import AutoscalerSettings
from deploy.local import UpSettings
from encoder_svc.config import EncoderSettings
from gateway_svc.config import GatewaySettings
from gateway_svc.http.metrics import HttpMetrics
from tests.paths import REPOSITORY

DOCS = REPOSITORY / "docs"
PACKAGES = {
    "common": "Every service (the cache's metrics only with Redis)",
    "gateway_svc": "Gateway",
    "encoder_svc": "Encoder",
    "decoder_svc": "Decoder",
    "deploy": "Autoscaler",
}
# Compiled code that is called through ctypes: no modules of Python's.
COMPILED = ("decoder_svc.model._kernels", "encoder_svc.model._amx")
# Defaults that depend on the machine, in words.
DEFAULTS_IN_WORDS = {"model": "the demo model", "data_dir": "`.tandem`"}


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [header, tuple("---" for _ in header), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in line) + " |" for line in lines
    )


# Settings


def settings_table(cls: type[Any], without: type[Any] | None = None) -> str:
    """Flag, default and meaning of each field of a settings class, without those of a base."""
    texts = field_texts(cls)
    inherited = {field.name for field in dataclasses.fields(without)} if without is not None else set()
    fields = [field for field in dataclasses.fields(cls) if field.name not in inherited]
    rows = [(f"`--{f.name.replace('_', '-')}`", _default(f), " ".join(texts[f.name].split())) for f in fields]
    return table(("Flag", "Default", "Meaning"), rows)


def field_texts(cls: type[Any]) -> dict[str, str]:
    """The string under each field, over all bases."""
    texts: dict[str, str] = {}
    for base in reversed([c for c in cls.__mro__ if dataclasses.is_dataclass(c)]):
        body = next(n for n in ast.walk(ast.parse(inspect.getsource(base))) if isinstance(n, ast.ClassDef)).body
        for node, following in itertools.pairwise(body):
            is_text = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and is_text:
                texts[node.target.id] = following.value.value  # type: ignore[attr-defined]
    return texts


def _default(field: "dataclasses.Field[Any]") -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    if field.name in DEFAULTS_IN_WORDS:
        return DEFAULTS_IN_WORDS[field.name]
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is None or value in ((), {}):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and field.name.endswith("_bytes") and value >= 1 << 20:
        return f"{value >> 20} MiB" if value < 1 << 30 else f"{value >> 30} GiB"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


# Metrics


def metrics_tables() -> str:
    """All metrics that the code registers, by package."""
    parts = []
    for package, title in PACKAGES.items():
        rows = sorted({_metric_row(metric) for metric in metrics_of(package)})
        parts.append(f"**{title}**\n\n{table(('Metric', 'Type', 'Labels', 'Meaning'), rows)}")
    return "\n\n".join(parts)


def metrics_of(package: str) -> Iterator[MetricWrapperBase]:
    if package == "gateway_svc":
        yield from (m for m in vars(HttpMetrics(CollectorRegistry())).values() if isinstance(m, MetricWrapperBase))
    for module in _modules(package):
        for value in vars(module).values():
            # A metric is a constant of the module that measures it; one that was imported is another's.
            if isinstance(value, MetricWrapperBase) and _is_made_in(module, value):
                yield value


def _modules(package: str) -> Iterator[Any]:
    root = importlib.import_module(package)
    for info in pkgutil.walk_packages(root.__path__, f"{package}."):
        if info.name not in COMPILED:
            yield importlib.import_module(info.name)


def _is_made_in(module: Any, metric: MetricWrapperBase) -> bool:
    return f'"{_metric_name(metric)}"' in inspect.getsource(module)


def _metric_name(metric: MetricWrapperBase) -> str:
    family = next(iter(metric.describe()))
    return family.name + ("_total" if family.type == "counter" else "")


def _metric_row(metric: MetricWrapperBase) -> tuple[str, ...]:
    family = next(iter(metric.describe()))
    labels = ", ".join(f"`{name}`" for name in metric._labelnames)
    return f"`{_metric_name(metric)}`", family.type, labels, family.documentation.rstrip(".")


# Messages


def messages_tables() -> str:
    """All messages and the structs inside them, with their fields and bounds, in the order of the module."""
    structs = [
        cls
        for cls in vars(messages).values()
        if isinstance(cls, type)
        and issubclass(cls, msgspec.Struct)
        and cls.__module__ == messages.__name__
        and cls is not messages.Message
    ]
    return "\n\n".join(_message_table(cls) for cls in structs)


def _message_table(cls: type[msgspec.Struct]) -> str:
    info = shape.type_info(cls)
    assert isinstance(info, shape.StructType)
    is_message = issubclass(cls, messages.Message)
    rows = [(f"`{f.encode_name}`", _in_words(f.type), _default_of(f)) for f in info.fields]
    if not rows:
        raise ValueError(f"{cls.__name__} has no fields")
    title = f"#### `{cls.__name__}`" + ("" if is_message else " (inside others)")
    layout = "\n\nOn the wire an array, in this order." if info.array_like else ""
    fields = table(("Field", "Type and bounds", "Default"), rows)
    return f"{title}\n\n{inspect.cleandoc(cls.__doc__ or '')}{layout}\n\n{fields}"


def _default_of(field: shape.Field) -> str:
    if field.required:
        return "required"
    if field.default_factory is not msgspec.NODEFAULT:
        return f"`{field.default_factory()!r}`"
    if isinstance(field.default, msgspec.Struct):
        return "all defaults"
    return "null" if field.default is None else f"`{str(field.default).lower()}`"


def _in_words(kind: shape.Type) -> str:
    """A type and its bounds as a reader says them."""
    match kind:
        case shape.BoolType():
            return "true or false"
        case shape.NoneType():
            return "null"
        case shape.IntType():
            return "integer" + _range(kind)
        case shape.FloatType():
            return "number" + _range(kind)
        case shape.StrType():
            return _text_in_words(kind)
        case shape.LiteralType():
            return ", ".join(f"`{value}`" for value in kind.values)
        case shape.ListType():
            return f"list of {_in_words(kind.item_type)}{_lengths(kind)}"
        case shape.DictType():
            return f"map of {_in_words(kind.key_type)} to {_in_words(kind.value_type)}{_lengths(kind)}"
        case shape.TupleType():
            items = [_in_words(item) for item in kind.item_types]
            is_uniform = len(set(items)) == 1
            return f"array of {len(items)}: {items[0] if is_uniform else ', then '.join(items)}"
        case shape.StructType():
            return f"`{kind.cls.__name__}`"
        case shape.UnionType():
            return " or ".join(_in_words(t) for t in sorted(kind.types, key=lambda t: isinstance(t, shape.NoneType)))
    raise ValueError(f"no words for {kind}")


def _text_in_words(kind: shape.StrType) -> str:
    if kind.pattern is not None:
        return f"text matching `{kind.pattern}`"
    if kind.min_length is not None:
        return f"text of {kind.min_length} to {kind.max_length} characters"
    return f"text of at most {_number(kind.max_length)} characters" if kind.max_length is not None else "text"


def _range(kind: shape.IntType | shape.FloatType) -> str:
    low = (
        f"from {_number(kind.ge)}"
        if kind.ge is not None
        else f"above {_number(kind.gt)}"
        if kind.gt is not None
        else ""
    )
    high = (
        f"to {_number(kind.le)}" if kind.le is not None else f"below {_number(kind.lt)}" if kind.lt is not None else ""
    )
    return "".join(f" {bound}" for bound in (low, high) if bound)


def _lengths(kind: shape.ListType | shape.DictType) -> str:
    low = f", at least {kind.min_length}" if kind.min_length else ""
    return f"{low}, at most {_number(kind.max_length)} of them" if kind.max_length is not None else low


def _number(value: float | None) -> str:
    assert value is not None
    for offset, suffix in ((0, ""), (1, " - 1")):
        whole = abs(int(value)) + offset
        if value == int(value) and whole >= 1 << 16 and whole & (whole - 1) == 0 and not (value < 0 and offset):
            return f"{'-' if value < 0 else ''}2^{whole.bit_length() - 1}{suffix}"
    return f"{value:g}" if isinstance(value, float) else str(value)


# Errors


def errors_table() -> str:
    """Wire code, HTTP status and retryability of each error."""
    rows = [
        (
            f"`{info.code}`",
            str(info.http_status),
            f"`{info.openai_type}`",
            "yes" if info.is_retryable else "no",
            inspect.cleandoc(cls.__doc__ or "").partition("\n")[0],
        )
        for cls, info in ERROR_TABLE.items()
    ]
    return table(("`code`", "Status", "`type`", "Another try may help", "Meaning"), rows)


SECTIONS: dict[str, dict[str, Callable[[], str]]] = {
    "operations.md": {
        "settings of all services": lambda: settings_table(CommonSettings),
        "settings of the gateway": lambda: settings_table(GatewaySettings, CommonSettings),
        "settings of the encoder": lambda: settings_table(EncoderSettings, CommonSettings),
        "settings of the decoder": lambda: settings_table(DecoderSettings, CommonSettings),
        "settings of the autoscaler": lambda: settings_table(AutoscalerSettings),
        "settings of tandem up": lambda: settings_table(UpSettings),
        "metrics": metrics_tables,
    },
    "wire.md": {"messages": messages_tables},
    "api.md": {"errors": errors_table},
}


def section_pattern(name: str) -> re.Pattern[str]:
    """Matches a section with its markers; group 1 is what stands between them."""
    return re.compile(rf"<!-- begin {re.escape(name)} -->\n\n(.*?)\n\n<!-- end {re.escape(name)} -->", re.DOTALL)


def main() -> None:
    """Write every section."""
    for file, sections in SECTIONS.items():
        path: Path = DOCS / file
        text = path.read_text()
        for name, render in sections.items():
            content = f"<!-- begin {name} -->\n\n{render()}\n\n<!-- end {name} -->"
            text, count = section_pattern(name).subn(lambda _, content=content: content, text)
            if count != 1:
                raise SystemExit(f"{file} has {count} sections named {name!r}, expected one")
        path.write_text(text)
    # The chart's values name every setting too; imported here, since that module takes the texts from this one.
    importlib.import_module("tests.deploy.helm.values_schema").main()


if __name__ == "__main__":
    main()
