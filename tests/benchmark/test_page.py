"""The HTML report: one file without network access; in a browser it loads, shows and sorts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from setup_benchmark import small

from fusionzoo.benchmark.api import run

ARTEFACTS = Path(__file__).parents[2] / "build" / "artefacts"
CHROMIUM = shutil.which("chromium")
PROBE = """
<script>
window.addEventListener("load", () => {
  const table = document.querySelector("#leaderboard");
  const column = (n) => [...table.tBodies[0].rows].map((row) => row.cells[n].textContent.trim());
  const buttons = [...table.tHead.querySelectorAll("button")];
  const found = {errors: window.broken, before: column(2)};
  buttons[2].click(); found.down = column(2); found.sort = buttons[2].parentNode.ariaSort;
  buttons[2].click(); found.up = column(2);
  buttons[0].click(); found.names = column(0);
  found.wide = document.documentElement.scrollWidth - window.innerWidth;
  found.pictures = document.querySelectorAll("svg").length;
  const out = document.createElement("pre");
  out.id = "probe"; out.textContent = JSON.stringify(found); document.body.append(out);
});
</script>
"""
CATCH = """<script>
window.broken = []; window.addEventListener("error", (e) => window.broken.push(e.message));
</script>"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FUSIONZOO_CACHE", str(out / "cache"))
        assert not run(small(out, fusions="sum,gmu,max,late_mean,mbt")).failed
    return out / "index.html"


def test_the_page_is_one_file_that_loads_no_other(page: Path) -> None:
    text = page.read_text()
    outside = [x for x in re.findall(r'(?:src|href)="([^"]+)"', text) if not x.startswith("data:")]
    beside = {"results.parquet", "summary.json", "table.md", "table.tex", "config.yaml"}
    assert set(outside) - beside <= {x for x in outside if x.startswith("#")}
    assert all((page.parent / name).is_file() for name in beside)
    assert "@import" not in text
    assert "url(http" not in text


def test_every_plot_is_explained_and_links_its_figures(page: Path) -> None:
    text = page.read_text()
    sections = re.split(r"<h2>", text)[1:]
    for section in sections:
        if "<svg" in section:
            assert "How to read it" in section
            assert "data:text/csv;base64," in section
    assert text.count("<svg") == 6
    assert text.index('id="verdict"') < text.index("<table")


def test_names_are_shown_as_code_and_each_strategy_has_its_calibration(page: Path) -> None:
    text = page.read_text()
    assert "`" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    verdict = re.search(r'id="verdict">(.*?)</p>', text)
    assert verdict and "<code>" in verdict[1]
    assert "ECE if calibrated" in text
    summary = json.loads((page.parent / "summary.json").read_text())
    for line in summary["leaderboard"]:
        assert line["ece"] >= line["ece_debiased"] >= 0
        noise = line["ece"] <= line["ece_limit"] + 1e-9
        expected = "cannot be told from calibrated" if noise else "not calibrated"
        assert line["calibration"] == expected
    table = (page.parent / "table.md").read_text()
    assert "cannot be told from calibrated" in table
    assert summary["verdict"] in table and "`" in summary["verdict"]


def chromium(page: Path, *flags: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
    command += [f"--user-data-dir={page.parent / 'profile'}", *flags, page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Debian's chromium")
@pytest.mark.parametrize("width", [390, 1100])
def test_a_browser_shows_and_sorts_it(page: Path, width: int) -> None:
    probed = page.with_name(f"probed-{width}.html")
    text = (
        page.read_text().replace("<head>", f"<head>{CATCH}").replace("</body>", f"{PROBE}</body>")
    )
    probed.write_text(text)
    dom = chromium(probed, "--dump-dom", f"--window-size={width},900")
    found = json.loads(re.search(r'<pre id="probe">(.*?)</pre>', dom, re.DOTALL)[1])  # type: ignore[index]
    assert found["errors"] == []
    assert found["pictures"] == 6
    assert found["down"] == sorted(found["before"], reverse=True)
    assert found["up"] == sorted(found["before"])
    assert found["sort"] == "descending"
    assert found["names"] == sorted(found["names"], key=str.lower, reverse=True)
    assert found["wide"] <= 0, "the page itself must not scroll sideways"
    ARTEFACTS.mkdir(parents=True, exist_ok=True)
    picture = ARTEFACTS / f"report-{width}.png"
    chromium(page, f"--screenshot={picture}", f"--window-size={width},5000")
    assert picture.stat().st_size > 20_000
