"""A batch is tokenised in one call; pixels are normalised in the memory of their copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fusionzoo.datasets import Collate
from fusionzoo.encoders import create_encoder
from fusionzoo.encoders.augment import Augmentation, AugmentedProcessor
from fusionzoo.encoders.base import Item, Processor
from fusionzoo.encoders.text import TokenizerProcessor
from fusionzoo.errors import FusionZooError
from fusionzoo.structures import Batch, Inputs, Sample
from helpers import tiny_models as tiny

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
