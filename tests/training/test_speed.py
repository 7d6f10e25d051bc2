"""Recomputing, compiling and memory formats: less memory or time, the same weights."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import counters

from fusionzoo.config import RunConfig, from_tree
from fusionzoo.encoders import create_encoder
from fusionzoo.model.fusion_model import FusionModel, create_model
from fusionzoo.scripts.train import main as train
from fusionzoo.structures import Batch
from fusionzoo.training.recompute import blocks, save_memory_and_compile

SMALL = {"name": "timm/resnet10t", "pretrained": False, "size": 32}


def make(fusion: str = "gmu") -> FusionModel:
    torch.manual_seed(0)
    return create_model(fusion, {"image": SMALL, "text": "chars"}, 3, dim=16)


def make_batch(rows: int, length: int, seed: int = 0) -> Batch:
    draw = torch.Generator().manual_seed(seed)
    pixels = torch.randint(0, 256, (rows, 3, 32, 32), generator=draw, dtype=torch.uint8)
    ids = torch.randint(0, 256, (rows, length), generator=draw)
    text = {"input_ids": ids, "attention_mask": torch.ones_like(ids, dtype=torch.bool)}
    present = torch.ones(rows, 2, dtype=torch.bool)
    present[0, 1] = False
    return Batch(
        list(map(str, range(rows))), {"image": {"pixels": pixels}, "text": text}, present, None
    )


def learn(model: FusionModel, batches: list[Batch]) -> dict[str, torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        torch.manual_seed(len(batch.ids))  # the same dropout
        model(batch).logits.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def test_recomputed_activations_change_nothing() -> None:
    plain, frugal = make(), make()
    save_memory_and_compile(frugal, from_tree(RunConfig, {"train": {"checkpointing": True}}).train)
    batches = [make_batch(4, 9, seed) for seed in range(3)]
    wanted, found = learn(plain, batches), learn(frugal, batches)
    assert wanted.keys() == found.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-6, atol=1e-7)


def test_activations_are_recomputed_as_often_as_a_strategy_goes_backward(tmp_path: Path) -> None:
    run = ["--data.name", "interactions", "--data.samples", "60", "--log", "none"]
    run += ["--train.epochs", "1", "--balance", "mmpareto", "--train.checkpointing"]
    assert train([*run, "--out", str(tmp_path)]) == 0


def test_recomputing_saves_activations_and_a_copy_reads_its_own_weights() -> None:
    def held(model: FusionModel) -> int:
        sizes, weights = [], {p.data_ptr() for p in model.parameters()}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            sizes.append(0 if tensor.data_ptr() in weights else tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            model(make_batch(16, 64))
        return sum(sizes)

    plain, frugal = make(), make()
    save_memory_and_compile(frugal, from_tree(RunConfig, {"train": {"checkpointing": True}}).train)
    assert held(frugal) < 0.5 * held(plain)
    model = make()
    save_memory_and_compile(model, from_tree(RunConfig, {"train": {"checkpointing": True}}).train)
    other = copy.deepcopy(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    learn(other, [make_batch(4, 9)])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


@pytest.mark.parametrize("model", ["vit_tiny_patch16_224", "resnet10t", "convnext_atto"])
def test_every_kind_of_network_has_blocks(model: str) -> None:
    encoder = create_encoder("image", f"timm/{model}", pretrained=False)
    assert sum(1 for _ in blocks(encoder)) >= 4


def test_channels_last_learns_the_same() -> None:
    plain, fast = make().double(), make().double()  # batch norms blow up what float32 rounds
    save_memory_and_compile(fast, from_tree(RunConfig, {"train": {"channels_last": True}}).train)
    assert any(
        p.ndim == 4 and p.is_contiguous(memory_format=torch.channels_last) and p.shape[1] > 1
        for p in fast.encoders["image"].parameters()
    )
    batches = [make_batch(4, 9, seed) for seed in range(2)]
    wanted, found = learn(plain, batches), learn(fast, batches)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore")  # of torch, about itself
def test_compiled_training_learns_the_same_and_does_not_compile_for_every_batch() -> None:
    chars = {"name": "chars", "dim": 16, "num_layers": 1, "dropout": 0.0}
    vector = {"name": "vector/identity", "in_dim": 5}
    torch.manual_seed(0)
    plain = create_model("gmu", {"vector": vector, "text": chars}, 3, dim=16)
    fast = copy.deepcopy(plain)
    save_memory_and_compile(fast, from_tree(RunConfig, {"train": {"compile": True}}).train)
    batches = []
    for rows, length in [(4, 9), (6, 12), (5, 15), (7, 20), (8, 33), (3, 17), (9, 28)]:
        batch = make_batch(rows, length, length)
        values = torch.randn(rows, 5, generator=torch.Generator().manual_seed(length))
        text = batch.inputs["text"]
        batches.append(batch._replace(inputs={"vector": {"values": values}, "text": text}))
    counters.clear()
    learn(fast, batches[:3])
    compiled = counters["stats"]["unique_graphs"]
    assert compiled
    found = learn(fast, batches[3:])
    assert counters["stats"]["unique_graphs"] == compiled
    learn(plain, batches[:3])
    for name, tensor in learn(plain, batches[3:]).items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-3, atol=1e-4)
