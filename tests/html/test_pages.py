"""Every page is one file that loads no other, and its policy forbids it to."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import fusionzoo as fz
from fusionzoo.benchmark.report.combine import combine
from fusionzoo.benchmark.report.page import page
from fusionzoo.benchmark.report.verdict import figures
from fusionzoo.cli import main
from fusionzoo.html.template import template
from helpers.planted import candidate, summary

PageOf = Callable[[str], Path]
CHROMIUM = shutil.which("chromium")
DATA: dict[str, Any] = {"name": "interactions", "samples": 100}
USE: dict[str, Any] = {"num_workers": 0, "device": "cpu"}
BESIDE = {"results.parquet", "summary.json", "table.md", "table.tex", "config.yaml"}
SCRIPTS = {"benchmark": True, "combined": True}
SCRIPTS |= dict.fromkeys(("audit", "sheet", "search", "explanations", "run"), False)
POLICY = {
    "default-src": "'none'",
    "img-src": "data:",
    "media-src": "data:",
    "style-src": "'unsafe-inline'",
    "base-uri": "'none'",
    "form-action": "'none'",
}


@pytest.fixture(scope="module")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PageOf]:
    """Write each kind of page once."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSIONZOO_CACHE", str(folder / "cache"))
        yield cache(lambda name: write(name, folder))


def write(name: str, folder: Path) -> Path:
    """Write a page of this kind."""
    out = folder / f"{name}.html"
    match name:
        case "benchmark":
            fusions = [candidate("gmu", [0.8, 0.81]), candidate("sum", [0.7, 0.71], 30)]
            whole = summary([*fusions, candidate("alone:image", [0.5, 0.51], 9)])
            out.write_text(page(whole, figures(whole)))
        case "combined":
            combine([stored_report(folder, data) for data in "ab"], folder / "both")
            out = folder / "both" / "index.html"
        case "audit":
            main(["data", "check", "digits", "--data.samples", "50", "--html", str(out)])
        case "sheet":
            assert main(["data", "show", "digits", "--n", "10", "--out", str(out)]) == 0
        case "search":
            file = fz.read_embeddings(embedded(folder))
            fz.search(embedded(folder), id=file.ids[0]).to_html(out)
        case "explanations":
            fz.explain(trained(folder), **USE).to_html(out)
        case "run":
            fz.report(trained(folder), out, **USE)
    return out


@cache
def trained(folder: Path) -> Path:
    return fz.train(DATA, **USE, epochs=1, log="none", out=folder / "run").folder


@cache
def embedded(folder: Path) -> Path:
    return fz.embed(trained(folder), DATA, **USE, split="all", out=folder / "emb.parquet")


def stored_report(folder: Path, data: str) -> str:
    """Write the figures of a report that `combine` reads."""
    scores = {"sum": 0.5, "gmu": 0.7, "max": 0.6}
    lines = [{"candidate": n, "kind": "fusion", "score": x} for n, x in scores.items()]
    report = {"metric": "accuracy", "data": {"name": data}, "leaderboard": lines}
    (folder / data).mkdir()
    (folder / data / "summary.json").write_text(json.dumps(report))
    return str(folder / data)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_page_is_one_file_whose_policy_lets_it_load_no_other(name: str, page_of: PageOf) -> None:
    text = page_of(name).read_text(encoding="utf-8")
    (policy,) = re.findall(r'<meta http-equiv="Content-Security-Policy" content="([^"]+)">', text)
    scripts = {"script-src": "'unsafe-inline'" if SCRIPTS[name] else "'none'"}
    assert dict(part.split(" ", 1) for part in policy.split("; ")) == POLICY | scripts
    assert text.index(policy) < text.index("<style>")  # it holds for what follows it
    assert text.count("<head>") == text.count("</style>") == 1
    assert ("<script" in text) == SCRIPTS[name]
    links = re.findall(r"""(?:src|href)=["']([^"']*)""", text)
    assert {x for x in links if not x.startswith(("data:", "#"))} - BESIDE == set()
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert not re.search(r"<[^>]*\son\w+=", text)


def test_signs_that_turn_the_direction_of_a_name_are_left_out() -> None:
    pages = template("base.html", "fusionzoo.html").environment
    page = pages.from_string("{{ name }} {{ 95 }}% {{ name | breakable }} {{ '\u05d0' }}")
    assert page.render(name="\u202ea_b\u2066") == "a_b 95% a_<wbr>b \u05d0"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_browser_refuses_nothing_of_a_page(name: str, page_of: PageOf, tmp_path: Path) -> None:
    """What the policy refuses, and what a script throws, is in the browser's console."""
    assert CHROMIUM is not None
    text = page_of(name).read_text().replace('preload="none"', 'preload="auto"')
    texts = {"as it is": text, "without styles": text.replace("style-src 'unsafe-inline'", "")}
    said = {}
    for case, shown in texts.items():
        (tmp_path / "page.html").write_text(shown)
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic"]
        flags += ["--no-first-run", "--disable-background-networking", "--disable-sync"]
        flags += ["--disable-component-update", f"--user-data-dir={tmp_path / 'profile'}"]
        flags += ["--enable-logging=stderr", "--dump-dom", (tmp_path / "page.html").as_uri()]
        command = [CHROMIUM, *flags]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
        said[case] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert said["as it is"] == []
    assert "Applying inline style violates" in said["without styles"][0]
