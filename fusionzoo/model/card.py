"""The model card: a model folder's README.md, written for the Hub and for whoever finds the folder.

A card is a function of config.json and of what the model was trained on. Its last line holds a
digest of the rest, so that a card that nobody edited can be told from a README of the author's.
"""

from __future__ import annotations

import hashlib
import html
import inspect
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fusionzoo.errors import FusionZooError
from fusionzoo.files import without_folders, write_text
from fusionzoo.fusion import FUSIONS
from fusionzoo.ground.registry import sections

from .trained_on import RunResults, TrainedOn

NAME = "README.md"
MOST_BYTES = 1 << 20  # of a README that is read
MOST_CLASSES = 20  # that are listed
OWN_DATA = ("manifest", "folders", "layout")  # data sets that are files of the author's
MARK = "<!-- written by fusionzoo; sha256 of the text above: "
EXAMPLES = {
    "image": '"photo.jpg"',
    "text": '"a few words"',
    "audio": '"clip.wav"',
    "vector": "[0.1, 0.2, ...]",
    "sequence": "[[0.1, ...], [0.2, ...]]",
    "tabular": '{"age": 31, ...}',
}


def write_card(folder: Path, text: str) -> None:
    """Write a card, unless the folder has a README that somebody wrote or edited."""
    if edited_readme(folder) is None:
        write_text(folder / NAME, text)


def edited_readme(folder: Path) -> str | None:
    """Return the text of a folder's README; None: there is none, or it is as fusionzoo wrote it."""
    path = folder / NAME
    if not path.is_file() or path.stat().st_size > MOST_BYTES:
        return None
    text = path.read_bytes().decode("utf-8", "replace")
    return None if is_unedited(text) else text


def is_unedited(text: str) -> bool:
    """Whether a README is a card as fusionzoo wrote it."""
    body, mark, _ = text.rpartition(MARK)
    return bool(mark) and text == _signed(body)


def _signed(body: str) -> str:
    return f"{body}{MARK}{hashlib.sha256(body.encode()).hexdigest()} -->\n"


def card_text(
    config: Mapping[str, Any], trained_on: TrainedOn | None, num_parameters: int, name: str = ""
) -> str:
    """Write the card of a model with this config.json; `name` is that of its repository."""
    results = None if trained_on is None else trained_on.results
    fusion, modalities = _short(config["fusion"]["name"]), list(config["encoders"])
    listed = _enumerate([_cell(x) for x in modalities])
    parts = [
        f"---\n{_metadata(config, trained_on, name)}\n---\n",
        f"# {name or f'{fusion} of {listed}'}\n",
        f"A multimodal model of fusionzoo: the fusion `{_component(config['fusion'])}` over the"
        f" features of {listed}, {num_parameters:,} parameters. {_task(config)}\n",
        _encoders(config),
        "## A missing modality\n",
        _missing(config),
        "## Data\n",
        _data(trained_on),
        "## Results\n",
        _results(results, modalities, trained_on),
        "## Load\n",
        _usage(config, name),
        "## Versions\n",
        f"Saved by fusionzoo {config['fusionzoo']} with torch {config['torch']}; folder format"
        f" {config['format']}.\n",
    ]
    return _signed("\n".join(parts) + "\n")


def _metadata(config: Mapping[str, Any], trained_on: TrainedOn | None, name: str) -> str:
    """Return the YAML that the Hub reads, with a result for each metric and set of modalities."""
    from huggingface_hub import EvalResult, ModelCardData

    results = None if trained_on is None else trained_on.results
    titles, rows = (results.titles, results.rows) if results else ({}, ())
    data = _data_name(trained_on)
    entries = [
        EvalResult(
            task_type="multimodal-classification" if config["classes"] else "multimodal",
            dataset_type=data,
            dataset_name=data,
            dataset_split="test",
            metric_type=metric,
            metric_name=f"{titles.get(metric, metric)}, given {_enumerate(row.given)}",
            metric_value=value,
            metric_args={"samples": row.samples} | ({"interval_95": interval} if interval else {}),
        )
        for row in rows
        for metric, (value, *interval) in row.metrics.items()
        if math.isfinite(value)
    ]
    card = ModelCardData(
        model_name=name or config["fusion"]["name"],
        library_name="fusionzoo",
        license="unknown",
        tags=["fusionzoo", "multimodal", *sorted({*config["kinds"].values()})],
        eval_results=entries or None,
    )
    return str(card.to_yaml()).strip()


def _task(config: Mapping[str, Any]) -> str:
    if targets := config.get("targets"):
        answers = [f"`{_code(target['name'])}` ({target['kind']})" for target in targets]
        return f"It answers {_enumerate(answers)}."
    if classes := config["classes"]:
        listed = ", ".join(f"`{_code(x)}`" for x in classes[:MOST_CLASSES])
        more = f" and {len(classes) - MOST_CLASSES} more" if len(classes) > MOST_CLASSES else ""
        return f"It answers one of {len(classes)} classes: {listed}{more}."
    return "It was trained without a target: it embeds."


def _encoders(config: Mapping[str, Any]) -> str:
    rows = []
    for modality, kind in config["kinds"].items():
        origin = config.get("first_weights", {}).get(modality, {})
        source = origin.get("source", "unknown")
        licence = origin.get("licence", "unknown")
        name = _component(config["encoders"][modality])
        rows.append(
            (
                *(_cell(modality), kind, _cell(name)),
                *(_cell(_short(source)) or "trained from scratch", _cell(licence) or "-"),
            )
        )
    header = ("modality", "kind", "encoder", "first weights", "licence of these weights")
    lent = ""
    if borrowed := config.get("borrowed"):
        lent = (
            f"\nThe weights of {_enumerate([_code(x) for x in borrowed])} are not in this folder:"
            " `fusionzoo.load` reads them from where they came, and checks them.\n"
        )
    note = (
        "The author of this model has stated no licence for it, so the front matter says `unknown`."
        " Check the licences of the weights that it started from before you choose one.\n"
    )
    return f"{_table(header, rows)}{lent}\n{note}"


def _component(settings: Mapping[str, Any]) -> str:
    """Return a fusion's or encoder's name, of an ensemble with its members.

    >>> _component({"name": "ensemble", "members": [{"name": "gmu"}, {"name": "gmu"}]})
    'ensemble of 2 gmu'
    """
    members = settings.get("members") if settings["name"] == "ensemble" else None
    if not members:
        return _short(settings["name"])
    return f"ensemble of {len(members)} {_short(members[0]['name'])}"


def _missing(config: Mapping[str, Any]) -> str:
    """Return what the model does for a sample that lacks modalities."""
    fusion = config["fusion"]["name"]
    try:
        text = sections(inspect.getdoc(FUSIONS[fusion].cls) or "")["Missing"]
    except FusionZooError:
        text = ""  # a plugin's, not imported
    lines = [
        "Any modality may be missing from any sample: leave it out, or give `None`. It is not"
        " encoded, and what a sample lacks changes no answer of its neighbours.",
        f"The fusion `{fusion}`: {text}" if text else "",
        "A sample without any modality is answered with the training split's prior."
        if config.get("prior")
        else "",
        "The model also holds a head of each modality alone: `model.predict(samples,"
        ' fallback="unimodal")` answers a sample that has a single modality by that head.'
        if config.get("unimodal_dim")
        else "",
    ]
    return "\n".join(f"- {line}" for line in lines if line) + "\n"


def _data(trained_on: TrainedOn | None) -> str:
    if trained_on is None:
        return "What it was trained on is not known: it was saved without a training run.\n"
    results = trained_on.results
    if results is None:
        return f"Trained on `{_data_name(trained_on)}`.\n"
    counts = ", ".join(f"{count:,} {split}" for split, count in results.samples.items())
    return (
        f"Trained on `{_data_name(trained_on)}`: {counts} samples. Fingerprint of ids, splits,"
        f" labels and values: `{results.fingerprint}`. The folder holds short hashes of the ids"
        " that training and validation read, by which `fusionzoo evaluate` names an overlap.\n"
    )


def _results(
    results: RunResults | None, modalities: Sequence[str], trained_on: TrainedOn | None
) -> str:
    if results is None or not results.rows:
        return "None were measured in a training run.\n"
    metrics = [name for name in results.titles if name in results.rows[0].metrics]
    rows = [
        (
            "every modality"
            if {*row.given} >= {*modalities}
            else f"{_enumerate([_cell(x) for x in row.given])} only",
            f"{row.samples:,}",
            *(_figure(row.metrics.get(name)) for name in metrics),
        )
        for row in results.rows
    ]
    header = ("given", "samples", *(results.titles[name] for name in metrics))
    is_last = results.select == "last"
    chosen = "the last" if is_last else "chosen by validation"
    weights = f"with the weights of epoch {results.best_epoch}, {chosen}"
    if results.seeds > 1:
        each = "its last epoch" if is_last else "its best epoch by validation"
        weights = f"with {results.seeds} seeds joined, each of {each}"
    column = None if trained_on is None else trained_on.settings.get("weight_column")
    weighted = f", samples weighted by {_cell(column)}" if column else ""
    best = f"Test split, once, {weights}{weighted}."
    has_interval = any(len(x) > 1 for row in results.rows for x in row.metrics.values())
    what = " In brackets the 95 % interval over samples (Wilson)." if has_interval else ""
    return f"{best}{what}\n\n{_table(header, rows)}"


def _figure(values: Sequence[float] | None) -> str:
    if not values:
        return "-"
    text = f"{values[0]:.3f}"
    return f"{text} [{values[1]:.3f}, {values[2]:.3f}]" if len(values) > 2 else text


def _usage(config: Mapping[str, Any], name: str) -> str:
    values = {json.dumps(m): EXAMPLES[kind] for m, kind in config["kinds"].items()}
    sample = ", ".join(f"{quoted}: {value}" for quoted, value in values.items())
    answers = bool(config["classes"] or config.get("targets"))
    plugins = config.get("plugins", [])
    first = f", plugins={plugins!r}" if plugins else ""
    call = "model.predict(samples)" if answers else "model.embed(samples)"
    note = (
        "It has components that are not fusionzoo's own: get those plugins from the author, and"
        " read them before you import them.\n\n"
        if plugins
        else ""
    )
    return (
        f"{note}```python\nimport fusionzoo as fz\n\n"
        f'model = fz.load("{name or "path/of/this/folder"}"{first})\n'
        f"samples = [{{{sample}}}]  # what is left out is missing\nprint({call})\n```\n\n"
        "Loading needs `pip install fusionzoo`, runs no code of the folder, reads no pickle, and\n"
        "compares the files with their digests.\n"
    )


def _data_name(trained_on: TrainedOn | None) -> str:
    """Return the name of the data set; of a file or folder of the author's its last part."""
    if trained_on is None:
        return "unknown"
    settings = trained_on.settings
    root = settings.get("root")
    has_path = settings.get("name") in OWN_DATA and isinstance(root, str)
    return _code(Path(str(root)).name if has_path else settings.get("name", "unknown"))


def _short(name: str) -> str:
    return _code(without_folders(name))


def _enumerate(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _code(value: Any) -> str:
    """Return a value as it can stand between back-quotes."""
    return " ".join(str(value).replace("|", "/").replace("`", "'").split())


def _cell(value: Any) -> str:
    """Return a value as text in which nothing is Markdown or HTML.

    >>> _cell("<b>|[x](y)")
    '&lt;b&gt;/\\\\[x\\\\](y)'
    """
    return re.sub(r"([\\*\[\]])", r"\\\1", html.escape(_code(value), quote=False))


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
