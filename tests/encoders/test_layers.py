"""Layers, partial freezing and adapters: the rule, and what real training steps leave as it was."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fusionzoo
from fusionzoo.encoders import Encoder, create_encoder
from fusionzoo.encoders.base import layer_numbers
from fusionzoo.errors import FusionZooError
from helpers import tiny_models as tiny

SCRATCH: dict[str, Any] = {"pretrained": False}
SIZES = {"img_size": 32, "patch_size": 16, "embed_dim": 24, "depth": 3, "num_heads": 2}
VIT = {"name": "timm/vit_tiny_patch16_224", **SCRATCH, **SIZES}
RESNET = {"name": "timm/resnet10t", **SCRATCH, "size": 32}


@pytest.fixture
def bert(tmp_path: Path) -> dict[str, Any]:
    """A tiny BERT of two layers, as a local folder."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "c"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(vocab=str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=8, intermediate_size=32, **sizes)
    BertModel(config).save_pretrained(tmp_path)
    return {"name": f"hf/{tmp_path}"}


def build(modality: str, spec: dict[str, Any], **settings: Any) -> Encoder:
    spec = {**spec, **settings}
    return create_encoder(modality, spec.pop("name"), **spec)


def inputs(encoder: Encoder) -> dict[str, torch.Tensor]:
    if encoder.kind == "image":
        return {"pixels": torch.randint(256, (4, 3, 32, 32), dtype=torch.uint8)}
    return {
        "input_ids": torch.randint(5, 8, (4, 6)),
        "attention_mask": torch.ones(4, 6, dtype=torch.bool),
    }


def train(encoder: Encoder, steps: int = 3) -> set[str]:
    """Take real steps in training mode; return the names of the tensors that moved."""
    before = {name: x.clone() for name, x in encoder.state_dict().items()}
    optimizer = torch.optim.AdamW([p for p in encoder.parameters() if p.requires_grad], lr=0.01)
    for _ in range(steps):
        encoder.train()
        features = encoder(inputs(encoder))
        (features.tokens.square().mean() + features.pooled.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name for name, x in encoder.state_dict().items() if not torch.equal(x, before[name])}


@pytest.mark.parametrize("spec", [VIT, RESNET], ids=["vit", "resnet"])
def test_the_layers_of_timms_models_are_timms_own(spec: dict[str, Any]) -> None:
    from timm.optim import param_groups_layer_decay

    encoder = build("image", spec)
    scale = {
        id(p): group["lr_scale"]
        for group in param_groups_layer_decay(encoder.net, layer_decay=0.5)
        for p in group["params"]
    }
    numbers = layer_numbers(encoder)
    top = max(numbers.values())
    assert top >= 3
    for name, parameter in encoder.named_parameters():
        assert scale[id(parameter)] == 0.5 ** (top - numbers[name]), name


def test_the_layers_of_a_transformer_are_embeddings_then_blocks_and_rest_if_frozen(
    bert: dict[str, Any],
) -> None:
    for name, number in layer_numbers(build("text", bert)).items():
        wanted = 2 if "layer.1." in name else 1 if "layer.0." in name else 0  # no feature is pooled
        assert number == wanted, name
    encoder = build("text", bert, freeze="all_but_last_1").train()
    assert not encoder.net.embeddings.dropout.training
    assert not encoder.net.encoder.layer[0].attention.output.dropout.training
    assert encoder.net.encoder.layer[1].attention.output.dropout.training


class WithNeck(nn.Module):
    """Calls layers that its answer does not depend on, as the neck of SAM 3 is."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.neck = nn.ModuleList(nn.Linear(4, 40) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks[:2]:
            x = block(x)
        for layer in (*self.neck, self.blocks[2]):
            layer(x)
        return x


def test_layers_that_no_feature_depends_on_are_none() -> None:
    encoder = fusionzoo.wrap_encoder(WithNeck(), dim=4, kind="vector", blank=torch.zeros(4))
    frozen = next(encoder.parameters()).requires_grad_(False)
    fusionzoo.create_model("concat", {"vector": encoder}, 2, dim=4)
    assert not frozen.requires_grad and encoder.training
    numbers = layer_numbers(encoder)
    read = {name: x for name, x in numbers.items() if name not in encoder.unread}
    assert [*read.values()] == [1, 1, 2, 2]
    assert all(".blocks." in name for name in read)
    assert {numbers[name] for name in encoder.unread} == {0}


def test_elsewhere_layers_are_the_children_in_order() -> None:
    numbers = layer_numbers(build("image", {"name": "torchvision/resnet18", **SCRATCH}))
    assert numbers["net.conv1.weight"] == numbers["net.bn1.bias"] == 0
    assert numbers["net.layer1.0.conv1.weight"] == 1
    assert list(numbers.values()) == sorted(numbers.values())
    assert layer_numbers(create_encoder("v", "vector/identity", kind="vector", in_dim=3)) == {}
    table = layer_numbers(nn.Linear(2, 2))
    assert table == {"weight": 0, "bias": 0}


def test_all_but_the_last_layers_stay_bit_for_bit(bert: dict[str, Any]) -> None:
    for modality, spec, last in (("text", bert, 1), ("image", VIT, 2), ("image", RESNET, 1)):
        encoder = build(modality, spec, freeze=f"all_but_last_{last}")
        numbers = layer_numbers(encoder)
        # A running statistic belongs where its norm's weight does.
        layer = {name.rpartition(".")[0]: number for name, number in numbers.items()}
        moved = {layer[name.rpartition(".")[0]] for name in train(encoder)}
        top = max(numbers.values())
        assert moved == set(range(top + 1 - last, top + 1))


def test_norm_freezes_norms_and_their_statistics_and_trains_the_rest() -> None:
    encoder = build("image", RESNET, freeze="norm")
    norms = [m for m in encoder.modules() if isinstance(m, nn.BatchNorm2d)]
    kept = {
        f"{name}.{key}"
        for name, m in encoder.named_modules()
        if any(m is norm for norm in norms)
        for key in m.state_dict()
    }
    moved = train(encoder)
    assert kept
    assert not moved & kept
    assert {name for name, _ in encoder.named_parameters()} - kept <= moved


@pytest.mark.parametrize(
    ("freeze", "says"),
    [
        ("all_but_last_9", "freeze='all_but_last_9': the encoder has only 3 layers"),
        ("all_but_last_0", "Did you mean 'all_but_last_<n>'?"),
        ("nrom", "freeze='nrom' is not one of none, all, all_but_last_<n>, norm. Did you mean"),
    ],
)
def test_a_wrong_freeze_is_one_clear_error(freeze: str, says: str, bert: dict[str, Any]) -> None:
    with pytest.raises(FusionZooError) as caught:
        build("text", bert, freeze=freeze)
    assert says in str(caught.value)
    with pytest.raises(FusionZooError, match="it has no normalisation layer"):
        create_encoder("v", "vector/identity", kind="vector", in_dim=3, freeze="norm")


LORA = {"r": 4, "alpha": 8, "dropout": 0.1}


@pytest.mark.needs("peft")
def test_lora_changes_nothing_at_first_and_trains_only_adapters(bert: dict[str, Any]) -> None:
    for modality, spec, per_layer in (("text", bert, 4), ("image", VIT, 2)):
        encoder = build(modality, spec, lora=LORA).eval()
        given = inputs(encoder)
        if modality == "text":
            plain = build(modality, spec).eval()
            torch.testing.assert_close(encoder(given).pooled, plain(given).pooled)
        adapters = {name for name, p in encoder.named_parameters() if p.requires_grad}
        layers = max(layer_numbers(encoder).values())
        assert len(adapters) == per_layer * layers  # A and B of each chosen projection
        assert all("lora_" in name for name in adapters)
        assert train(encoder) == adapters


@pytest.mark.needs("peft")
def test_a_model_with_lora_loads_as_it_was_saved(tmp_path: Path, bert: dict[str, Any]) -> None:
    encoders = {"text": {**bert, "lora": LORA}, "image": {**VIT, "lora": {}}}
    model = fusionzoo.create_model("gmu", encoders, 3, dim=8)
    for _, encoder in model.named_encoders():
        train(encoder)
    model.save(tmp_path / "model")
    for file in Path(bert["name"].removeprefix("hf/")).glob("*"):
        if file.is_file():
            file.unlink()  # the folder stands alone
    loaded = fusionzoo.load(tmp_path / "model")
    ours, theirs = model.state_dict(), loaded.state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    sample = [{"text": "a b c"}, {"text": "c"}]
    assert torch.equal(model.embed(sample)["fused"], loaded.embed(sample)["fused"])
    trained = [sum(p.requires_grad for p in m.parameters()) for m in (model, loaded)]
    assert trained[0] == trained[1]


EVA = {"name": "timm/eva02_tiny_patch14_224", **SCRATCH, "depth": 1, "img_size": 28}


@pytest.mark.needs("peft")
def test_lora_is_put_where_the_network_calls_a_layer(tmp_path: Path) -> None:
    """EVA-02 reads the weights of its `qkv` itself."""
    model = fusionzoo.create_model("concat", {"image": {**EVA, "lora": {"r": 2}}}, 2, dim=8)
    encoder = model.encoders["image"]
    blank = encoder.processor(False).blank()
    encoder(encoder.processor(False).collate([blank])).pooled.sum().backward()
    adapters = {name: p for name, p in encoder.named_parameters() if p.requires_grad}
    assert adapters and all(p.grad is not None for p in adapters.values())
    assert all(".attn.proj.lora_" in name for name in adapters)
    model.save(tmp_path / "model")
    loaded = fusionzoo.load(tmp_path / "model").encoders["image"]
    assert loaded.spec["lora"] == {"r": 2, "targets": ["attn.proj"]}
    match = r"lora\.targets: an adapter beside .*qkv has no effect"
    with pytest.raises(FusionZooError, match=match):
        build("image", EVA, lora={"targets": ["qkv"]})


@pytest.mark.parametrize("model", ["mobilenetv3_small_050", "test_mambaout", "lcnet_035"])
def test_a_head_that_no_feature_reads_is_removed_and_old_weights_load(model: str) -> None:
    import timm

    spec = {"name": f"timm/{model}", **SCRATCH, "size": 64}
    encoder = build("image", spec)
    whole = timm.create_model(model, pretrained=False, num_classes=0)
    net: Any = encoder.net
    gone = whole.state_dict().keys() - net.state_dict().keys()
    assert gone and {key.partition(".")[0] for key in gone} <= {"head", "conv_head"}
    net.load_state_dict(whole.state_dict(), strict=True)
    last = build("image", spec, freeze="all_but_last_1")
    pixels = {"pixels": torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)}
    features = last(pixels)
    (features.pooled.sum() + features.tokens.sum()).backward()
    trained = [p for p in last.parameters() if p.requires_grad]
    assert trained and all(p.grad is not None for p in trained)


@pytest.mark.parametrize(
    ("model", "settings", "says"),
    [
        ("swin_tiny_patch4_window7_224", {"size": 64}, "built for another by img_size=64"),
        ("resnet10t", {"in_chans": 1}, "in three channels with {'in_chans': 1}"),
        ("resnet10t", {"features_only": True}, "features_only"),
    ],
)
def test_what_a_timm_model_cannot_encode_is_one_clear_error(
    model: str, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(FusionZooError, match=f"timm/{model} cannot encode") as caught:
        build("image", {"name": f"timm/{model}", **SCRATCH, **settings})
    assert says in str(caught.value)


@pytest.mark.parametrize("model", ["test_vit", "resnet10t"])
def test_without_pooling_of_its_own_a_timm_model_is_pooled_by_the_mean(model: str) -> None:
    spec = {"name": f"timm/{model}", **SCRATCH, "size": 160, "global_pool": ""}
    encoder = build("image", spec).eval()
    pixels = {"pixels": torch.randint(256, (2, 3, 160, 160), dtype=torch.uint8)}
    features = encoder(pixels)
    torch.testing.assert_close(features.pooled, features.tokens.mean(1))


@pytest.mark.needs("peft")
def test_lora_that_would_train_nothing_is_an_error(tmp_path: Path) -> None:
    """MRA answers zeros for its attention where its CUDA kernel is missing."""
    from transformers import MraConfig, MraModel

    settings = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 64}
    config = MraConfig(vocab_size=60, num_hidden_layers=1, num_attention_heads=2, **settings)
    MraModel(config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    with pytest.raises(
        FusionZooError, match=r"text\.lora: nothing would be trained, as no feature"
    ):
        create_encoder("text", f"hf/{tmp_path}", lora={"r": 2})


@pytest.mark.needs("peft")
def test_lora_fits_an_audio_transformer(tmp_path: Path) -> None:
    from transformers import Wav2Vec2Config, Wav2Vec2FeatureExtractor, Wav2Vec2Model

    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    convs = {"conv_dim": (8,) * 3, "conv_kernel": (10, 3, 3), "conv_stride": (5, 4, 4)}
    places = {"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
    config = Wav2Vec2Config(intermediate_size=16, **places, **sizes, **convs)
    Wav2Vec2Model(config).save_pretrained(tmp_path)
    Wav2Vec2FeatureExtractor().save_pretrained(tmp_path)
    encoder = create_encoder("audio", f"hf/{tmp_path}", lora={"r": 2})
    adapters = [name for name, p in encoder.named_parameters() if p.requires_grad]
    assert len(adapters) == 8
    assert {layer_numbers(encoder)[name] for name in adapters} == {1, 2}


@pytest.mark.needs("peft")
def test_a_wrong_lora_is_one_clear_error(
    bert: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for spec, settings, says in (
        (bert, {"lora": {"rank": 4}}, "lora.rank: lora has no such setting"),
        (bert, {"lora": True}, "lora is a group of settings: give encoders.text.lora.r 8"),
        (bert, {"lora": {"r": "many"}}, "encoders.text.lora: "),
        (bert, {"lora": {"r": 0}}, "lora: `r` should be a positive integer"),
        (bert, {"lora": {"targets": ["qq"]}}, "lora: Target modules"),
        (bert, {"lora": {}, "freeze": "norm"}, "lora freezes the encoder itself"),
        ({"name": "chars"}, {"lora": {}}, "Chars has no attention layers under known names"),
    ):
        with pytest.raises(FusionZooError) as caught:
            build("text", spec, **settings)
        assert says in str(caught.value)
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(FusionZooError, match=r"needs peft: pip install 'fusionzoo\[lora\]'"):
        build("text", bert, lora={})
