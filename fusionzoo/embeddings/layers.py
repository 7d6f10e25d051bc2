"""Features of an inner layer of an encoder, pooled to a vector per sample, read as a model runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fusionzoo.encoders import Encoder
from fusionzoo.encoders.image import channels_last
from fusionzoo.errors import FusionZooError, check_known, did_you_mean
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.structures import ITEM_COUNTS, Batch, Features, masked_mean

WITHOUT_PADDING = ("image",)  # kinds whose positions are all real
Layers = tuple[tuple[str, str], ...]  # modality and name of a layer


def read_setting(setting: str | Mapping[str, str | Sequence[str]]) -> Layers:
    """Read `image=layer3,text=encoder.layer.2`, or the same as a mapping.

    >>> read_setting("image=layer2,image=layer3"), read_setting({"text": "encoder.layer.2"})
    ((('image', 'layer2'), ('image', 'layer3')), (('text', 'encoder.layer.2'),))
    """
    if isinstance(setting, Mapping):
        lists = {m: [x] if isinstance(x, str) else x for m, x in setting.items()}
        return tuple((modality, str(name)) for modality, names in lists.items() for name in names)
    words = [word.strip() for word in setting.split(",") if word.strip()]
    for word in words:
        if not all(word.partition("=")[::2]):
            raise FusionZooError(f"--layer {word}: expected MODALITY=LAYER, such as image=layer3")
    return tuple((word.partition("=")[0].strip(), word.partition("=")[2].strip()) for word in words)


def layer_names(encoder: Encoder) -> list[str]:
    """Return the names of all layers, as `named_modules` of the encoder's network has them."""
    return [name for name, _ in _network(encoder).named_modules() if name]


def check_layers(model: FusionModel, layers: Layers) -> None:
    """Raise an error that names a modality or a layer that a model has not."""
    encoders = dict(model.named_encoders())
    for modality, name in layers:
        problem = f"--layer {modality}={name}: the model has no modality {modality!r}"
        check_known(modality, encoders, problem)
        names = layer_names(encoders[modality])
        if name not in names:
            raise FusionZooError(
                f"--layer {modality}={name}: the encoder has no layer {name!r}."
                f"{did_you_mean(name, names)} `fusionzoo zoo info"
                f" {encoders[modality].spec.get('name')} --layers` lists all {len(names)}"
            )


def column_of(modality: str, layer: str) -> str:
    """Return the name of a layer's column.

    >>> column_of("text", "encoder.layer.2")
    'text_encoder_layer_2'
    """
    return f"{modality}_{layer.replace('.', '_')}"


@contextmanager
def reading_layers(model: FusionModel, layers: Layers) -> Iterator[list[LayerReader]]:
    """Read layers of all batches that the model encodes in this block."""
    encoders = dict(model.named_encoders())
    readers = [LayerReader(modality, encoders[modality], name) for modality, name in layers]
    try:
        for reader in readers:
            reader.start()
        yield readers
    finally:
        for reader in reversed(readers):
            reader.stop()


class LayerReader:
    """One layer of one encoder: notes its output, pooled, whenever the encoder runs."""

    def __init__(self, modality: str, encoder: Encoder, layer: str) -> None:
        self.modality, self.encoder, self.layer = modality, encoder, layer
        self.column = column_of(modality, layer)
        self._encode = encoder.encode
        self._outputs: list[Any] = []  # of the layer, in one run of the encoder
        self._pooled: list[Tensor] = []  # one for each run

    def start(self) -> None:
        """Listen to the layer."""
        module = _network(self.encoder).get_submodule(self.layer)
        self._hook = module.register_forward_hook(
            lambda module, inputs, output: self._outputs.append(output)
        )
        self._encode = self.encoder.encode  # perhaps that of another reader
        self.encoder.encode = self._encode_and_note  # type: ignore[method-assign]

    def stop(self) -> None:
        """Leave the encoder as it was."""
        self._hook.remove()
        self.encoder.encode = self._encode  # type: ignore[method-assign]

    def _encode_and_note(self, inputs: Mapping[str, Tensor]) -> Features:
        self._outputs.clear()
        features = self._encode(inputs)
        if len(self._outputs) != 1:
            raise FusionZooError(
                f"--layer {self.modality}={self.layer}: the layer runs {len(self._outputs)} times"
                " for a batch, so its outputs belong to no one place; choose another layer"
            )
        self._pooled.append(self._pool(_tensor(self._outputs[0]), features.mask))
        return features

    def _pool(self, x: Tensor | None, mask: Tensor) -> Tensor:
        """Average over positions, padding left out: a layer's output -> (B, D)."""
        network = _network(self.encoder)
        if x is not None and x.ndim == 4:  # a feature map
            x = x.flatten(1, 2) if channels_last(network) else x.flatten(2).transpose(1, 2)
        elif x is not None and x.ndim == 3 and self.encoder.kind in WITHOUT_PADDING:
            x = x[:, getattr(network, "num_prefix_tokens", 0) :]
        is_padded = x is not None and x.ndim == 3 and self.encoder.kind not in WITHOUT_PADDING
        expected = mask.shape if is_padded else mask.shape[:1]
        if x is None or x.ndim not in (2, 3) or x.shape[: len(expected)] != expected:
            returned = "no tensor" if x is None else f"a tensor {tuple(x.shape)}"
            raise FusionZooError(
                f"--layer {self.modality}={self.layer}: the layer returns {returned}, in which the"
                f" positions of {len(mask)} samples of {mask.shape[1]} tokens cannot be told;"
                " choose another layer"
            )
        if x.ndim == 2:
            return x.float()
        return masked_mean(x.float(), mask) if is_padded else x.float().mean(1)

    def vectors(self, batch: Batch, present: Tensor) -> Tensor:
        """Return a vector per sample of the batch that was encoded: (B, D), zeros where absent."""
        if not self._pooled:
            prepare = self.encoder.processor(False)
            blank = prepare.collate([prepare.blank()])
            self.encoder({name: x.to(present.device) for name, x in blank.items()})
            width = self._pooled.pop().shape[1]
            return torch.zeros(len(present), width, device=present.device)
        rows = torch.cat(self._pooled)
        counts = batch.inputs[self.modality].get(ITEM_COUNTS)  # type: ignore[union-attr]
        if counts is not None:  # the rows are items of samples
            counts = counts[present]
            owner = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
            sums = rows.new_zeros(len(counts), rows.shape[1]).index_add(0, owner, rows)
            rows = sums / counts[:, None]
        every = rows.new_zeros(len(present), rows.shape[1])
        return every.index_copy(0, present.nonzero()[:, 0], rows)


def _network(encoder: Encoder) -> nn.Module:
    """Return the library's model inside an encoder, else the encoder itself."""
    net = getattr(encoder, "net", None)
    return net if isinstance(net, nn.Module) else encoder


def _tensor(output: Any) -> Tensor | None:
    """Return the first tensor of a layer's output: a tensor, a tuple, or one of Hugging Face's."""
    if isinstance(output, Tensor):
        return output
    values = output.values() if isinstance(output, Mapping) else output
    if not isinstance(values, tuple | list) and not isinstance(output, Mapping):
        return None
    return next((x for x in values if isinstance(x, Tensor)), None)
