"""The console command `fusionzoo`; each subcommand imports only what it needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .console import print_table
from .errors import FusionZooError

if TYPE_CHECKING:
    from .cards import About


def main(args: Sequence[str] | None = None) -> int:
    """Run one subcommand; an error that the user can mend is one line and exit code 2."""
    args = list(sys.argv[1:] if args is None else args)
    if args[:1] == ["train"]:
        from .scripts.train import main as train

        return train(args[1:])
    if args[:1] == ["embed"]:
        from .scripts.embed import main as embed

        return embed(args[1:])
    if args[:1] == ["benchmark"]:
        from .scripts.benchmark import main as benchmark

        return benchmark(args[1:])
    parsed = _parser().parse_args(args)
    try:
        return int(parsed.run(parsed) or 0)
    except FusionZooError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fusionzoo", description="Multimodal feature fusion.")
    commands = parser.add_subparsers(required=True, metavar="command")
    commands.add_parser("train", help="train a fusion model: `fusionzoo train --help`")
    commands.add_parser("embed", help="write fused embeddings: `fusionzoo embed --help`")

    commands.add_parser("benchmark", help="compare fusions: `fusionzoo benchmark --help`")

    zoo = commands.add_parser(
        "zoo", help="list fusions, training strategies and encoders, explain one"
    )
    zoo.set_defaults(run=_list_zoo)
    actions = zoo.add_subparsers(metavar="action")
    info = actions.add_parser(
        "info", help="what one fusion or training strategy does, and its settings"
    )
    info.add_argument("name")
    info.set_defaults(run=_info)
    check = actions.add_parser("check", help="hold a fusion to the contract")
    check.add_argument("target", metavar="module:Class|name")
    check.set_defaults(run=_check)

    cache = commands.add_parser("cache", help="list or prune the cached features")
    cache.set_defaults(run=_list_cache)
    actions = cache.add_subparsers(metavar="action")
    actions.add_parser("list", help="what is cached").set_defaults(run=_list_cache)
    prune = actions.add_parser("prune", help="remove cached features")
    prune.add_argument("--older-than", type=float, metavar="DAYS", help="not used for so long")
    prune.add_argument("--keep-gb", type=float, metavar="GB", help="keep the last used, up to this")
    prune.add_argument("--all", action="store_true", help="remove everything")
    prune.set_defaults(run=_prune_cache)

    data = commands.add_parser("data", help="list or fetch data sets")
    data.set_defaults(run=_list_data)
    actions = data.add_subparsers(metavar="action")
    actions.add_parser("list", help="the data sets").set_defaults(run=_list_data)
    fetch = actions.add_parser("fetch", help="download a data set")
    fetch.add_argument("name", choices=["stamps", "mfeat"])
    fetch.add_argument("--root", help="folder to put it in; default: the cache")
    fetch.set_defaults(run=_fetch)
    return parser


def _list_zoo(_: argparse.Namespace) -> None:
    from .cards import BALANCE_FAMILIES, balance_cards, cards, count
    from .encoders import list_encoders

    found = cards()
    print_table(
        f"{len(found)} fusions (`fusionzoo zoo info NAME` says more)",
        ("name", "family", "paper", "reads", "parameters", "MACs", "a missing modality"),
        [
            (
                one.name,
                one.family,
                one.paper.partition(";")[0],
                one.reads,
                count(one.parameters),
                count(one.macs),
                one.missing.partition(".")[0],
            )
            for one in found
        ],
    )
    print(
        "parameters and MACs of one sample: image 49 tokens x 512, text 32 x 384, audio 50 x 256,"
    )
    print("dim 256, without the encoders\n")
    strategies = balance_cards()
    print_table(
        f"{len(strategies)} training strategies, for any fusion (`--balance NAME,NAME`)",
        ("name", "changes", "paper", "what it does"),
        [
            (one.name, BALANCE_FAMILIES[one.family], one.paper.partition(";")[0], one.summary)
            for one in strategies
        ],
    )
    print()
    kinds = ("image", "text", "audio", "vector", "sequence")
    print_table(
        "Encoders",
        ("kind", "names"),
        [(kind, ", ".join(list_encoders(kind))) for kind in kinds],
    )


def _info(parsed: argparse.Namespace) -> None:
    from .cards import BALANCE_FAMILIES, balance_cards, card, count

    for own in balance_cards():
        if own.name == parsed.name:
            rivals = "not with another that decides how fast each encoder learns"
            combines = ("combines", rivals if own.surgery else "with any other")
            kind = f"training strategy, changes {BALANCE_FAMILIES[own.family]}"
            _show_card(own, kind, [combines])
            print(f"\nsettings (with --balance {own.name}):")
            for name, default in own.settings.items():
                print(f"  --balance_settings.{own.name}.{name:<12} default {default}")
            return
    one = card(parsed.name)
    synergy = "can express it" if one.synergy else "cannot express an exclusive or"
    size = f"{count(one.parameters)} parameters, {count(one.macs)} MACs"
    kind = f"{one.family} fusion, reads {one.reads}"
    _show_card(one, kind, [("synergy", synergy), ("standard case", size)])
    print("\nsettings:" if one.settings else "\nno settings")
    for name, default in one.settings.items():
        print(f"  --fusion.{name:<18} default {default}")


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


def _check(parsed: argparse.Namespace) -> int:
    from .conformance import main_check

    return main_check(parsed.target)


def _list_cache(_: argparse.Namespace) -> None:
    from datetime import datetime

    from .benchmark.prepare import feature_cache

    cache, rows, total = feature_cache(), [], 0
    for entry in cache.entries():
        about = entry.about["description"]
        how = " ".join(map(str, about.get("corruption", []))) or f"view {about.get('view', 0)}"
        size, used = f"{entry.size / 1e6:.1f} MB", datetime.fromtimestamp(entry.used)
        shape = " x ".join(map(str, entry.about["arrays"]["pooled"][1]))
        what = (about["data"], about["modality"], about["encoder"].get("name", "-"), how)
        name = entry.key[:10]
        rows.append((name, *what, shape, size, f"{used:%Y-%m-%d %H:%M}"))
        total += entry.size
    header = ("entry", "data", "modality", "encoder", "how", "pooled", "size", "last used")
    print_table(f"{len(rows)} entries, {total / 1e6:.0f} MB, in {cache.root}", header, rows)


def _prune_cache(parsed: argparse.Namespace) -> None:
    from .benchmark.prepare import feature_cache

    if not parsed.all and parsed.older_than is None and parsed.keep_gb is None:
        raise FusionZooError("say what to remove: --older-than DAYS, --keep-gb GB or --all")
    most = None if parsed.keep_gb is None else int(parsed.keep_gb * 1e9)
    days = 0.0 if parsed.all else parsed.older_than
    freed = feature_cache().prune(days, most)
    print(f"freed {freed / 1e6:.1f} MB")


def _list_data(_: argparse.Namespace) -> None:
    from .datasets import DATASETS

    rows = [DATASETS[name] for name in DATASETS]
    settings = [", ".join(row.parameters) for row in rows]
    table = [(row.name, row.summary, own) for row, own in zip(rows, settings, strict=True)]
    print_table("Data sets", ("name", "what it holds", "settings (--data.<setting>)"), table)


def _fetch(parsed: argparse.Namespace) -> None:
    from importlib import import_module
    from pathlib import Path

    source = import_module(f".datasets.{parsed.name}", __package__)
    print(f"ready: {source.fetch(Path(parsed.root) if parsed.root else None)}")


if __name__ == "__main__":
    sys.exit(main())
