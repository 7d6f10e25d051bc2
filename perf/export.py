"""Measure what leaves for other runtimes: `python perf/export.py` writes results/export.csv.

Every fusion, with three modalities, and an encoder of every kind, small and with random weights, in
a model with `concat`: the largest difference of torch.export's graph and of ONNX Runtime from the
module, over max(1, the largest value), on other numbers of rows and lengths than were traced and on
every subset of modalities; or why there is none. Rows that are there already are kept, so that a
run that was stopped goes on; `python perf/export.py gmu chars` measures those anew. docs/deploy.md
shows the table.
"""

from __future__ import annotations

import csv
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fusionzoo import create_model, list_fusions, wrap_encoder
from fusionzoo.errors import FusionZooError, one_line
from fusionzoo.testing import fusions
from fusionzoo.tools.export.graph import check, onnx_runner, trace

ROOT = Path(__file__).parents[1]
OUT = ROOT / "results" / "export.csv"
COLUMNS = ("kind", "name", "torch_export", "onnx", "note")
TABLE = (
    {"name": "age", "mean": 40.0, "std": 12.0},
    {"name": "colour", "values": ["blue", "red", "yellow"]},
)


class Saved(NamedTuple):
    """A tiny checkpoint that `maker` of tests/helpers/tiny_models.py saves."""

    prefix: str  # of the encoder's name, before the folder
    maker: str
    arguments: tuple[str, ...] = ()
    below: str = ""  # the folder in which the maker makes its own


SMALL_VIT = {"img_size": 64, "depth": 2, "pretrained": False}
ENCODERS: dict[str, tuple[str, Any]] = {  # name in the table -> modality, settings
    "timm: CNN (resnet10t)": ("image", {"name": "timm/resnet10t", "size": 64}),
    "timm: ViT (vit_tiny)": ("image", {"name": "timm/vit_tiny_patch16_224", **SMALL_VIT}),
    "timm: Swin (swin_tiny)": ("image", {"name": "timm/swin_tiny_patch4_window7_224"}),
    "torchvision: CNN (resnet18)": ("image", {"name": "torchvision/resnet18"}),
    "torchvision: ViT (vit_b_32)": ("image", {"name": "torchvision/vit_b_32", "image_size": 64}),
    "torchvision-video: CNN (mc3_18)": (
        "image",
        {"name": "torchvision-video/mc3_18", "num_frames": 2},
    ),
    "hf: ViT": ("image", Saved("hf", "save_vit")),
    "hf: DINOv2": ("image", Saved("hf", "save_dinov2")),
    "hf-video: VideoMAE": ("image", Saved("hf-video", "save_video", ("videomae",))),
    "hf-clip: CLIP's image tower": ("image", Saved("hf-clip", "save_clip")),
    "hf-clip: SigLIP's image tower": ("image", Saved("hf-clip", "save_siglip")),
    "open_clip: CLIP's image tower": (
        "image",
        Saved("open_clip", "save_open_clip", ("clip",), "a"),
    ),
    "chars": ("text", {"name": "chars", "dim": 16, "num_layers": 1}),
    "hf: BERT of sentence-transformers": ("text", Saved("hf", "save_sentences")),
    "hf-clip: CLIP's text tower": ("text", Saved("hf-clip", "save_clip")),
    "hf-clip: SigLIP's text tower": ("text", Saved("hf-clip", "save_siglip")),
    "open_clip: CLIP's text tower": ("text", Saved("open_clip", "save_open_clip", ("clip",), "a")),
    "mel/* (resnet10t)": ("audio", {"name": "mel/resnet10t", "duration": 1.5}),
    "mel/stats": ("audio", {"name": "mel/stats"}),
    "torchaudio/conformer": ("audio", {"name": "torchaudio/conformer", "num_layers": 1}),
    "torchaudio/* (WAV2VEC2_BASE)": ("audio", {"name": "torchaudio/WAV2VEC2_BASE"}),
    "hf: wav2vec 2.0": ("audio", "save_wav2vec2"),
    "whisper/*": ("audio", Saved("whisper", "save_whisper")),
    "hf-clip: CLAP's audio tower": ("audio", Saved("hf-clip", "save_clap")),
    "vector/identity": ("vector", {"name": "vector/identity", "in_dim": 6}),
    "vector/mlp": ("vector", {"name": "vector/mlp", "in_dim": 6}),
    "sequence/transformer": ("sequence", {"name": "sequence/transformer", "in_dim": 6, "dim": 16}),
    "hf: PatchTST": ("sequence", Saved("hf", "save_series", ("patchtst",))),
    "hf: TimesFM": ("sequence", Saved("hf", "save_series", ("timesfm",))),
    "tabular/mlp": ("tabular", {"name": "tabular/mlp", "columns": TABLE}),
    "tabular/ft-transformer": (
        "tabular",
        {"name": "tabular/ft-transformer", "columns": TABLE, "dim": 16, "num_heads": 2},
    ),
    "LoRA (vit_tiny)": (
        "image",
        {"name": "timm/vit_tiny_patch16_224", **SMALL_VIT, "lora": {"r": 2}},
    ),
    "wrap_encoder": ("image", "wrapped"),
}
NOTES = {
    "torchaudio/* (WAV2VEC2_BASE)": "rows of one length a batch",
    "hf: wav2vec 2.0": "rows of one length a batch; prepared by transformers",
    "hf-clip: CLAP's audio tower": "prepared by transformers",
    "hf-video: VideoMAE": "prepared by fusionzoo",
    "torchvision-video: CNN (mc3_18)": "prepared by fusionzoo",
    "hf: PatchTST": "prepared by fusionzoo",
    "wrap_encoder": "rows of one length, and images of one size; prepared by your own function",
    "several pictures or clips a row": "a graph takes one item a row",
}


def main() -> None:
    """Measure what is not in the table yet, or what the arguments name."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    rows = {row["name"]: row for row in read()}
    for name in sys.argv[1:]:
        rows.pop(name, None)
    wanted = set(sys.argv[1:])
    measures: dict[str, tuple[str, Callable[[], Iterator[tuple[str, float]]]]] = {}
    for name in ENCODERS:
        measures[name] = "encoder", lambda name=name: encoder(name)
    for name in list_fusions():
        measures[name] = "fusion", lambda name=name: fusion(name)
    for name, (kind, measure) in measures.items():
        if name not in rows and (not wanted or name in wanted):
            rows[name] = measured(kind, name, measure)
            print(rows[name], flush=True)
            write(rows)
    several = "several pictures or clips a row"
    rows[several] = dict(
        zip(COLUMNS, ("encoder", several, "no", "no", NOTES[several]), strict=True)
    )
    write({name: rows[name] for name in (*ENCODERS, several, *list_fusions()) if name in rows})


def read() -> list[dict[str, str]]:
    if not OUT.is_file():
        return []
    with OUT.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def write(rows: dict[str, dict[str, str]]) -> None:
    with OUT.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())


def measured(
    kind: str, name: str, measure: Callable[[], Iterator[tuple[str, float]]]
) -> dict[str, str]:
    """Return a row of the table; an error is its reason."""
    worst: dict[str, float] = {}
    note, missing = NOTES.get(name, ""), "no"
    try:
        for runtime, off in measure():
            worst[runtime] = max(off, worst.get(runtime, 0.0))
    except Exception as error:
        reason = one_line(error).removeprefix("it cannot be traced by torch.export: ")
        reason = reason.partition(". ")[0][:160]
        if "cannot be imported" in reason:
            missing, reason = "not tried", reason.partition(": ")[0]
        note = "; ".join(filter(None, (note, reason)))
    figures = [f"{worst[x]:.0e}" if x in worst else missing for x in ("torch.export", "ONNX")]
    return dict(zip(COLUMNS, (kind, name, *figures, note), strict=True))


def fusion(name: str) -> Iterator[tuple[str, float]]:
    """Yield runtime and difference of a fusion."""
    for runtime, _, off in fusions.export_differences(fusions.maker(name)):
        yield runtime, off


def encoder(name: str) -> Iterator[tuple[str, float]]:
    """Yield runtime and difference of a model with an encoder."""
    modality, settings = ENCODERS[name]
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        if isinstance(settings, str | Saved):
            settings = tiny(settings, Path(folder))
        elif settings["name"].partition("/")[0] in (
            "timm",
            "torchvision",
            "torchvision-video",
            "mel",
            "torchaudio",
        ):
            takes = settings["name"] not in ("mel/stats", "torchaudio/conformer")
            settings = {**settings, **({"pretrained": False} if takes else {})}
        model = create_model("concat", {modality: settings}, 5, dim=16).eval()
    graph = trace(model)
    yield "torch.export", check(model, graph.program.module(), "torch.export")
    yield "ONNX", check(model, onnx_runner(graph.onnx()), "ONNX")


def tiny(maker: str | Saved, folder: Path) -> Any:
    """Return settings of an encoder of a tiny checkpoint, or a module as an encoder."""
    if maker == "wrapped":
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, 2), torch.nn.ReLU())
        pool = torch.nn.Sequential(net, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
        return wrap_encoder(pool, dim=8, kind="image", processor=shrink)
    if isinstance(maker, str):
        return {"name": f"hf/{save_wav2vec2(folder)}"}
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import tiny_models

    saved = getattr(tiny_models, maker.maker)(folder / maker.below, *maker.arguments)
    series = {"in_dim": 5} if maker.maker == "save_series" else {}
    return {"name": f"{maker.prefix}/{saved}", **series}


def shrink(image: torch.Tensor) -> torch.Tensor:
    """Prepare an image as one's own function may: to one size, as a graph's images have."""
    return torch.nn.functional.adaptive_avg_pool2d(image.float() / 255, 32)


def save_wav2vec2(folder: Path) -> Path:
    """Save a tiny wav2vec 2.0 with random weights."""
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2Model

    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    convolutions = {"conv_dim": (16, 16), "conv_kernel": (10, 8), "conv_stride": (5, 40)}
    positions = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = Wav2Vec2Config(intermediate_size=32, **small, **convolutions, **positions)
    Wav2Vec2Model(config).save_pretrained(folder)
    Wav2Vec2FeatureExtractor().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    try:
        main()
    except FusionZooError as error:
        sys.exit(f"error: {error}")
