"""The documentation holds together: what a page links to is there, and every design note stands in their list."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\(([^)\s#]+)(?:#[^)\s]*)?\)")
PAGES = [ROOT / "README.md", ROOT / "STYLE.md", *sorted((ROOT / "docs").rglob("*.md"))]


def broken(page: Path, text: str) -> list[str]:
    """The links of a page that lead to no file."""
    targets = [target for target in LINK.findall(text) if "://" not in target and not target.startswith("mailto:")]
    return [f"{page.relative_to(ROOT)}: {target}" for target in targets if not (page.parent / target).exists()]


def test_every_link_leads_to_a_file() -> None:
    assert len(PAGES) > 20
    assert [line for page in PAGES for line in broken(page, page.read_text())] == []


def test_a_link_to_nothing_is_found() -> None:
    page = ROOT / "docs/design/README.md"
    assert broken(page, "[a](0001-one-node-read-side.md#goals) [b](https://x/y) [c](nowhere.md)") == [
        "docs/design/README.md: nowhere.md"
    ]


def test_every_design_note_stands_in_the_list() -> None:
    folder = ROOT / "docs/design"
    listed = LINK.findall((folder / "README.md").read_text())
    assert [note.name for note in sorted(folder.glob("0*.md")) if note.name not in listed] == []
