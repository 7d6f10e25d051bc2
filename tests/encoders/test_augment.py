"""Augmentation: drawn from the sample's seed alone, scaled by one dial, absent in evaluation."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from fusionzoo.datasets import PairedBatchSampler, create_dataset, make_sampler
from fusionzoo.encoders import Encoder, create_encoder
from fusionzoo.encoders.augment import (
    OPERATIONS,
    AugmentedProcessor,
    ChangedClip,
    change_clip,
    change_colours,
    change_text,
    crop,
    draw_masks,
    erase,
    mask_spectrogram,
    misspell,
    no_masks,
    rotate,
    set_augmentation,
    swap_neighbours,
)
from fusionzoo.errors import FusionZooError
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.structures import Audio, Batch

SMALL = {"pretrained": False, "channels": [8, 8, 8, 8], "stem_width": 8}
ENCODERS: dict[str, Any] = {
    "image": {"name": "timm/resnet10t", "size": 32, **SMALL},
    "text": {"name": "chars", "dim": 16, "num_layers": 1},
    "audio": {"name": "mel/resnet10t", "rate": 8000, "num_mels": 40, "duration": 0.3, **SMALL},
}


@pytest.fixture(scope="module")
def model() -> FusionModel:
    return create_model("gmu", ENCODERS, 10, dim=16)


@pytest.fixture(scope="module")
def digits() -> Any:
    return create_dataset("digits", samples=60)


def draws(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def picture(height: int = 24, width: int = 36) -> Tensor:
    return torch.randint(0, 256, (3, height, width), generator=draws(), dtype=torch.uint8)


def loaded(model: FusionModel, dataset: Any, workers: int = 0, **shard: Any) -> dict[str, Any]:
    """Each sample's inputs in the second epoch of a shuffled pass, by id."""
    sampler = make_sampler(dataset, shuffle=True, seed=3, **shard)
    batches = PairedBatchSampler(sampler, 8)
    batches.set_epoch(1)
    loader: Any = DataLoader(
        dataset, batch_sampler=batches, collate_fn=model.collate(train=True), num_workers=workers
    )
    rows = {}
    for batch in loader:
        for row, sample_id in enumerate(batch.ids):
            rows[sample_id] = {
                f"{name}.{key}": x[row]
                for name, inputs in batch.inputs.items()
                for key, x in inputs.items()
                if key in ("pixels", "masks", "lengths")
            }
            text = batch.inputs["text"]
            rows[sample_id]["text"] = text["input_ids"][row][text["attention_mask"][row]]
            audio = batch.inputs["audio"]
            rows[sample_id]["wave"] = audio["wave"][row][: audio["lengths"][row]]
    return rows


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for sample_id, inputs in ours.items():
        for name, x in inputs.items():
            assert torch.equal(x, theirs[sample_id][name]), f"{sample_id}: {name}"


def test_seeds_draw_anew_and_workers_and_ranks_change_nothing(
    model: FusionModel, digits: Any
) -> None:
    set_augmentation(model.named_encoders(), 1.0)
    alone = loaded(model, digits)
    assert_same(loaded(model, digits, workers=2), alone)
    shares = [loaded(model, digits, distributed=(rank, 2)) for rank in (0, 1)]
    assert len(shares[0]) == 30
    assert_same(shares[0] | shares[1], alone)
    set_augmentation(model.named_encoders(), 0.0)
    plain = loaded(model, digits)
    for name in ("image.pixels", "wave"):
        differing = [not torch.equal(alone[key][name], plain[key][name]) for key in plain]
        assert sum(differing) > 55, name
    assert any(not torch.equal(alone[key]["text"], plain[key]["text"]) for key in plain)
    set_augmentation(model.named_encoders(), 1.0)
    collate = model.collate(train=True)
    one, again, other = (collate([digits[(5, seed)]]) for seed in (7, 7, 8))
    for key, name in (("image", "pixels"), ("audio", "wave"), ("audio", "masks")):
        assert torch.equal(one.inputs[key][name], again.inputs[key][name])
        assert not torch.equal(one.inputs[key][name], other.inputs[key][name])


def test_strength_0_is_the_processor_as_it_was(model: FusionModel) -> None:
    set_augmentation(model.named_encoders(), {"strength": 0})
    for _, encoder in model.named_encoders():
        assert type(encoder.loader_processor(True)) is type(encoder.processor(True))


def test_evaluation_is_never_augmented(model: FusionModel, digits: Any) -> None:
    samples = [digits[(row, 1 + row)] for row in range(8)]
    set_augmentation(model.named_encoders(), None)
    plain: Batch = model.collate()(samples)
    set_augmentation(model.named_encoders(), 1.0)
    same: Batch = model.collate()(samples)
    for name, inputs in plain.inputs.items():
        assert inputs.keys() == same.inputs[name].keys()  # type: ignore[union-attr]
        for key, x in inputs.items():  # type: ignore[union-attr]
            assert torch.equal(x, same.inputs[name][key])  # type: ignore[call-overload]
    set_augmentation(model.named_encoders(), 0)


@pytest.mark.parametrize("kind", ["image", "audio", "text"])
def test_only_its_generator_is_drawn_from_and_it_pickles(
    kind: str, model: FusionModel, digits: Any
) -> None:
    set_augmentation(model.named_encoders(), 1.0)
    encoder = dict(model.named_encoders())[kind]
    prepare = pickle.loads(pickle.dumps(encoder.loader_processor(True)))
    assert isinstance(prepare, AugmentedProcessor)
    value = digits[0].values[kind]
    items = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        items.append(prepare(value, draws()))
        assert torch.equal(torch.get_rng_state(), before)
        assert prepare.varies(value)
    assert all(torch.equal(x, items[1][name]) for name, x in items[0].items())
    set_augmentation(model.named_encoders(), 0)


@pytest.mark.parametrize("change", [crop, rotate, change_colours, erase])
def test_a_picture_changes_by_more_the_stronger_and_stays_a_picture(change: Any) -> None:
    image = picture(64, 64).float()
    image = torch.nn.functional.avg_pool2d(image, 9, 1, 4).round().to(torch.uint8)

    def distance(strength: float) -> float:
        total = 0.0
        for seed in range(20):
            changed = change(image, strength, draws(seed))
            assert changed.dtype == torch.uint8
            assert changed.ndim == 3
            if change is crop:
                total += 1 - changed[0].numel() / image[0].numel()
            else:
                assert changed.shape == image.shape
                total += (changed.float() - image.float()).abs().mean().item()
        return total

    assert distance(0.9) > distance(0.3) > 0
    assert distance(1e-9) < 0.1 * distance(0.3)


def test_a_crop_comes_from_the_picture_and_rotated_corners_have_the_colour_of_its_border() -> None:
    image = torch.arange(3 * 40 * 50).reshape(3, 40, 50)
    for seed in range(30):
        part = crop(image, 0.5, draws(seed))
        assert part[0].numel() >= 0.65 * 2000
        assert torch.equal(part[1] - part[0], torch.full_like(part[0], 2000))
        assert bool((part[0].diff(dim=1) == 1).all())
    image = torch.full((3, 33, 33), 250, dtype=torch.uint8)
    image[:, 10:20, 10:20] = 0
    turned = rotate(image, 1.0, draws(0))
    assert not torch.equal(turned, image)
    assert int(turned[:, 0, 0].min()) >= 249


def test_mirror_images_only_on_request_and_never_on_top_of_the_encoder_s() -> None:
    encoder = create_encoder("image", "timm/resnet10t", size=32, **SMALL)
    (note,) = set_augmentation([("image", encoder)], 0.5)
    assert note == "augmented in training: image 0.5 (crop, rotate, colour, erase) (--data.augment)"
    flipped = {"image": {"strength": 0.5, "flip": True, "erase": False}}
    assert "flip" in set_augmentation([("image", encoder)], flipped)[0]
    own = create_encoder("image", "timm/resnet10t", size=32, augment="crop_flip", **SMALL)
    notes = set_augmentation([("image", own)], {"image": {"strength": 0.5, "flip": True}})
    assert "image 0.5 (rotate, colour, erase)" in notes[0]
    assert notes[1] == "image: crop and flip are those of --encoders.image.augment crop_flip"
    item = own.loader_processor(True)(picture(200, 100), draws())
    assert item["pixels"].shape == (3, 32, 32)  # changed at its final size
    assert item["pixels"].dtype == torch.uint8


def clip(frames: int = 4000, rate: int = 8000) -> Audio:
    return Audio(0.3 * torch.sin(torch.arange(frames) * 0.2), rate)


def test_a_changed_clip_read_in_part_is_part_of_the_whole() -> None:
    for shift in (-700, 0, 900, 9000):
        changed = ChangedClip(clip(), 0.5, 0.0, shift, 1)
        whole = changed.samples
        assert len(whole) == 4000
        for start, count in ((0, 100), (300, 1000), (3900, 500), (5000, 10)):
            assert torch.equal(changed.read(start, count), whole[start : start + count])
        moved = torch.zeros(4000)
        source = torch.arange(4000) - shift
        inside = (source >= 0) & (source < 4000)
        moved[inside] = 0.5 * clip().samples[source[inside]]
        assert torch.equal(whole, moved)


def test_gain_and_noise_stay_within_what_the_strength_allows() -> None:
    loudest = []
    for seed in range(40):
        changed = change_clip(clip(), 0.5, ("gain", "noise"), draws(seed))
        wave, plain = changed.samples, clip().samples
        gain = float((wave @ plain) / (plain @ plain))
        noise = (wave - gain * plain).std() / (gain * plain).std()
        assert 10 ** (-5.2 / 20) < gain < 10 ** (5.2 / 20)
        assert 10 ** (-50.5 / 20) < float(noise) < 10 ** (-29.5 / 20)
        loudest.append(gain)
    assert max(loudest) > 1.3
    assert min(loudest) < 0.8
    silent = change_clip(Audio(torch.zeros(100), 8000), 1.0, OPERATIONS["audio"], draws())
    assert not silent.samples.any()
    assert len(change_clip(clip(0), 1.0, OPERATIONS["audio"], draws()).samples) == 0


def test_masks_cover_what_was_drawn_which_is_no_wider_than_the_strength_allows() -> None:
    bands = torch.rand(2, 10, 20)
    masks = torch.stack([no_masks(), no_masks()])
    masks[1, 0] = torch.tensor([0.2, 0.3])  # bands 2, 3, 4
    masks[1, 2] = torch.tensor([0.5, 0.2])  # 0.5 to 0.7 of the clip's 10 frames
    length = torch.tensor([1.0, 0.5])
    masked = mask_spectrogram(bands, masks, length)
    assert torch.equal(masked[0], bands[0])
    hidden = torch.zeros(10, 20, dtype=torch.bool)
    hidden[2:5] = True
    hidden[:, 5:7] = True
    assert torch.equal(masked[1] != bands[1], hidden)
    torch.testing.assert_close(masked[1, 2, 0], bands[1, :, :10].mean())
    drawn = torch.stack([draw_masks(0.5, draws(seed)) for seed in range(200)])
    start, width = drawn.unbind(-1)
    assert bool((start >= 0).all() and (start + width <= 1).all())
    assert 0.14 < float(width[:, :2].max()) <= 0.15
    assert 0.09 < float(width[:, 2:].max()) <= 0.1


@pytest.mark.parametrize("name", ["mel/resnet10t", "mel/stats"])
def test_spectrogram_masks_reach_the_features_and_padding_does_not(name: str) -> None:
    settings = {"duration": 0.5, **SMALL} if name != "mel/stats" else {}
    encoder = create_encoder("audio", name, rate=8000, num_mels=40, **settings).eval()
    set_augmentation([("audio", encoder)], {"audio": {"strength": 1.0, "gain": False}})
    prepare = encoder.loader_processor(True)
    item, plain = prepare(clip(), draws()), prepare.blank()
    assert torch.equal(plain["masks"], no_masks())
    together = prepare.collate([item, prepare(clip(2000), draws(2))])
    assert together["masks"].shape == (2, 4, 2)
    masked = encoder(together).pooled
    torch.testing.assert_close(encoder(prepare.collate([item])).pooled[0], masked[0])
    unmasked = encoder({**together, "masks": torch.zeros_like(together["masks"])}).pooled
    assert not torch.allclose(masked, unmasked, atol=1e-3)
    del together["masks"]
    torch.testing.assert_close(encoder(together).pooled, unmasked)


def test_words_are_dropped_swapped_and_misspelt_as_often_as_the_strength_says() -> None:
    words = [f"word{i}" for i in range(400)]
    text = " ".join(words)
    shares = []
    for strength in (0.3, 0.9):
        dropped = change_text(text, strength, ("drop",), draws()).split()
        assert [w for w in words if w in set(dropped)] == dropped
        swapped = change_text(text, strength, ("swap",), draws()).split()
        assert sorted(swapped) == sorted(words)
        typos = change_text(text, strength, ("typos",), draws()).split()
        wrong = sum(a != b for a, b in zip(typos, words, strict=True))
        moved = sum(a != b for a, b in zip(swapped, words, strict=True)) / 2
        shares.append((1 - len(dropped) / 400, moved / 400, wrong / 400))
    for weak, strong in zip(*shares, strict=True):
        assert 0 < weak < strong
    assert 0.13 < shares[1][0] < 0.23


def test_a_text_never_loses_its_last_word_and_keeps_its_spaces_where_nothing_is_drawn() -> None:
    assert all(change_text("cat", 1.0, ("drop",), draws(seed)) == "cat" for seed in range(40))
    assert change_text("  a\tb  ", 1e-9, OPERATIONS["text"], draws()) == "  a\tb  "
    assert change_text("", 1.0, OPERATIONS["text"], draws()) == ""
    assert swap_neighbours(["a", "b", "c"], [0.0, 0.0, 0.0], 0.1) == ["b", "a", "c"]
    letters = {misspell("日本語", 0.5, draws(seed)) for seed in range(30)}
    assert len(letters) > 3
    assert set("".join(letters)) == set("日本語")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (1.5, r"augment.strength 1.5: it must be from 0 to 1"),
        ({"image": "strong"}, r"augment.image.strength='strong'; it must be a number"),
        ({"imgae": 0.5}, r"no modality 'imgae'. Did you mean 'image'"),
        ({"image": {"strength": 0.5, "colr": True}}, r"image.colr: no such .* 'colour'"),
        ({"image": {"flip": "no"}}, r"image.flip 'no': it must be true or false"),
        ({"vector": 0.5}, r"'vector' is of kind vector, and only image, audio, text"),
    ],
)
def test_a_wrong_setting_is_one_line(settings: Any, message: str) -> None:
    encoders: dict[str, Encoder] = {
        "image": create_encoder("image", "timm/resnet10t", size=32, **SMALL),
        "vector": create_encoder("vector", "vector/identity", in_dim=3),
    }
    with pytest.raises(FusionZooError, match=message) as error:
        set_augmentation(encoders.items(), settings)
    assert "\n" not in str(error.value)


def test_nothing_to_augment_is_an_error_and_not_silence() -> None:
    vector = create_encoder("vector", "vector/identity", in_dim=3)
    with pytest.raises(FusionZooError, match="the modalities are of kind vector"):
        set_augmentation([("vector", vector)], 0.5)
    audio = create_encoder("audio", "mel/stats")
    audio.masks_spectrogram = False
    with pytest.raises(FusionZooError, match="does not mask its spectrogram"):
        set_augmentation([("audio", audio)], {"audio": {"strength": 0.5, "mask": True}})
