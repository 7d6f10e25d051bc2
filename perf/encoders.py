"""Try every encoder that the libraries offer: `python perf/encoders.py`, about 25 minutes.

Tiny random models of each architecture of transformers, the smallest model of each module of timm
and of each family of torchvision, bundles of torchaudio, `mel/` with models of several kinds. Each
is created, trained for two steps on a batch in which one row lacks the modality, saved, and loaded
without its source. Writes results/encoders.csv with a row for each:

- `ok`: gradients reach the encoder, and the loaded model answers the same
- `refused`: one line of fusionzoo's own says why, before the first step ends
- `failed`: anything else
- `not built`: the library cannot build it here, or no tiny model of it is known to perf/

`--only '^image timm'` tries those whose kind and name it matches; the other rows stay.
"""

from __future__ import annotations

import argparse
import csv
import re
import shutil
import signal
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fusionzoo
from fusionzoo.encoders._torchaudio import torchaudio_or_none
from fusionzoo.encoders.hf_image import VIDEO_TYPES
from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.ground.progress import progress_bar
from fusionzoo.testing.encoders import assert_answers_alike, maker, trained

ROOT = Path(__file__).parents[1]
COLUMNS: tuple[str, ...] = ("kind", "name", "result", "reason")
LIMIT = 600  # s for one encoder
LARGEST = 150_000_000  # parameters
NAMES = {"input_ids": "text", "pixel_values": "image", "input_values": "audio"}
NAMES |= {"input_features": "audio", "past_values": "sequence"}
AUDIO = (
    *("mel/stats", "mel/resnet10t", "mel/test_vit", "mel/mobilenetv3_small_050"),
    *("mel/swin_s3_tiny_224", "mel/hiera_tiny_224", "torchaudio/conformer"),
)
BUNDLES = ("WAV2VEC2_BASE", "HUBERT_BASE", "WAVLM_BASE")


class Try(NamedTuple):
    """One encoder to try, `hf/bert` of kind `text`."""

    kind: str
    name: str


def transformers_types() -> Iterator[Try]:
    """Yield each architecture by what it reads, and each tower of the joint ones."""
    import transformers
    from _tiny_checkpoints import model_class
    from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

    transformers.logging.set_verbosity_error()
    for family in sorted(MODEL_MAPPING_NAMES):
        try:
            kind, joint = model_class(family), towers(family)
        except (AttributeError, ImportError):  # a library that it needs is not there
            continue
        if family in VIDEO_TYPES:
            yield Try("image", f"hf-video/{family}")
        elif joint:
            for tower in joint:
                hears = tower == "audio" and family != "clap"  # beside a language model
                yield Try(tower, f"{'hf' if hears else 'hf-clip'}/{family}")
        elif "text" not in kind.input_modalities and kind.main_input_name == "input_ids":
            yield Try(kind.input_modalities[0], f"hf/{family}")
        elif str(kind.main_input_name) in NAMES:
            yield Try(NAMES[kind.main_input_name], f"hf/{family}")


def timm_modules() -> Iterator[Try]:
    """Yield the smallest model of each module of timm, as far as names tell."""
    import timm
    from timm.models._registry import _model_to_module

    small = r"test_|pico|femto|atto|nano|tiny|_xxs|_xx_small|micro|_t\d?\b|_050|small|_s\b|18|_b0"
    for module in sorted(set(_model_to_module.values())):
        names = timm.list_models(module=module)
        near = sorted((x for x in names if re.search(small, x)), key=lambda x: (len(x), x))
        yield Try("image", f"timm/{smallest(timm.create_model, (near or names)[:8])}")


def torchvision_families() -> Iterator[Try]:
    """Yield the smallest model of each family of torchvision's classifiers."""
    import torchvision

    size = r"_?\d+(_\d+)?(gf|mf|x\d+d)?|_(x\d_\d|tiny|small|base|large|[tsbml])"
    families: dict[str, list[str]] = {}
    for name in torchvision.models.list_models(module=torchvision.models):
        family = re.sub(rf"({size})(?=$|_bn$|_\d)", "", re.sub(rf"({size})$", "", name))
        families.setdefault(family, []).append(name)
    for names in families.values():
        yield Try("image", f"torchvision/{smallest(torchvision.models.get_model, names)}")


def smallest(create: Callable[[str], Any], names: Sequence[str]) -> str:
    """Return the model with the fewest parameters; some cannot be built without their weights."""
    sizes = {}
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with torch.device("meta"):
                    net = create(name)
            except Exception:
                net = create(name)
        sizes[name] = sum(x.numel() for x in net.parameters())
    return min(sizes, key=lambda name: sizes[name])


def everything() -> Iterator[Try]:
    """Yield all encoders to try."""
    yield from transformers_types()
    yield from timm_modules()
    yield from torchvision_families()
    names = [*AUDIO, *(f"torchaudio/{x}" for x in BUNDLES if torchaudio_or_none() is not None)]
    yield from (Try("audio", name) for name in names)


def attempt(item: Try) -> dict[str, str]:
    """Try one encoder; return its row."""
    import transformers

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()

    def late(*_: object) -> None:
        raise TimeoutError(f"not finished after {LIMIT} s")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    with tempfile.TemporaryDirectory() as folder:
        try:
            result, reason = outcome(item, Path(folder))
        except Exception as error:
            result, reason = "failed", f"{type(error).__name__}: {said(error)}"
        finally:
            signal.alarm(0)
    return {"kind": item.kind, "name": item.name, "result": result, "reason": reason}


def outcome(item: Try, folder: Path) -> tuple[str, str]:
    """Train, save and load a model with one encoder; return the result and its reason."""
    source = folder / "source"
    try:
        target, settings = prepared(item, source)
    except Exception as error:
        return "not built", said(error)
    try:
        encoder = maker(target, {**settings, "kind": item.kind})(freeze="none")
        if (count := sum(x.numel() for x in encoder.parameters())) > LARGEST:
            return "not built", f"{count:,} parameters are too many to try"
        model, samples = trained(lambda **_: encoder)
    except FusionZooError as error:
        return "refused", said(error).replace(str(source), item.name.partition("/")[2])
    saved = model.save(folder / "saved")
    shutil.rmtree(source, ignore_errors=True)
    assert_answers_alike(model, fusionzoo.load(saved), samples)
    return "ok", ""


def prepared(item: Try, source: Path) -> tuple[str, dict[str, Any]]:
    """Write the tiny checkpoint of an architecture of transformers; return name and settings."""
    from _tiny_checkpoints import save

    prefix, _, family = item.name.partition("/")
    if prefix not in ("hf", "hf-clip", "hf-video"):
        takes_weights = item.name not in ("mel/stats", "torchaudio/conformer")
        return item.name, {"pretrained": False} if takes_weights else {}
    save(family, towers(family) or (item.kind,), source)
    return f"{prefix}/{source}", {}


def towers(family: str) -> tuple[str, ...]:
    """Return the kinds for which a joint type has a tower; a language model is that of texts."""
    from _tiny_checkpoints import model_class
    from transformers import AutoConfig

    model = model_class(family)
    found = [x for x in ("image", "audio", "text") if hasattr(model, f"get_{x}_features")]
    if found and "text" not in found and hasattr(AutoConfig.for_model(family), "text_config"):
        found.append("text")
    return tuple(found)


def said(error: Exception) -> str:
    """Return an error's first line, at most 300 characters."""
    return one_line(error)[:300] or type(error).__name__


def sweep(tries: Sequence[Try], others: Sequence[Try], path: Path) -> list[dict[str, str]]:
    """Try encoders in two processes; keep each row in the table at `path` as soon as it is known.

    Rows of `others` stay as they are.
    """
    rows: dict[tuple[str, str], dict[str, str]] = {}
    if path.is_file():
        with path.open(newline="") as file:
            found = {(row["kind"], row["name"]): row for row in csv.DictReader(file)}
        rows = {key: found[key] for key in others if key in found}
    tried = []
    with get_context("spawn").Pool(2, maxtasksperchild=40) as pool:
        results = pool.imap_unordered(attempt, tries)
        for row in progress_bar(results, unit="encoder", total=len(tries)):
            tried.append(row)
            rows[row["kind"], row["name"]] = row
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
                writer.writeheader()
                writer.writerows(rows[key] for key in sorted(rows))
    return tried


def main() -> None:
    """Try them, write the table, and print what did not work."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="regular expression of `kind name`")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "encoders.csv")
    flags = parser.parse_args()
    known = list(everything())
    tries = [x for x in known if re.search(flags.only, f"{x.kind} {x.name}")]
    rows = sweep(tries, [x for x in known if x not in tries], flags.out)
    for row in rows:
        if row["result"] != "ok":
            print(" ".join(row.values()))
    for (kind, prefix, result), count in sorted(
        Counter((r["kind"], r["name"].partition("/")[0], r["result"]) for r in rows).items()
    ):
        print(f"{kind:9} {prefix:12} {result:10} {count}")


if __name__ == "__main__":
    main()
