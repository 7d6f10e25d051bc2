"""The console command `fusionzoo`; each subcommand imports only what it needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Container, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fusionzoo.config import EvaluateConfig, PredictConfig
from fusionzoo.config.load import Usage, run_command
from fusionzoo.errors import FusionZooError, did_you_mean
from fusionzoo.ground.console import add_plugins_option, print_table, quiet_pipe
from fusionzoo.ground.plugins import load_plugins
from fusionzoo.ground.registry import matches
from fusionzoo.ground.version import __version__
from fusionzoo.testing import runner
from fusionzoo.zoo.cards import show_data_settings, show_settings

if TYPE_CHECKING:
    from fusionzoo.zoo.cards import About, Card, EncoderCard

ENCODER_KINDS = ("image", "text", "audio", "vector", "sequence", "tabular")
COMMANDS = {  # first words -> module, function that takes the words behind them, what it does
    ("train",): (".scripts.train", "main", "train a fusion model"),
    ("evaluate",): (".cli", "evaluate_command", "measure a model"),
    ("predict",): (".cli", "predict_command", "write predictions"),
    ("report",): (".tools.run_report.report", "report_command", "show a run, write its page"),
    ("explain",): (".tools.explain.explain", "explain_command", "why it answers so"),
    ("embed",): (".scripts.embed", "main", "write fused embeddings"),
    ("export",): (".tools.export.export", "export_command", "write a model for ONNX"),
    ("search",): (".tools.search.search", "search_command", "search embeddings"),
    ("serve",): (".tools.serve.server", "serve_command", "answer requests over HTTP"),
    ("benchmark",): (".scripts.benchmark", "main", "compare fusions"),
    ("reproduce",): (".tools.reproduce", "reproduce_command", "redo a paper's figures"),
    ("analyse",): (".tools.analyse", "analyse_command", "what a data set needs of a fusion"),
    ("data", "convert"): (".tools.convert.convert", "convert_command", "write shards"),
    ("data", "check"): (".tools.audit.audit", "check_command", "find faults and leaks"),
    ("data", "show"): (".tools.audit.audit", "show_command", "write a contact sheet"),
}
EVALUATE = Usage(
    name="evaluate",
    purpose="Measure a model: metrics of the fusion and of each modality's own head.",
    words=("model", "data"),
    examples=("runs/a", "runs/a new.csv --split all", "runs/a --every_subset --out metrics.json"),
    common=(
        *("model", "data", "target", "split", "every_subset", "subgroups"),
        *("threshold", "thresholds", "out", "batch_size", "device"),
    ),
    more="Without DATA, of the data it was trained on. Samples that training read are counted.",
    show_details=show_data_settings,
)
PREDICT = Usage(
    name="predict",
    purpose="Predict every sample: a row with id, label, p_<class>, present_<modality>.",
    words=("model", "data"),
    examples=(
        "runs/a new.csv --out predictions.csv",
        "runs/a --split test --out predictions.parquet",
    ),
    common=(
        *("model", "data", "split", "out", "coverage", "threshold", "thresholds"),
        *("batch_size", "device"),
    ),
    more="Columns may stand in any order, and further ones do not matter. With --coverage 0.9 also"
    " a set of classes or labels, or lower and upper, that holds the truth in 90 %.",
)


def add_data_command(commands: Any) -> None:
    """Add the command and its actions to a parser's subcommands."""
    data = commands.add_parser("data", help="list, fetch, convert, check or show data sets")
    data.set_defaults(run=list_data, pattern=None)
    add_plugins_option(data, "")
    actions = data.add_subparsers(metavar="action")
    every = actions.add_parser("list", help="the data sets")
    every.add_argument("pattern", nargs="?", help="one, with its settings; or several: 'm*'")
    fetch = actions.add_parser("fetch", help="download a data set")
    fetch.add_argument("name", nargs="?", help="the data set; without it, those there are")
    fetch.add_argument("--root", help="folder to put it in; default: the cache")
    fetch.set_defaults(run=fetch_data)
    _list_commands(actions, "data")
    for action in (every, fetch):
        add_plugins_option(action)


def _list_commands(parser: Any, *group: str) -> None:
    """Add what `main` runs itself, which takes settings rather than options of argparse."""
    for words, (_, _, purpose) in COMMANDS.items():
        if words[:-1] == group:
            help_of = f"`fusionzoo {' '.join(words)} --help`"
            parser.add_parser(words[-1], help=f"{purpose}: {help_of}")


def list_data(parsed: argparse.Namespace) -> None:
    """Print the data sets and their settings."""
    from fusionzoo.datasets import DATASETS

    load_plugins(parsed.plugins)
    if parsed.pattern in DATASETS:
        show_data_settings([parsed.pattern])
        return
    names = DATASETS if parsed.pattern is None else DATASETS.names(parsed.pattern)
    rows = [DATASETS[name] for name in names]
    if not rows:
        raise FusionZooError(
            f"no data set matches {parsed.pattern!r}; `fusionzoo data list` lists all"
        )
    title = "Data sets (`fusionzoo data list NAME` shows settings)"
    print_table(title, ("name", "what it holds"), [(row.name, row.summary) for row in rows])


def fetch_data(parsed: argparse.Namespace) -> None:
    """Download a data set, or print which there are to download."""
    from fusionzoo.datasets import DATASETS

    load_plugins(parsed.plugins)
    names = [name for name in DATASETS if DATASETS[name].fetch is not None]
    if parsed.name is None:
        rows = [(name, DATASETS[name].summary) for name in names]
        print_table("Data sets to download", ("name", "what it holds"), rows)
        return
    fetch = DATASETS[parsed.name].fetch
    if fetch is None:
        raise FusionZooError(
            f"data set {parsed.name!r} is not downloaded; those that are: {', '.join(names)}"
        )
    print(f"ready: {fetch(Path(parsed.root) if parsed.root else None)}")


@quiet_pipe
def main(args: Sequence[str] | None = None) -> int:
    """Run one subcommand; an error that the user can fix is one line and exit code 2."""
    args = list(sys.argv[1:] if args is None else args)
    for words, (module, function, _) in COMMANDS.items():
        if tuple(args[: len(words)]) == words:
            return int(getattr(import_module(module, __package__), function)(args[len(words) :]))
    parser = _parser()
    if not args:
        parser.print_help()
        return 0
    parsed = parser.parse_args(args)
    try:
        return int(parsed.run(parsed) or 0)
    except (FusionZooError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            raise
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fusionzoo", description="Multimodal feature fusion.")
    parser.add_argument("--version", action="version", version=f"fusionzoo {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    _list_commands(commands)
    zoo = commands.add_parser(
        "zoo", help="list fusions, training strategies and encoders, explain one"
    )
    zoo.set_defaults(run=_list_zoo, pattern=None, by=None)
    add_plugins_option(zoo, "")
    actions = zoo.add_subparsers(metavar="action")
    every = actions.add_parser("list", help="all of them, or some")
    words = "those that match: 'm*', 'timm/vit*' for models of a library, or a family"
    every.add_argument("pattern", nargs="?", help=words)
    every.add_argument("--by", metavar="SET", help="fusions by what they reached on a data set")
    info = actions.add_parser(
        "info", help="what one fusion, training strategy or encoder does, and its settings"
    )
    info.add_argument("name", help="gmu, ogm_ge, timm/resnet18, chars, ...")
    info.add_argument(
        "--layers", action="store_true", help="the names of an encoder's layers, for embed --layer"
    )
    info.set_defaults(run=_info)
    models = actions.add_parser("models", help="trained models, for load")
    models.set_defaults(run=_list_trained)
    check = actions.add_parser("check", help="hold a component of any kind to its contract")
    runner.add_arguments(check)
    check.set_defaults(run=runner.run)
    for action in (every, info, check):
        add_plugins_option(action)

    _add_cache_command(commands)
    add_data_command(commands)
    return parser


def _add_cache_command(commands: Any) -> None:
    cache = commands.add_parser("cache", help="list or prune the cached features")
    cache.set_defaults(run=_list_cache)
    actions = cache.add_subparsers(metavar="action")
    actions.add_parser("list", help="what is cached").set_defaults(run=_list_cache)
    prune = actions.add_parser("prune", help="remove cached features")
    prune.add_argument("--older-than", type=float, metavar="DAYS", help="not used for so long")
    prune.add_argument("--keep-gb", type=float, metavar="GB", help="keep the last used, up to this")
    prune.add_argument("--all", action="store_true", help="remove everything")
    prune.set_defaults(run=_prune_cache)


def _list_zoo(parsed: argparse.Namespace) -> None:
    from fusionzoo.zoo.cards import BALANCE_FAMILIES, FAMILIES
    from fusionzoo.zoo.facts import Facts, facts

    known = facts(parsed.plugins)
    pattern = parsed.pattern
    if pattern is not None:
        known = Facts(
            [x for x in known.fusions if matches(pattern, x.name, x.family, FAMILIES)],
            [x for x in known.strategies if matches(pattern, x.name, x.family, BALANCE_FAMILIES)],
            [x for x in known.encoders if matches(pattern, x.name, x.kind, ENCODER_KINDS)],
        )
    if parsed.by is not None:
        _list_measured(parsed.by, {x.name for x in known.fusions})
        return
    if known.fusions:
        _list_fusions(known.fusions)
    if known.strategies:
        print_table(
            f"{len(known.strategies)} training strategies, for any fusion (`--balance NAME,NAME`)",
            ("name", "changes", "paper", "what it does"),
            [
                (x.name, BALANCE_FAMILIES[x.family], x.paper.partition(";")[0], x.summary)
                for x in known.strategies
            ],
        )
        print()
    if known.encoders:
        _list_encoders(known.encoders)
    elif pattern is not None and not (known.fusions or known.strategies):
        _list_models(pattern)


def _list_measured(data: str, names: Container[str]) -> None:
    """Print what those of these fusions reached that were measured on a data set."""
    from fusionzoo.zoo.facts import measured

    rows = [
        (
            name,
            f"{x['accuracy']:.3f}",
            f"{x['low']:.3f} to {x['high']:.3f}",
            f"{100 * x['gain_difference']:+.1f}",
            f"{100 * x['over_linear']:+.1f}",
            "-" if x["missing_area"] is None else f"{x['missing_area']:.3f}",
            "-" if x["seconds"] is None else f"{x['seconds']:.1f}",
        )
        for name, x in measured(data).items()
        if name in names
    ]
    header = ("name", "accuracy", "95 %", "over best single", "over linear", "missing", "train s")
    print_table(f"Fusions at their default settings on {data}", header, rows)
    print(
        "points over the best modality alone, and over a linear model of everything; missing:"
        " accuracy,\naveraged over shares of missing modalities from 0 to 0.9"
        f" (python perf/zoo.py {data})"
    )


def _list_trained(parsed: argparse.Namespace) -> None:
    """Print the trained models, and what they reached given all or some modalities."""
    from fusionzoo.model.trained_models import FOLDERS, trained_models

    models, lines = trained_models(), []
    for name, model in models.items():
        for row in model["results"]:
            figures = [f"{row[x]:.3f}" for x in ("accuracy", "macro_f1")]
            lines.append((name, model["data"], f"{model['megabytes']:.1f}", row["given"], *figures))
    header = ("name", "data", "MB", "given", "accuracy", "macro F1")
    print_table("Trained models, on their test split", header, lines)
    print(f"fusionzoo.load('{next(iter(models))}') reads one, and every command that takes a model")
    print(f"cards with licence and recipe: {FOLDERS}")
    if files := [f"{name}.zip" for name in models if not (FOLDERS / name).is_dir()]:
        print(f"files of the release: {', '.join(files)}; load says where to put them")


def _list_fusions(cards: Sequence[Card]) -> None:
    from fusionzoo.zoo.cards import count

    print_table(
        f"{len(cards)} fusions (`fusionzoo zoo info NAME` says more)",
        ("name", "family", "paper", "reads", "parameters", "MACs", "a missing modality"),
        [
            (
                card.name,
                card.family,
                card.paper.partition(";")[0],
                card.reads,
                count(card.parameters),
                count(card.macs),
                card.missing.partition(".")[0],
            )
            for card in cards
        ],
    )
    print(
        "parameters and MACs of one sample: image 49 tokens x 512, text 32 x 384, audio 50 x 256,"
    )
    print("dim 256, without the encoders\n")


def _list_encoders(cards: Sequence[EncoderCard]) -> None:
    by_kind = {kind: sorted({x.name for x in cards if x.kind == kind}) for kind in ENCODER_KINDS}
    print_table(
        "Encoders (`fusionzoo zoo info timm/resnet18` shows settings)",
        ("kind", "names"),
        [(kind, ", ".join(names)) for kind, names in by_kind.items() if names],
    )


def _list_models(pattern: str) -> None:
    """Print the models of a library, such as those of `timm/vit*`."""
    names = []
    if "/" in pattern:
        from fusionzoo.encoders import list_encoders

        names = list_encoders(pattern)
    if not names:
        raise FusionZooError(
            f"no fusion, training strategy or encoder matches {pattern!r};"
            " `fusionzoo zoo list` lists all"
        )
    print("\n".join(names))


def _info(parsed: argparse.Namespace) -> None:
    from fusionzoo.zoo.cards import BALANCE_FAMILIES, count
    from fusionzoo.zoo.facts import facts, measured_lines

    known = facts(parsed.plugins)
    exact = [card for card in known.encoders if card.name == parsed.name]
    family = f"{parsed.name.partition('/')[0]}/*"  # of `timm/resnet18` and of `timm`
    encoders = exact or [card for card in known.encoders if card.name == family]
    strategies = {card.name: card for card in known.strategies}
    fusions = {card.name: card for card in known.fusions}
    if encoders and parsed.layers:
        _show_layers(encoders, parsed.name)
    elif encoders:
        for card in encoders:
            _show_encoder(card, parsed.name)
    elif parsed.layers:
        raise FusionZooError(f"--layers is for encoders, and {parsed.name!r} is none")
    elif parsed.name in strategies:
        strategy = strategies[parsed.name]
        rivals = "not with another that decides how fast each encoder learns"
        combines = ("combines", rivals if strategy.surgery else "with any other")
        kind = f"training strategy, changes {BALANCE_FAMILIES[strategy.family]}"
        _show_card(strategy, kind, [combines])
        print(f"\nsettings (with --balance {parsed.name}):")
        show_settings(f"--balance_settings.{parsed.name}", strategy.settings)
    elif parsed.name in fusions:
        fusion = fusions[parsed.name]
        synergy = "can express it" if fusion.synergy else "cannot express an exclusive or"
        size = f"{count(fusion.parameters)} parameters, {count(fusion.macs)} MACs"
        kind = f"{fusion.family} fusion, reads {fusion.reads}"
        _show_card(fusion, kind, [("synergy", synergy), ("standard case", size)])
        print("\nsettings:" if fusion.settings else "\nno settings")
        show_settings("--fusion", fusion.settings)
        print("".join(f"\nmeasured on {line}" for line in measured_lines(fusion.name)))
    else:
        names = [*fusions, *strategies, *sorted({card.name for card in known.encoders})]
        near = did_you_mean(parsed.name, names)
        problem = f"unknown fusion, training strategy or encoder {parsed.name!r}.{near}"
        raise FusionZooError(f"{problem} `fusionzoo zoo` lists all {len(names)}.")


def _show_encoder(one: EncoderCard, name: str) -> None:
    print(f"{one.name}  ({one.kind} encoder)\n\n{one.summary}\n")
    print(f"settings (with --encoders.{one.kind} {name}):")
    show_settings(f"--encoders.{one.kind}", one.settings)
    if one.further:
        print("further settings go to the library that builds the model")
    print()


def _show_layers(cards: Sequence[EncoderCard], name: str) -> None:
    """Build the encoder without weights, as the first kind of data that it can encode."""
    from fusionzoo.embeddings.layers import layer_names
    from fusionzoo.encoders import create_encoder

    problems = []
    for card in cards:
        untrained: dict[str, Any] = {"pretrained": False}
        settings = untrained if "pretrained" in card.settings else {}
        try:
            encoder = create_encoder(card.kind, name, **settings)
        except FusionZooError as error:
            problems.append(str(error))
            continue
        print("\n".join(layer_names(encoder)))
        return
    raise FusionZooError(problems[0])


def _show_card(one: About, kind: str, more: Sequence[tuple[str, str]]) -> None:
    from textwrap import fill

    print(f"{one.name}  ({kind})\n\n{one.summary}\n")
    print(fill(one.equation, 96))
    for label, text in (
        ("paper", one.paper),
        ("missing modality", one.missing),
        ("pitfall", one.pitfall),
        ("use it when", one.use_when),
        *more,
    ):
        print(fill(f"{label}: {text}", 96, initial_indent="\n", subsequent_indent="    "))


def _list_cache(_: argparse.Namespace) -> None:
    from datetime import datetime

    from fusionzoo.features.cache import feature_cache

    cache, rows, total = feature_cache(), [], 0
    for entry in cache.entries():
        total += entry.size
        size, used = f"{entry.size / 1e6:.1f} MB", datetime.fromtimestamp(entry.used)
        what: tuple[str, ...] = ("damaged, or of another version", "-", "-", "-", "-")
        if entry.metadata is not None:
            about = entry.metadata["description"]
            how = " ".join(map(str, about.get("corruption", []))) or "undamaged"
            how += ", unfinished" * ("unfinished_from" in about)
            shape = " x ".join(map(str, entry.metadata["arrays"]["pooled"][1]))
            encoder = about["encoder"].get("name", "-")
            what = (about["data"], about["modality"], encoder, how, shape)
        rows.append((entry.key[:10], *what, size, f"{used:%Y-%m-%d %H:%M}"))
    header = ("entry", "data", "modality", "encoder", "how", "pooled", "size", "last used")
    print_table(f"{len(rows)} entries, {total / 1e6:.0f} MB, in {cache.root}", header, rows)


def _prune_cache(parsed: argparse.Namespace) -> None:
    from fusionzoo.features.cache import feature_cache

    if not parsed.all and parsed.older_than is None and parsed.keep_gb is None:
        raise FusionZooError("say what to remove: --older-than DAYS, --keep-gb GB or --all")
    most = None if parsed.keep_gb is None else int(parsed.keep_gb * 1e9)
    days = 0.0 if parsed.all else parsed.older_than
    freed = feature_cache().prune(days, most)
    print(f"freed {freed / 1e6:.1f} MB")


def evaluate_command(args: Sequence[str]) -> int:
    """Run `fusionzoo evaluate MODEL ...`; return 0, or 2 after a user's mistake."""

    def start(cfg: EvaluateConfig) -> int:
        from fusionzoo.evaluation.measure import terms
        from fusionzoo.evaluation.subgroups import SUBGROUPS, subgroup_rows
        from fusionzoo.inference import (
            CALIBRATION,
            INTERVALS,
            RETRIEVAL,
            evaluate,
            interval_rows,
        )
        from fusionzoo.training.calibrate import calibration_rows

        metrics = evaluate(cfg)
        header, rows = metrics_table(metrics)
        if header[1:]:
            title = f"Split {cfg.split!r}" if cfg.split != "all" else "All samples"
            print_table(f"{title}{terms(metrics)}", header, rows)
        if INTERVALS in metrics:
            print_table("With 95 % intervals", *interval_rows({"fusion": metrics[INTERVALS]}))
        if CALIBRATION in metrics:
            print_table("Probabilities", *calibration_rows(metrics[CALIBRATION]))
        for column, figures in metrics.get(SUBGROUPS, {}).items():
            header, rows, said = subgroup_rows(figures)
            print_table(f"By {column}, with 95 % intervals", header, rows)
            print(
                f"{column}: {said} (intervals of differences are corrected for {len(rows)} groups)"
            )
        if RETRIEVAL in metrics:
            directions = {x.replace("_to_", " -> "): y for x, y in metrics[RETRIEVAL].items()}
            title = "Retrieval, with 95 % intervals over queries"
            print_table(title, *interval_rows(directions))
        if cfg.out:
            print(f"wrote {cfg.out}")
        return 0

    return run_command(EvaluateConfig, EVALUATE, args, start)


def predict_command(args: Sequence[str]) -> int:
    """Run `fusionzoo predict MODEL ... --out FILE`; return 0, or 2 after a user's mistake."""

    def start(cfg: PredictConfig) -> int:
        if not cfg.out:
            raise FusionZooError("--out is missing: a .csv or .parquet file for the predictions")
        if (Path(cfg.model) / "preprocess.json").is_file():  # what `fusionzoo export` wrote
            from fusionzoo.tools.export.runtime import predict
        else:
            from fusionzoo.inference import predict

        print(f"wrote {predict(cfg)}")
        return 0

    return run_command(PredictConfig, PREDICT, args, start)


def metrics_table(metrics: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return header and rows of a table: the fusion, each modality alone, each subset; a column for
    each, if there are more figures."""
    names = [name for name, value in metrics.items() if not isinstance(value, Mapping | str)]
    lines = {"fusion": metrics}
    lines |= {f"{name} alone": line for name, line in metrics.get("unimodal", {}).items()}
    lines |= {f"fusion given {name}": line for name, line in metrics.get("subsets", {}).items()}
    rows = [[label, *(f"{line[name]:.3f}" for name in names)] for label, line in lines.items()]
    table = [["", *names], *rows]
    if len(names) > len(rows):
        table = [[*line] for line in zip(*table, strict=True)]
    return table[0], table[1:]
