"""Inner layers of encoders as columns of embeddings: pooled, named, absent where the sample is."""

from __future__ import annotations

import random
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import fusionzoo as fz
from fusionzoo.cli import main
from fusionzoo.config import EmbedConfig
from fusionzoo.config.load import from_args
from fusionzoo.embeddings.files import read_about
from fusionzoo.embeddings.layers import layer_names, read_setting, reading_layers
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.structures import ITEM_COUNTS

CHARS = {"name": "chars", "dim": 8, "num_layers": 2, "num_heads": 2}
NET = {"pretrained": False, "channels": [8, 8, 12, 8], "stem_width": 8}
RESNET = {"name": "timm/resnet10t", "size": 32, **NET}
BLOCK = "transformer.layers.layers.0"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    built = create_model("gmu", {"image": RESNET, "text": CHARS}, classes=["a", "b"], dim=6)
    return built.save(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """20 rows; every fifth has no image, every seventh no text."""
    folder, draw = tmp_path_factory.mktemp("data"), random.Random(0)
    rows = []
    for row in range(20):
        path = folder / f"{row}.png"
        pixels = np.random.default_rng(row).integers(0, 255, (32, 32, 3), np.uint8)
        Image.fromarray(pixels).save(path)
        words = " ".join(["word"] * draw.randrange(1, 9))
        image = None if row % 5 == 4 else str(path)
        text = None if row % 7 == 6 else f"{row} {words}"
        rows.append({"id": f"r{row}", "image": image, "text": text})
    return rows


def embed(model: Path, table: Any, out: Path, layer: Any, **settings: Any) -> Path:
    return fz.embed(str(model), table, out=out, layer=layer, num_workers=0, **settings)


def vectors(path: Path, column: str) -> np.ndarray[Any, Any]:
    return np.asarray(fz.read_embeddings(path, column)[1])


def test_a_layer_of_an_image_encoder_is_the_mean_of_its_feature_map(
    model: Path, table: list[dict[str, Any]], tmp_path: Path
) -> None:
    out = embed(model, table, tmp_path / "e.parquet", {"image": "layer3"})
    loaded = fz.load(model)
    rows = [row for row, sample in enumerate(table) if sample["image"]]
    batch = loaded.batch([{"image": table[row]["image"]} for row in rows])
    encoder: Any = loaded.encoders["image"]
    with torch.no_grad():
        maps = encoder.net.forward_intermediates(
            encoder.normalise(batch.inputs["image"]["pixels"]), indices=[3], intermediates_only=True
        )
    written = vectors(out, "image_layer3")
    assert written.shape == (20, 12)
    np.testing.assert_allclose(written[rows], maps[0].mean((2, 3)), atol=1e-5)
    assert not written[[4, 9, 14, 19]].any()
    about = read_about(out)["vectors"]["image_layer3"]
    assert about == {"width": 12, "normalised": False, "layer": "layer3"}


def test_padding_and_neighbours_do_not_enter_a_layers_mean_and_the_last_is_the_vector(
    model: Path, table: list[dict[str, Any]], tmp_path: Path
) -> None:
    columns = [
        vectors(
            embed(model, table, tmp_path / f"{size}.parquet", {"text": BLOCK}, batch_size=size),
            f"text_{BLOCK.replace('.', '_')}",
        )
        for size in (1, 7, 20)
    ]
    assert columns[0].shape == (20, 8) and columns[0][0].any()
    assert not columns[0][[6, 13]].any()
    for column in columns[1:]:
        np.testing.assert_allclose(column, columns[0], atol=1e-5)
    out = embed(model, table, tmp_path / "e.parquet", {"text": "transformer.layers"})
    own = vectors(out, "text")
    np.testing.assert_allclose(vectors(out, "text_transformer_layers"), own, atol=1e-5)


def test_the_other_columns_stay_as_they_are(
    model: Path, table: list[dict[str, Any]], tmp_path: Path
) -> None:
    layers = f"image=layer2, image=layer3,text={BLOCK}"
    with_layers = embed(model, table, tmp_path / "with.parquet", layers)
    plain = embed(model, table, tmp_path / "plain.parquet", "")
    for column in ("fused", "image", "text"):
        # Not bit for bit: torch runs its transformer blocks by another kernel where one is read.
        np.testing.assert_allclose(vectors(with_layers, column), vectors(plain, column), atol=1e-6)
    assert [*read_about(with_layers)["vectors"]] == [
        *read_about(plain)["vectors"],
        *("image_layer2", "image_layer3", "text_transformer_layers_layers_0"),
    ]


def test_several_images_are_averaged_none_is_zeros_and_class_tokens_are_left_out() -> None:
    torch.manual_seed(0)
    model = create_model("gmu", {"image": RESNET}, classes=["a", "b"], dim=6).eval()
    images = [np.full((32, 32, 3), 60 * number, np.uint8) for number in range(4)]
    batch = model.batch([{"image": images[:3]}, {}, {"image": images[3]}])
    assert ITEM_COUNTS in batch.inputs["image"]
    alone = layer_vectors(model, model.batch([{"image": image} for image in images]))
    mixed = layer_vectors(model, batch)
    torch.testing.assert_close(mixed[0], alone[:3].mean(0), atol=1e-5, rtol=1e-5)
    assert not mixed[1].any()
    torch.testing.assert_close(mixed[2], alone[3], atol=1e-5, rtol=1e-5)
    model = create_model("gmu", {"image": RESNET, "text": CHARS}, classes=["a", "b"], dim=6).eval()
    rows = layer_vectors(model, model.batch([{"text": "a"}, {"text": "b"}]))
    assert rows.shape == (2, 12) and not rows.any()
    vit = {"name": "timm/vit_tiny_patch16_224", "pretrained": False, "img_size": 32, "depth": 2}
    model = create_model("gmu", {"image": vit}, classes=["a", "b"], dim=6).eval()
    batch = model.batch([{"image": np.full((32, 32, 3), 90, np.uint8)}])
    rows = layer_vectors(model, batch, "norm")
    with torch.no_grad():
        tokens = model.encode(batch)["image"].tokens
    torch.testing.assert_close(rows, tokens.mean(1), atol=1e-5, rtol=1e-5)


def layer_vectors(model: FusionModel, batch: Any, layer: str = "layer3") -> torch.Tensor:
    with torch.no_grad(), reading_layers(model, (("image", layer),)) as [reader]:
        model.embed_and_answer(batch)
        return reader.vectors(batch, batch.present[:, 0])


def test_a_model_is_left_as_it_was() -> None:
    model = create_model("gmu", {"image": RESNET}, classes=["a", "b"], dim=6).eval()
    encoder: Any = model.encoders["image"]
    hooks = [len(module._forward_hooks) for module in encoder.modules()]
    layers = (("image", "layer3"), ("image", "fc"))
    with pytest.raises(fz.FusionZooError, match="runs 0 times"), reading_layers(model, layers):
        model.embed([{"image": np.zeros((32, 32, 3), np.uint8)}])
    assert "_encode_and_note" not in str(encoder.encode)
    assert [len(module._forward_hooks) for module in encoder.modules()] == hooks


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        ("image=layr3", "Did you mean 'layer3'? `fusionzoo zoo info timm/resnet10t --layers`"),
        ("picture=layer3", "no modality 'picture'"),
        ("layer3", "expected MODALITY=LAYER, such as image=layer3"),
    ],
)
def test_an_unknown_layer_is_one_line(
    model: Path,
    table: list[dict[str, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    layer: str,
    message: str,
) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id,text\n" + "".join(f"{x['id']},{x['text'] or 'none'}\n" for x in table))
    columns = ["--data.columns.text", "text", "--data.kinds.text", "text"]
    command = ["embed", str(model), str(path), *columns, "--out", str(tmp_path / "e.parquet")]
    assert main([*command, "--layer", layer]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert main([*command, "--layer", f"text={BLOCK}"]) == 0
    assert vectors(tmp_path / "e.parquet", f"text_{BLOCK.replace('.', '_')}").any()


def test_compiled_models_show_no_layers(
    model: Path, table: list[dict[str, Any]], tmp_path: Path
) -> None:
    with pytest.raises(fz.FusionZooError, match="compile"):
        embed(model, table, tmp_path / "e.parquet", {"image": "layer3"}, compile=True)


def test_zoo_info_lists_the_layers_that_embed_reads(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["zoo", "info", "timm/resnet18", "--layers"]) == 0
    names = capsys.readouterr().out.splitlines()
    assert {"layer3", "layer4.1.conv2"} <= {*names}
    model = create_model("gmu", {"text": CHARS}, classes=["a", "b"])
    assert BLOCK in layer_names(dict(model.named_encoders())["text"])
    assert main(["zoo", "info", "gmu", "--layers"]) == 2
    assert "'gmu' is none" in capsys.readouterr().err


def test_the_command_of_the_page_on_embeddings_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "embed.md").read_text(encoding="utf-8")
    [line] = [x for x in page.splitlines() if x.startswith("fusionzoo embed") and "--layer" in x]
    cfg = from_args(EmbedConfig, shlex.split(line)[2:], ("model", "data"))
    assert read_setting(cfg.layer) == (("image", "layer3"), ("text", "encoder.layer.2"))
