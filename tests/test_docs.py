"""The cards and the pages made from them say everything, and are up to date."""

from __future__ import annotations

import ast
import csv
import doctest
import importlib.util
import os
import pkgutil
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fusionzoo
from fusionzoo.cli import main
from fusionzoo.config import RunConfig, from_args, help_text
from fusionzoo.datasets import DATASETS
from fusionzoo.fusion import fusion_info, list_fusions
from fusionzoo.training.balance import BALANCE
from fusionzoo.zoo.cards import BALANCE_FAMILIES, FAMILIES, About, balance_cards, card
from fusionzoo.zoo.facts import FILE, facts
from helpers import tiny_models

DOCS = Path(__file__).parents[1] / "docs"
GENERATED = [
    *("zoo.md", *(f"zoo/{family}.md" for family in FAMILIES)),
    *("balance.md", *(f"balance/{family}.md" for family in BALANCE_FAMILIES)),
    "which.md",
    "deploy.md",
    *("../README.md", "../llms.txt", "../fusionzoo/SKILL.md", "../fusionzoo/zoo/models.json"),
]
WRITTEN = sorted([*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")])
READ = (".py", ".ipynb", ".yaml", ".html")


def lacks(one: About) -> list[str]:
    """Return the parts that a card lacks."""
    parts = ("summary", "equation", "missing", "pitfall", "use_when")
    has_year = one.paper == "-" or re.search(r"(19|20)\d\d", one.paper)
    lacking = [part for part in parts if not getattr(one, part)] + ["a year"] * (not has_year)
    return [f"{one.name}: {part}" for part in lacking]


def test_a_card_has_every_part() -> None:
    cards = [card(name) for name in list_fusions()]
    assert [part for one in cards for part in lacks(one)] == []
    assert [one.name for one in cards if min(one.parameters, one.macs) <= 0] == []


def test_a_training_strategy_s_card_has_every_part() -> None:
    cards = balance_cards()
    assert [part for one in cards for part in lacks(one)] == []
    assert [one.name for one in cards if not {"start", "end"} <= set(one.settings)] == []
    assert [one.name for one in cards if len(one.summary) >= 100] == []


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_docs", DOCS / "make.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", GENERATED)
def test_a_generated_page_is_what_the_registry_and_the_results_say(
    page: str, make: ModuleType
) -> None:
    text = (DOCS / page).read_text()
    assert text == make.PAGES[page](text), "make docs"


def test_the_facts_that_the_command_shows_are_those_of_the_registries(make: ModuleType) -> None:
    assert facts() == make.facts(), "make docs"
    assert FILE.read_text(encoding="utf-8") == make.facts().to_json(), "make docs"


def test_the_pages_for_coding_agents_have_the_form_that_they_read() -> None:
    skill, llms = ((DOCS.parent / name).read_text() for name in ("SKILL.md", "llms.txt"))
    assert re.match(r"---\nname: [a-z-]+\ndescription: .{50,1024}\n---\n", skill)
    assert len(skill.splitlines()) < 150
    lines = [line for line in llms.splitlines() if line]
    assert lines[0] == "# fusionzoo" and lines[1].startswith("> ")
    assert [x for x in lines[3:] if not re.match(r"## |- \[.+\]\(docs/.+\.md\): ", x)] == []
    listed = {DOCS.parent / path for path in re.findall(r"\((docs/.*?)\)", llms)}
    assert {*DOCS.glob("*.md")} <= listed


def test_every_page_of_a_family_is_generated_and_none_is_left_over(make: ModuleType) -> None:
    pages = [path for room in ("zoo", "balance") for path in (DOCS / room).iterdir()]
    assert {str(path.relative_to(DOCS)) for path in pages} <= {*make.PAGES}
    # The bytes of missing.svg depend on matplotlib's version.
    assert {*GENERATED, "missing.svg"} == {*make.PAGES}


def test_a_fusion_s_card_stands_on_the_page_of_its_family() -> None:
    pages = {family: (DOCS / "zoo" / f"{family}.md").read_text() for family in FAMILIES}
    names = list_fusions()
    assert [x for x in names if f"\n## {x}\n" not in pages[fusion_info(x).family]] == []


def test_every_link_leads_to_a_file_and_to_a_heading_of_it() -> None:
    assert [link for page in WRITTEN for link in broken_links(page)] == []


def broken_links(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead nowhere, or out of the repository."""
    for target in re.findall(r"(?:\]\(|src=\")([^)#\s\"]*#?[^)\s\"]*)", prose(page)):
        path, _, heading = target.partition("#")
        if path.startswith(("http:", "https:")):
            continue
        found = (page.parent / path).resolve() if path else page
        is_inside = found.exists() and found.is_relative_to(DOCS.parent)
        if not is_inside or (heading and heading not in anchors(found)):
            yield f"{page.name}: {target}"


def test_a_page_begins_with_what_its_reader_can_do_afterwards() -> None:
    begins = re.compile(r"# .+\n\nAfter reading this page you ")
    pages = sorted(DOCS.glob("*.md"))
    assert [page.name for page in pages if not begins.match(page.read_text())] == []


def test_the_walk_through_five_files_names_what_is_in_them() -> None:
    walk = (DOCS / "architecture.md").read_text().partition("## One sample, five files")[2]
    sections = re.split(r"^### \d\. `(.*)`$", walk.partition("\n## ")[0], flags=re.MULTILINE)[1:]
    for path, text in zip(sections[::2], sections[1::2], strict=True):
        words = set(re.findall(r"`([^`]+)`", text))
        paths = {word for word in words if word.endswith(".py")}
        assert all((DOCS.parent / other).is_file() for other in {path, *paths})
        known = defined(DOCS.parent / path)
        for other in paths:
            known |= defined(DOCS.parent / other)
        assert words - paths <= known, path
        assert words & defined(DOCS.parent / path), path
    assert len(sections) == 10


def test_every_file_that_the_page_on_architecture_names_exists() -> None:
    text = (DOCS / "architecture.md").read_text()
    named = {word for word in re.findall(r"[\w/]+/\w+\.(?:py|md)", text) if "<" not in word}
    roots = (DOCS.parent, DOCS.parent / "fusionzoo")
    assert len(named) > 25
    assert [x for x in sorted(named) if not any((root / x).is_file() for root in roots)] == []


def defined(path: Path) -> set[str]:
    """Return the classes, functions and methods (`Class.method`) that a file defines."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{x.name}" for x in node.body if isinstance(x, ast.FunctionDef)}
    return names


def test_every_page_of_the_docs_that_the_code_names_exists() -> None:
    named = "\\bdocs/[\\w/]+\\.md"
    rooms = [DOCS.parent / room for room in ("fusionzoo", "perf", "notebooks", "configs")]
    files = [path for room in rooms for path in room.rglob("*") if path.suffix in READ]
    pages = {page for path in files for page in re.findall(named, path.read_text())}
    assert len(pages) > 5
    assert [page for page in pages if not (DOCS.parent / page).is_file()] == []


def prose(page: Path) -> str:
    """Return a page's text without its code."""
    return re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_cards_of_fusions_that_a_linear_model_beats_say_so() -> None:
    with (DOCS.parent / "results" / "heads.csv").open() as file:
        missed = {row["fusion"] for row in csv.DictReader(file) if row["missed"]}
    assert missed
    assert not {name for name in missed if "docs/which.md" not in card(name).pitfall}


def test_the_command_lists_and_explains_the_zoo(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["zoo"]) == 0
    shown = capsys.readouterr().out
    for name in (*list_fusions(), *BALANCE):
        assert name in shown
    assert main(["zoo", "info", "mbt"]) == 0
    shown = capsys.readouterr().out
    for part in ("[X_m; z]", "arXiv:2107.00135", "pitfall", "use it when", "--fusion.num_layers"):
        assert part in shown
    assert main(["zoo", "info", "ogm_ge"]) == 0
    shown = capsys.readouterr().out
    for part in ("tanh(alpha", "arXiv:2203.15332", "pitfall", "--balance_settings.ogm_ge.alpha"):
        assert part in shown


def test_the_example_of_the_data_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "data.md").read_text(), re.DOTALL)
    [block] = [block for block in blocks if "amputate" in block]
    exec(compile(block, "docs/data.md", "exec"), {"__name__": "example"})
    printed = capsys.readouterr().out
    assert "60 samples" in printed and "tabular" in printed


def test_the_commands_and_the_example_of_the_encoders_page_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (DOCS / "encoders.md").read_text()
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL)).replace("\\\n", " ")
    for line in commands.splitlines():
        from_args(RunConfig, shlex.split(line)[2:], ["data"])
    [block] = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    tiny_models.save_clip(tmp_path / "models" / "clip")
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(block, "docs/encoders.md", "exec"), names)
    assert [name for name, _ in names["model"].named_encoders()] == ["image", "text"]


def test_the_data_page_names_settings_that_exist() -> None:
    text = (DOCS / "data.md").read_text()
    known = {x for name in ("manifest", "layout", "hanzi") for x in DATASETS[name].parameters}
    named = set(re.findall(r"--data\.([a-z_]+)", text))
    assert len(named) > 15
    assert named <= known | {"name", "augment"}


ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "distributed.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, flags=re.DOTALL)
SCRIPTS = [block for block in BLOCKS if block.startswith("#!")]


def commands() -> list[str]:
    """Every command of the page that starts train.py, on one line."""
    lines = "\n".join(BLOCKS).replace("\\\n", " ").splitlines()
    lines += re.findall(r"`([^`\n]*train\.py [^`\n]*)`", PAGE)
    return [line.rstrip("'& ") for line in lines if "train.py " in line]


@pytest.mark.parametrize("line", commands())
def test_every_command_is_understood(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.run import parse_args

    monkeypatch.chdir(ROOT)
    start, _, flags = line.partition("train.py ")
    if not flags.startswith("--resume "):  # of a run that is not there
        assert from_args(RunConfig, shlex.split(flags)).data["name"] == "stamps"
    if "torchrun" in start:
        options = shlex.split(start.partition("torchrun ")[2])
        said = parse_args([*options, "train.py", *shlex.split(flags)])
        assert said.training_script_args == shlex.split(flags)


def test_every_setting_that_it_names_exists() -> None:
    known = set(re.findall(r"--[\w.]+", help_text(RunConfig)))
    named = re.findall(r"`(--(?:dist|train|optim)\.[\w.]+|--(?:resume|out|seed|log))\b", PAGE)
    assert len(named) > 10
    assert set(named) <= known


@pytest.mark.parametrize("script", SCRIPTS, ids=["srun", "srun torchrun"])
@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_slurm_script_queues_again_what_was_preempted(
    script: str, code: int, tmp_path: Path
) -> None:
    tools = {
        "scontrol": '[ "$1" = show ] && printf "a\\nb\\n" || echo "$*" >> requeued',
        "python": f'echo "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR" >> ranks; exit {code}',
        # Preempted: the batch shell gets its signal, and passes on another.
        "torchrun": f"[ {code} = 75 ] || exit {code}\n"
        "trap 'exit 1' TERM; kill -USR1 $BATCH; while :; do sleep 0.05; done",
        "srun": 'if [ "$1" = torchrun ]; then exec "$@"; fi\n'
        'for i in 0 1; do SLURM_PROCID=$i SLURM_LOCALID=0 "$@"; code=$?; done; exit $code',
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "run.sbatch").write_text(script.replace("#!/bin/bash\n", "export BATCH=$$\n"))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
    env |= {"SLURM_CPUS_PER_TASK": "1", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "[a-b]"}
    done = subprocess.run(["bash", "run.sbatch"], cwd=tmp_path, env=env, check=False, timeout=60)
    assert done.returncode == code
    assert (tmp_path / "requeued").exists() == (code == 75)
    if "torchrun" not in script:
        assert (tmp_path / "ranks").read_text() == "0 2 0 a\n1 2 0 a\n"


def has_examples(module: str) -> bool:
    spec = importlib.util.find_spec(module)
    assert spec and spec.origin
    return ">>> " in Path(spec.origin).read_text(encoding="utf-8")


NAMES = [
    pytest.param(info.name, marks=pytest.mark.needs("fastapi"))
    if info.name.startswith("fusionzoo.tools.serve.")
    else info.name
    for info in pkgutil.walk_packages(fusionzoo.__path__, "fusionzoo.")
    if has_examples(info.name)
]


@pytest.mark.parametrize("name", NAMES)
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0
