"""The site builds strictly, has a page for each fusion, no dead link, and asks no other host."""

from __future__ import annotations

import gzip
import re
import shutil
import subprocess
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from fusionzoo.fusion import fusion_info, list_fusions

pytestmark = pytest.mark.needs("zensical")
ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
HEAVIEST = 300_000  # bytes of the front page as a server sends it: text compressed, pictures as is
FETCHED = {  # what a browser loads without a click
    **dict.fromkeys(("img", "script", "iframe", "source", "audio", "video", "embed"), "src"),
    "link": "href",
}
TEXT = {".html", ".css", ".js", ".svg", ".json"}


class Page(HTMLParser):
    """Collect what a page loads, where it leads to, and its anchors."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        self.anchors |= {values[name] for name in ("id", "name") if name in values}
        leads = tag == "a" or (tag == "link" and values.get("rel") not in {"stylesheet", "icon"})
        if leads and "href" in values:
            self.links.append(values["href"])
        elif tag in FETCHED and FETCHED[tag] in values:
            self.loads.append(values[FETCHED[tag]])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site as `make site` does, in a folder of its own."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "mkdocs.yml").write_text((ROOT / "mkdocs.yml").read_text())
    (folder / "fusionzoo").symlink_to(ROOT / "fusionzoo")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(DOCS)
        return import_module("website").build(folder)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Page]:
    return {path: Page(path) for path in sorted(site.rglob("*.html"))}


def local(page: Path, link: str, site: Path) -> tuple[Path, str]:
    """Return the file and the anchor that a link leads to."""
    parts = urlsplit(link)
    path = unquote(parts.path)
    target = (page.parent / path).resolve() if path else page
    if path.startswith("/"):
        target = site / path.lstrip("/")
    return target / "index.html" if target.is_dir() else target, unquote(parts.fragment)


@pytest.mark.slow
def test_every_fusion_has_a_page_with_its_settings_and_figures(site: Path) -> None:
    for name in list_fusions():
        text = (site / "docs" / "zoo" / fusion_info(name).family / f"{name}.html").read_text()
        for heading in ("when-to-use-it", "shapes", "settings", "measured"):
            assert f'id="{heading}"' in text, name
        assert "multiply-accumulates of a sample" in text


@pytest.mark.slow
def test_every_link_of_the_site_leads_to_a_page_and_an_anchor(
    site: Path, pages: dict[Path, Page]
) -> None:
    dead = []
    for path, page in pages.items():
        for link in [*page.links, *page.loads]:
            if urlsplit(link).scheme:
                continue
            target, anchor = local(path, link, site)
            if not target.is_file() or (
                anchor and target in pages and anchor not in {*pages[target].anchors, "__comments"}
            ):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []
    assert len(pages) > 100


@pytest.mark.slow
def test_the_list_for_language_models_leads_to_pages(site: Path) -> None:
    links = re.findall(r"\]\((.*?)\)", (site / "llms.txt").read_text())
    assert "SKILL.html" in links
    assert [link for link in links if not (site / link).is_file()] == []


@pytest.mark.slow
def test_no_page_loads_anything_from_another_host(site: Path, pages: dict[Path, Page]) -> None:
    for path, page in pages.items():
        foreign = [x for x in page.loads if re.match(r"(https?:)?//", x)]
        assert foreign == [], path
    for style in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*['\"]?(?:https?:)?//", style.read_text()) == []


@pytest.mark.slow
def test_the_front_page_is_light(site: Path, pages: dict[Path, Page]) -> None:
    front = site / "index.html"
    files = {front, *(local(front, link, site)[0] for link in pages[front].loads)}
    weight = sum(map(sent, files))
    assert len(files) > 4
    assert weight < HEAVIEST, sorted((sent(file), file.name) for file in files)


def sent(file: Path) -> int:
    """Return the bytes that a server sends for a file."""
    content = file.read_bytes()
    return len(gzip.compress(content, 6)) if file.suffix in TEXT else len(content)


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="needs chromium")
def test_search_finds_a_fusion_on_pages_opened_from_files(site: Path, tmp_path: Path) -> None:
    page = site / "searched.html"  # the front page, where something is typed into the search
    typed = """<script>addEventListener("load", () => setTimeout(() => {
      document.querySelector(".md-search__button").click();
      setTimeout(() => {
        const roots = [...document.querySelectorAll("*")].map((x) => x.shadowRoot);
        const root = roots.find((x) => x?.querySelector("input"));
        root.querySelector("input").value = "embracenet";
        root.querySelector("input").dispatchEvent(new Event("input", { bubbles: true }));
        setTimeout(() => {
          document.body.dataset.found = root.innerHTML.includes("early/embracenet.html");
        }, 3000);
      }, 3000);
    }, 1000))</script>"""
    page.write_text((site / "index.html").read_text().replace("</body>", f"{typed}</body>"))
    options = ["--headless=new", "--no-sandbox", f"--user-data-dir={tmp_path}", "--dump-dom"]
    command = ["chromium", *options, "--virtual-time-budget=20000", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    page.unlink()
    assert 'data-found="true"' in done.stdout


def test_the_menu_names_every_page_of_the_docs() -> None:
    menu = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    named = set(leaves(menu))
    written = {path.relative_to(ROOT).as_posix() for path in DOCS.glob("*.md")}
    assert written <= named
    assert len(named) == len([*leaves(menu)])


def leaves(menu: object) -> Iterator[str]:
    """Yield the pages of a menu."""
    if isinstance(menu, str):
        yield menu
    elif isinstance(menu, dict):
        for part in menu.values():
            yield from leaves(part)
    elif isinstance(menu, list):
        for part in menu:
            yield from leaves(part)
