"""Build the site: `make site` writes its pages into build/pages and runs Zensical on mkdocs.yml.

The site mirrors the repository, so that its links stay as they are: README.md is the front page,
docs/, results/ and notebooks/ lie beside it. Only what a browser cannot show is changed: notebooks
and linked code become pages. Pages made for the site alone: one for each fusion, with figures from
results/; the API; a list of the results.
"""

from __future__ import annotations

import inspect
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make  # docs/make.py

import fusionzoo
from fusionzoo.fusion import fusion_info
from fusionzoo.zoo.cards import Card, count

ROOT = Path(__file__).parents[1]
SCRIPT = "search_from_files.js"
# The plugin `offline` asks this host for a script, which SCRIPT replaces.
FOREIGN = re.compile(r'<script src="https://unpkg.com/iframe-worker/shim"[^>]*></script>')
FRONT = "index.md"  # of the site: README.md
RESULTS = "results/index.md"
LLMS = "llms.txt"  # what the site has, for language models
CODE = {".py": "python", ".yaml": "yaml"}  # shown on a page of its own
LINK = re.compile(r"(\]\(|(?:src|href)=\")([^)\s\"]+)([)\"])")
VERBATIM = re.compile(r"(```.*?```|`[^`\n]*`)", flags=re.DOTALL)  # no link, no list
FORM = "Accuracies on xor and with modalities missing are of the form with {form}.\n\n"
MEASURED_FORMS = {  # what tables in results/ were measured with, where the default was another
    **dict.fromkeys(("tmc", "ecml", "dbf", "qmf", "pdf"), "`project: true`"),
    "mmdynamics": "`join: true` and `detach: true`",
    **dict.fromkeys(("lmf", "mlb", "mcb", "mfb", "mfh"), "`linear_skip: false`"),
}
FUSION = """\
# {name}

[The zoo](../../zoo.md) / [{family} fusion](../{family}.md)

{summary}

{equation}

- Paper: {paper}
- Source: [fusion/{family}/{name}.py](../../../fusion/{family}/{name}.py)
- Reads: {reads} features; synergy: {synergy}

## When to use it

- Use it when: {use_when}
- Pitfall: {pitfall}
- Missing modality: {missing}
{differs}
## Use it

```bash
fusionzoo train --fusion.name {name}
```

```python
import fusionzoo as fz

run = fz.train("digits", fusion="{name}", out="runs/{name}")
```

## Shapes

```text
{shapes}
```

## Settings

{settings}

`linear_skip` is an option of [every fusion](../../zoo.md#fusions), by default: {linear_skip}.

## Measured

{measured}

{form}How they were measured: [which](../../which.md), [benchmark](../../benchmark.md).
"""
API = """\
# Python API

After reading this page you know every name of `import fusionzoo as fz`, with its arguments.
Settings of training beside those named here are those of `train.py --help`, as keywords.
"""
SIGNATURES = """
::: {path}
    options:
      heading: {name}
      toc_label: {name}
"""
STRUCTURES = (
    *("fusionzoo.structures.Features", "fusionzoo.structures.FusionOutput"),
    *("fusionzoo.structures.Batch", "fusionzoo.fusion.base.Fusion"),
    *("fusionzoo.encoders.base.Encoder", "fusionzoo.model.fusion_model.FusionModel"),
)
TABLES = """\
# Results

Every figure in the docs comes from one of these tables; `make results` says which of them are older
than the code that they measure. [LOG.md](LOG.md) says what was tried, failures included.

## Benchmarks

{benchmarks}

## Tables

{tables}
"""


class Site:
    """The pages written so far; links decide which further files the site needs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.written: set[str] = set()  # paths in the site
        self.fusions = {card.name: card for card in make.fusion_cards()}

    def write(self, path: str, text: str) -> None:
        """Write one page, its links turned into those of the site; `path` is the page's own."""
        self.written.add(path)
        target = self.folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        parts = VERBATIM.split(text)
        for index in range(0, len(parts), 2):  # prose; the code between stays as it is
            parts[index] = LINK.sub(lambda match: self._link(path, match), parts[index])
        target.write_text(lists("".join(parts)))

    def _link(self, page: str, match: re.Match[str]) -> str:
        before, link, after = match.groups()
        path, _, heading = link.partition("#")
        if not path or re.match(r"[a-z]+:", link):
            return match[0]
        file = posixpath.normpath(posixpath.join(posixpath.dirname(page), path))
        target, heading = self._place(file, heading)
        relative = posixpath.relpath(target, posixpath.dirname(page) or ".")
        return f"{before}{relative}{f'#{heading}' if heading else ''}{after}"

    def _place(self, file: str, heading: str) -> tuple[str, str]:
        """Return the page of the site for a file of the repository; add it if it is none yet."""
        suffix = posixpath.splitext(file)[1]
        family = posixpath.splitext(posixpath.basename(file))[0]
        if file.startswith("docs/zoo/") and heading in self.fusions:
            return f"docs/zoo/{family}/{heading}.md", ""
        if file == "README.md":
            return FRONT, heading
        if (ROOT / file).is_dir():
            return RESULTS, ""
        if suffix == ".ipynb":
            return f"{file.removesuffix('.ipynb')}.md", ""
        if suffix in CODE:
            page = f"{file}.md"
            if page not in self.written:
                code = (ROOT / file).read_text()
                self.write(page, f"# {file}\n\n```{CODE[suffix]}\n{code}```\n")
            return page, ""
        if suffix != ".md":
            self.copy(file)
        return file, heading

    def copy(self, file: str) -> None:
        """Copy a file that a page shows or leads to, as it is."""
        target = self.folder / file
        if file not in self.written:
            self.written.add(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / file, target)


def lists(text: str) -> str:
    """Write lists as Python-Markdown reads them: a blank line before, four spaces a level.

    >>> print(lists("Two:\\n- a\\n  - b"))
    Two:
    <BLANKLINE>
    - a
        - b
    """
    lines: list[str] = []
    code = False
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        if line.lstrip().startswith("```"):
            code = not code
        item = re.match(r"( *)(?:[-*]|\d+\.) ", line)
        if item and not code:
            if before and not re.match(r" *(?:[-*]|\d+\.) | ", before):
                lines.append("")
            line = f"{item[1]}{line}"
        lines.append(line)
    return "\n".join(lines)


def fusion_page(card: Card) -> str:
    """Write the page of one fusion."""
    docstring = inspect.getdoc(fusion_info(card.name).cls) or ""
    shapes = re.search(r"^Shapes:?([^\n]*(?:\n(?: .*)?)*)", docstring, flags=re.MULTILINE)
    form = MEASURED_FORMS.get(card.name)
    equation, differs, difference = card.equation.partition("Differs from")
    return FUSION.format(
        name=card.name,
        family=card.family,
        summary=card.summary,
        equation=equation.strip(),
        paper=card.paper,
        reads=card.reads,
        synergy="yes" if card.synergy else "no",
        use_when=card.use_when,
        pitfall=card.pitfall,
        missing=card.missing,
        differs=f"\n**{differs}**{difference}\n" if differs else "",
        shapes=inspect.cleandoc(f"\n{shapes[1]}" if shapes else "those of every fusion"),
        settings=settings(card),
        linear_skip=card.settings["linear_skip"].default,
        form=FORM.format(form=form) if form else "",
        measured=measured(card),
    )


def settings(card: Card) -> str:
    """Return the table of a fusion's own settings."""
    rows = [
        f"| `{name}` | `{setting.default}` | {setting.meaning.replace('|', chr(92) + '|')} |"
        for name, setting in card.settings.items()
        if name != "linear_skip"
    ]
    return "\n".join(["| setting | default | meaning |", "| --- | --- | --- |", *rows])


def measured(card: Card) -> str:
    """Return what results/ has of a fusion: accuracy, missing modalities, cost."""
    lines = ["| | figure | from |", "| --- | --- | --- |"]
    for data, scores in make.accuracies().items():
        words = f"accuracy on `{data}` (best single modality {scores[make.CHOSEN_ALONE]:.3f})"
        lines.append(f"| {words} | {scores[card.name]:.3f} | {table('zoo')} |")
    lines += [
        f"| {label} | {row[column]} | {table(source)} |"
        for source, row, label, column in figures(card.name)
    ]
    lines.append(f"| parameters, standard case | {count(card.parameters)} | the module |")
    lines.append(f"| multiply-accumulates of a sample | {count(card.macs)} | the module |")
    return "\n".join(lines)


def figures(name: str) -> Iterator[tuple[str, dict[str, str], str, str]]:
    """Yield a fusion's figures: table, row, label, column."""
    for row in make.rows("interactions"):
        if row["fusion"] == name and row["task"] == "xor":
            yield "interactions", row, f"accuracy on xor of {row['modalities']}", "accuracy"
    for row in make.rows("missing"):
        if row["fusion"] == name:
            how = "complete samples" if row["training"] == "complete" else "`modality_dropout`"
            for column in ("complete", "incomplete"):
                yield "missing", row, f"accuracy on {column} samples, trained on {how}", column
    for row in make.rows("fusions"):
        if row["fusion"] == name and row["tokens_times"] == "1":
            label = "time of a training step, 1 = `concat_transformer`"
            yield "fusions", row, label, "ratio_to_concat_transformer"
            yield "fusions", row, "peak memory of a training step, MiB", "peak_MiB"


def table(name: str) -> str:
    """Link a table of results/ from a fusion's page."""
    return f"[{name}.csv](../../../results/{name}.csv)"


def api() -> str:
    """Write the page of the Python API, from the names that fusionzoo exports."""
    public = [getattr(fusionzoo, name) for name in fusionzoo.__all__ if name != "__version__"]
    names = {path_of(x): f"fz.{x.__name__.rpartition('.')[2]}" for x in public}
    inner = {path: path.removeprefix("fusionzoo.") for path in STRUCTURES}
    parts = [API, "\n## Functions and classes\n"]
    parts += [SIGNATURES.format(path=path, name=name) for path, name in names.items()]
    parts += ["\n## What a component reads and returns\n"]
    parts += [SIGNATURES.format(path=path, name=name) for path, name in inner.items()]
    return "".join(parts)


def path_of(value: Any) -> str:
    """Return where a public object is defined; `fusionzoo.benchmark` is a module and a function."""
    if inspect.ismodule(value):
        return f"{value.__name__}.api.{value.__name__.rpartition('.')[2]}"
    return f"{value.__module__}.{value.__qualname__}"


def report(page: Path) -> str:
    """Return a benchmark's report, with links only to files that the repository has."""

    def link(match: re.Match[str]) -> str:
        path, text = match.groups()
        if path == "table.md":
            return f'<a href="table.html">{text}</a>'
        kept = re.match("#|[a-z]+:", path) or (page.parent / path).is_file()
        return match[0] if kept else text

    return re.sub(r'<a href="([^"]+)">(.*?)</a>', link, page.read_text(), flags=re.DOTALL)


def results() -> str:
    """Write the list of tables and benchmark reports."""
    benchmarks = []
    for folder in sorted((ROOT / "results" / "benchmark").iterdir()):
        links = [f"[table](benchmark/{folder.name}/table.md)"]
        if (folder / "index.html").is_file():
            links.insert(0, f"[report](benchmark/{folder.name}/index.html)")
        benchmarks.append(f"- `{folder.name}`: {', '.join(links)}")
    tables = [f"- [{file.name}]({file.name})" for file in sorted((ROOT / "results").glob("*.csv"))]
    return TABLES.format(benchmarks="\n".join(benchmarks), tables="\n".join(tables))


def notebook(file: Path) -> tuple[str, dict[str, bytes]]:
    """Return an executed notebook as Markdown, and the pictures that it shows."""
    from nbconvert import MarkdownExporter

    text, resources = MarkdownExporter().from_filename(str(file))
    pictures = {f"{file.stem}_{name}": data for name, data in resources["outputs"].items()}
    for name in resources["outputs"]:
        text = text.replace(f"({name})", f"({file.stem}_{name})")
    return re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL), pictures


def write(folder: Path) -> None:
    """Write all pages of the site."""
    shutil.rmtree(folder, ignore_errors=True)
    site = Site(folder)
    for file in sorted(ROOT.glob("notebooks/*.ipynb")):
        text, pictures = notebook(file)
        for name, data in pictures.items():
            target = folder / "notebooks" / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            site.written.add(f"notebooks/{name}")
        site.write(f"notebooks/{file.stem}.md", text)
    site.write(FRONT, (ROOT / "README.md").read_text())
    pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("results/**/*.md")]
    for page in sorted(
        [*pages, *(ROOT / f"{x}.md" for x in ("SKILL", "CONTRIBUTING", "CHANGELOG"))]
    ):
        site.write(page.relative_to(ROOT).as_posix(), page.read_text())
    for card in site.fusions.values():
        site.write(f"docs/zoo/{card.family}/{card.name}.md", fusion_page(card))
    site.write("docs/api.md", api())
    site.write(RESULTS, results())
    for page in ROOT.glob("results/benchmark/*/index.html"):
        for file in page.parent.iterdir():
            if file.suffix != ".md":
                site.copy(file.relative_to(ROOT).as_posix())
        (folder / page.relative_to(ROOT)).write_text(report(page))
    shutil.copyfile(ROOT / "docs" / SCRIPT, folder / SCRIPT)
    (folder / LLMS).write_text((ROOT / LLMS).read_text().replace(".md)", ".html)"))


def finish(site: Path) -> None:
    """Let every page load the site's own script for search, not another host's."""
    for page in site.rglob("*.html"):
        own = posixpath.relpath(SCRIPT, page.relative_to(site).parent.as_posix())
        page.write_text(FOREIGN.sub(f'<script src="{own}"></script>', page.read_text()))


def build(folder: Path) -> Path:
    """Build the site in a folder that holds mkdocs.yml and fusionzoo/; return where it lies."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    write(folder / "build" / "pages")
    # -P: Zensical must not find the repository's folders before libraries of the same names.
    command = [sys.executable, "-P", "-m", "zensical", "build", "--strict", "--clean"]
    subprocess.run(command, cwd=folder, check=True)
    finish(folder / "build" / "site")
    return folder / "build" / "site"


if __name__ == "__main__":
    print(f"{build(ROOT) / FRONT.replace('.md', '.html')}")
