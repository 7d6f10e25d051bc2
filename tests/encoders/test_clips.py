"""Encoders of clips: all images of a sample are the frames of one clip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor

import fusionzoo as fz
from fusionzoo.datasets.media.decode import decode
from fusionzoo.encoders import create_encoder
from fusionzoo.encoders.augment import set_augmentation
from fusionzoo.encoders.base import Encoder
from fusionzoo.encoders.clips import ClipProcessor, HFVideo, torchvision_preparation
from fusionzoo.encoders.image import Preparation
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Features, Sample
from helpers import tiny_models as tiny
from helpers.pictures import SHAPES, picture

FRAMES = 4


def clip(frames: int = FRAMES, height: int = 48, width: int = 64) -> list[Tensor]:
    draw = torch.Generator().manual_seed(frames)
    return [
        torch.randint(0, 256, (3, height, width), generator=draw, dtype=torch.uint8)
        for _ in range(frames)
    ]


@torch.no_grad()
def features_of(encoder: Encoder, *clips: list[Tensor]) -> Features:
    prepare = encoder.processor(False)
    items = [item for frames in clips for item in prepare.items(frames)]
    return encoder.eval()(prepare.collate(items))


@pytest.fixture(scope="module")
def videomae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_video(tmp_path_factory.mktemp("videomae"), "videomae")


@pytest.mark.parametrize(
    ("family", "processor"),
    [
        *((family, "") for family in tiny.VIDEO),
        ("videomae", "VideoMAEVideoProcessor"),
        ("timesformer", "TimesformerVideoProcessor"),
        ("vivit", "VivitVideoProcessor"),
    ],
)
def test_pixels_and_tokens_are_those_of_the_library(
    family: str, processor: str, tmp_path: Path
) -> None:
    import transformers

    folder = tiny.save_video(tmp_path, family, processor)
    encoder = create_encoder("image", f"hf-video/{folder}")
    assert isinstance(encoder, HFVideo)
    frames = clip()
    values = [torch.stack(frames)] if encoder.is_video else frames
    inputs = encoder.extractor(values, return_tensors="pt")
    pixels = next(iter(inputs.values()))
    prepared = encoder.normalise(encoder.processor(False)(frames)["pixels"])
    torch.testing.assert_close(prepared, pixels[0], rtol=0, atol=1e-6)

    with torch.no_grad():
        hidden = transformers.AutoModel.from_pretrained(folder).eval()(pixels).last_hidden_state
    has_class_token = family in ("timesformer", "vivit")
    features = features_of(encoder, frames)
    torch.testing.assert_close(features.tokens, hidden[:, int(has_class_token) :])
    pooled = hidden[:, 0] if has_class_token else hidden.mean(1)
    torch.testing.assert_close(features.pooled, pooled)


def test_frames_are_taken_evenly_and_repeated_in_order() -> None:
    prepare = ClipProcessor(Preparation(size=(8, 8)), FRAMES)
    shades = [torch.full((3, 8 + n, 12), n, dtype=torch.uint8) for n in range(8)]
    for count in (1, 2, 3, 4, 6, 8):
        (item,) = prepare.items(shades[:count])
        evenly = [int((n + 0.5) * count / FRAMES) for n in range(FRAMES)]
        assert item["pixels"][:, 0, 0, 0].tolist() == evenly
    assert not prepare.items(shades[0])[0]["pixels"].any()  # one picture


def test_frames_are_read_in_their_order(videomae: Path) -> None:
    encoder = create_encoder("image", f"hf-video/{videomae}")
    forward, backward = clip(), clip()[::-1]
    features = features_of(encoder, forward, backward)
    assert (features.pooled[0] - features.pooled[1]).abs().max() > 1e-3


@pytest.mark.parametrize("augment", ["its own", "that of the data"])
def test_all_frames_are_changed_alike(augment: str, videomae: Path) -> None:
    own: dict[str, Any] = {"augment": "crop_flip"} if augment == "its own" else {}
    encoder = create_encoder("image", f"hf-video/{videomae}", **own)
    if augment == "that of the data":
        set_augmentation([("image", encoder)], {"image": {"strength": 1.0, "flip": True}})
    prepare = encoder.loader_processor(True)
    frames, still = clip()[:1] * FRAMES, encoder.processor(False)(clip()[0])["pixels"]
    seen = []
    for seed in range(1, 4):
        (item,) = prepare.items(frames, torch.Generator().manual_seed(seed))
        assert item["pixels"].shape == still.shape
        assert all(torch.equal(frame, item["pixels"][0]) for frame in item["pixels"])
        seen.append(item["pixels"])
    changed = [x for x in seen if not torch.equal(x, still)]
    assert len(changed) == 3 and not torch.equal(seen[0], seen[1])
    assert torch.equal(prepare.items(frames)[0]["pixels"], still)  # without a generator


def test_a_row_does_not_depend_on_rows_without_a_clip(videomae: Path) -> None:
    encoders: dict[str, Any] = {
        "image": f"hf-video/{videomae}",
        "vector": {"name": "vector/identity", "in_dim": 2},
    }
    model = fz.create_model("concat", encoders, 2, dim=8).eval()
    values = [clip(), None, clip(2), clip()[0]]
    samples = [
        Sample(str(n), "", None, {"image": value, "vector": torch.ones(2)})
        for n, value in enumerate(values)
    ]
    batch = model.collate()(samples)
    assert batch.inputs["image"].keys() == {"pixels"}
    with torch.no_grad():
        together = model(batch).logits
        alone = torch.cat([model(model.collate()([sample])).logits for sample in samples])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


def test_frozen_rows_and_channels_last_are_those_of_clips(videomae: Path) -> None:
    encoder = create_encoder("image", f"hf-video/{videomae}", freeze="all")
    assert encoder.frozen_rows == 8 * 224 * 224 // (FRAMES * 32 * 32)
    encoder.frozen_rows = 1
    together = features_of(encoder, clip(), clip(3))
    torch.testing.assert_close(together.pooled[1:], features_of(encoder, clip(3)).pooled)
    encoder = create_encoder("image", f"hf-video/{videomae}")
    before = features_of(encoder, clip())
    encoder.set_channels_last()  # torch refuses it for tensors of five dimensions
    assert torch.equal(features_of(encoder, clip()).pooled, before.pooled)


def test_clips_of_another_length_or_size_are_read(tmp_path: Path) -> None:
    folder = tiny.save_video(tmp_path / "a", "vjepa2")
    encoder = create_encoder("image", f"hf-video/{folder}", num_frames=6)
    assert features_of(encoder, clip(6)).tokens.shape == (1, 6 // 2 * 4, encoder.dim)
    folder = tiny.save_video(tmp_path / "b", "videoprism_vision_model")
    encoder = create_encoder("image", f"hf-video/{folder}", size=48)
    assert features_of(encoder, clip()).tokens.shape == (1, FRAMES * 9, encoder.dim)


def test_what_cannot_read_clips_is_refused(videomae: Path, tmp_path: Path) -> None:
    with pytest.raises(FusionZooError, match="num_frames=6: this videomae reads 4 frames"):
        create_encoder("image", f"hf-video/{videomae}", num_frames=6)
    with pytest.raises(FusionZooError, match="size=48: this videomae reads frames of 32 x 32"):
        create_encoder("image", f"hf-video/{videomae}", size=48)
    with pytest.raises(FusionZooError, match=r"is a vit; .* videomae, .* hf/ encodes pictures"):
        create_encoder("image", f"hf-video/{tiny.save_vit(tmp_path / 'vit')}")
    folder = tiny.save_video(tmp_path / "turned", "videomae")
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    turned = {**settings, "crop_size": {"height": 30, "width": 30}}
    (folder / "preprocessor_config.json").write_text(json.dumps(turned))
    with pytest.raises(FusionZooError, match="VideoMAEModel cannot encode clips of 4 frames of 30"):
        create_encoder("image", f"hf-video/{folder}")
    assert create_encoder("image", f"hf-video/{folder}", size=32).dim == 16
    other = {**settings, "image_processor_type": "MobileViTImageProcessor"}
    (folder / "preprocessor_config.json").write_text(json.dumps(other))
    with pytest.raises(FusionZooError, match="MobileViTImageProcessor makes another shape"):
        create_encoder("image", f"hf-video/{folder}")
    with pytest.raises(FusionZooError, match=r"no video model 'r3d_8'.* 'r3d_18'"):
        create_encoder("image", "torchvision-video/r3d_8")


def test_torchvisions_frames_are_prepared_as_for_its_weights() -> None:
    import torchvision.models as zoo

    models = zoo.list_models(module=zoo.video)
    transforms = [zoo.get_model_weights(model).DEFAULT.transforms() for model in models]
    for transform in {str(x): x for x in transforms}.values():
        preparation = torchvision_preparation(transform)
        prepare = ClipProcessor(preparation, 2, antialias=False)
        mean, std = (torch.tensor(x)[:, None, None] for x in (preparation.mean, preparation.std))
        for height, width in SHAPES:
            frames = [picture(height, width), picture(height, width).flip(1)]
            expected = transform(torch.stack(frames)).movedim(0, 1) * std + mean
            off = (prepare(frames)["pixels"] / 255 - expected).abs().max()
            assert off < 1.01 / 255  # a level: torchvision rounds in float32


@pytest.mark.slow  # no video model of torchvision is small
@pytest.mark.parametrize(
    ("model", "frames"), [*(("r3d_18", 4), ("s3d", 16), ("swin3d_t", 4), ("mvit_v2_s", 16))]
)
def test_torchvisions_tokens_and_pooled_are_what_its_classifier_reads(
    model: str, frames: int
) -> None:
    import torchvision.models as zoo

    encoder = create_encoder(
        "image", f"torchvision-video/{model}", pretrained=False, num_frames=frames
    )
    features = features_of(encoder, clip(frames))
    bare = zoo.get_model(model, weights=None).eval()
    assert not bare.load_state_dict(encoder.net.state_dict(), strict=False).unexpected_keys
    read: list[Tensor] = []
    head = next(x for name, x in bare.named_children() if name in ("fc", "head", "classifier"))
    head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    pixels = encoder.normalise(encoder.processor(False)(clip(frames))["pixels"])
    with torch.no_grad():
        bare(pixels.movedim(0, 1)[None])
    pooled = read[0].flatten(1)
    torch.testing.assert_close(features.pooled, pooled, rtol=1e-4, atol=1e-5)


def write_table(root: Path) -> Path:
    """Write samples of pictures of a dot; it moves right (class 0) or left."""
    rows: list[dict[str, Any]] = []
    for number in range(16):
        label, places = number % 2, [2, 10, 18, 26]
        names = []
        for frame, place in enumerate(places[::-1] if label else places):
            image = Image.new("RGB", (32, 32))
            image.paste((255, 255, 255), (place, 8 + number, place + 4, 12 + number))
            names.append(f"{number}_{frame}.png")
            image.save(root / names[-1])
        rows.append(
            {
                "id": f"s{number}",
                "image": None if number == 5 else names,
                "text": "a cat",
                "target": ("right", "left")[label],
                "split": "train" if number < 10 else ("val", "test")[label],
            }
        )
    (root / "data.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return root / "data.jsonl"


@pytest.mark.parametrize("freeze", ["none", "all"])  # end to end, and through cached features
def test_a_table_is_trained_predicted_and_embedded(
    freeze: str, videomae: Path, own_cache: Path, tmp_path: Path
) -> None:
    table = write_table(tmp_path)
    run = fz.train(
        fz.create_dataset(table),
        fusion={"name": "concat", "dim": 8},
        encoders={
            "image": {"name": f"hf-video/{videomae}", "freeze": freeze},
            "text": {"name": "chars", "dim": 8, "num_layers": 1, "num_heads": 2},
        },
        out=tmp_path / "run",
        epochs=1,
        num_workers=0,
        log="none",
    )
    rows = [json.loads(line) for line in table.read_text().splitlines()]
    samples = [
        {"text": row["text"], "image": row["image"] and [tmp_path / x for x in row["image"]]}
        for row in rows
    ]
    answers = fz.load(run.folder).predict(samples)
    assert answers == run.model.predict(samples)
    assert len({x.probability for x in answers}) == len(rows)  # each clip is another
    out = fz.embed(run.model, table, out=tmp_path / "embedded.parquet", split="all", num_workers=0)
    ids, vectors = fz.read_embeddings(out, "image")
    pictures = [decode("image", str(path)) for path in samples[3]["image"]]
    encoder = dict(run.model.named_encoders())["image"]
    expected = features_of(encoder, pictures).pooled[0]
    found = torch.tensor(vectors[ids.index("s3")])
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
