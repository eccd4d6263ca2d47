"""What the documents name is there: links, files, flags, metrics, tests and settings files."""

import dataclasses
import re
import tomllib
from pathlib import Path

import pytest

from decoder_svc.config import DecoderSettings
from deploy.autoscaler.config import AutoscalerSettings
from deploy.local import UpSettings
from encoder_svc.config import EncoderSettings
from gateway_svc.config import GatewaySettings
from tests.docs.tables import DOCS, metrics_tables
from tests.paths import REPOSITORY

PAGES = [*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md"), *(REPOSITORY / "demo").glob("*.md")]
PACKAGES = ("common", "gateway_svc", "encoder_svc", "decoder_svc", "deploy", "tests", "demo")
SETTINGS = (GatewaySettings, EncoderSettings, DecoderSettings, AutoscalerSettings, UpSettings)
FLAGS_OF_COMMANDS = {"--config", "--help"}

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(REPOSITORY)))


def flag_names() -> set[str]:
    fields = {field.name for cls in SETTINGS for field in dataclasses.fields(cls)}
    return {f"--{name.replace('_', '-')}" for name in fields} | FLAGS_OF_COMMANDS


def anchors_of(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_pages() -> None:
    assert len(PAGES) >= 20


@each_page
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        linked = (page.parent / file).resolve() if file else page
        assert linked.exists(), target
        assert linked.is_relative_to(REPOSITORY), target
        assert not anchor or anchor in anchors_of(linked), target


@each_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    known = [path.relative_to(REPOSITORY).as_posix() for name in PACKAGES for path in (REPOSITORY / name).rglob("*.py")]
    for name in re.findall(r"`([\w/]+\.py)`", page.read_text()):
        assert any(path == name or path.endswith(f"/{name}") for path in known), name


@each_page
def test_every_flag_that_is_named_exists(page: Path) -> None:
    if page.is_relative_to(REPOSITORY / "demo"):
        pytest.skip("the demo's scripts have flags of their own")
    named = set(re.findall(r"`[^`\n]*?(--[a-z][a-z-]+)", page.read_text()))
    assert named <= flag_names()


@each_page
def test_every_metric_that_is_named_exists(page: Path) -> None:
    table = metrics_tables()
    assert [name for name in re.findall(r"`(tandem_[a-z_]+)`", page.read_text()) if f"`{name}`" not in table] == []


@each_page
def test_the_demo_examples_that_are_named_exist(page: Path) -> None:
    for name in re.findall(r"demo/examples/([\w.]+)", page.read_text()):
        assert (REPOSITORY / "demo" / "examples" / name).is_file()


def test_every_test_that_the_gpu_page_names_exists_and_nothing_is_claimed_without_a_date() -> None:
    rows = [line for line in (DOCS / "gpu.md").read_text().splitlines() if line.startswith("| ")][2:]
    assert len(rows) >= 8
    sources = "".join(path.read_text() for path in (REPOSITORY / "tests").rglob("test_*.py"))
    for row in rows:
        assert all(f"def {name}(" in sources for name in re.findall(r"`(test_\w+)`", row))
        assert re.search(r"\| (never|20\d\d-\d\d-\d\d[^|]*) \|$", row)


def test_the_settings_file_that_is_shown_holds_settings() -> None:
    block = re.search(r"```toml\n(.*?)```", (DOCS / "operations.md").read_text(), re.DOTALL)
    assert block is not None
    shown = tomllib.loads(block[1])
    own = shown.pop("up")
    for settings, given in ((GatewaySettings, shown), (UpSettings, own)):
        assert given
        assert {key.replace("-", "_") for key in given} <= {field.name for field in dataclasses.fields(settings)}


def test_decisions_are_numbered_without_a_gap_and_all_in_the_index() -> None:
    folder = DOCS / "decisions"
    pages = sorted(path.name for path in folder.glob("0*.md"))
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1))
    assert re.findall(r"\]\((0[^)]+)\)", (folder / "README.md").read_text()) == pages
    for name in pages:
        assert (folder / name).read_text().startswith(f"# {name[:4]}: ")
