"""The tables in `docs/` say what the code says."""

from dataclasses import dataclass
from typing import get_args

import pytest

from common.messages import AnyMessage
from tests.docs.tables import DOCS, SECTIONS, messages_tables, metrics_tables, section_pattern, settings_table
from tests.gateway_svc.fake_backend import harness

ALL_SECTIONS = [(file, name) for file, sections in SECTIONS.items() for name in sections]


@dataclass(frozen=True)
class WithoutText:
    """Settings of which one is not explained."""

    loud: int = 1
    """Explained."""

    silent: int = 2


@pytest.mark.parametrize(("file", "name"), ALL_SECTIONS)
def test_a_section_is_what_the_code_says(file: str, name: str) -> None:
    found = section_pattern(name).findall((DOCS / file).read_text())
    remedy = "run `python -m tests.docs.tables`"
    assert found == [SECTIONS[file][name]()], f"{file} is out of date in its section on {name}: {remedy}"


async def test_every_metric_that_a_gateway_shows_is_in_the_table() -> None:
    """From the other side: what is really exposed, however it was registered."""
    text = (await harness().client.get("/metrics")).text
    families = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE tandem_")}
    families = {name for name in families if not name.endswith("_created")}
    assert len(families) >= 7
    table = metrics_tables()
    assert [name for name in sorted(families) if f"`{name}`" not in table] == []


def test_a_setting_without_a_text_would_be_noticed() -> None:
    with pytest.raises(KeyError, match="silent"):
        settings_table(WithoutText)


def test_all_messages_of_the_protocol_are_in_the_table() -> None:
    table = messages_tables()
    assert [cls.__name__ for cls in get_args(AnyMessage) if f"#### `{cls.__name__}`\n" not in table] == []
