"""A model as a `SentenceTransformer`: `wrap(model).encode([{"text": ...}, {"image": ...}])`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fusionzoo.encoders import torchaudio_or_none
from fusionzoo.errors import FusionZooError, explained
from fusionzoo.model.fusion_model import FusionModel
from fusionzoo.structures import Batch


def wrap(model: FusionModel, column: str = "fused") -> Any:
    """Return a `SentenceTransformer` whose vectors are those of `model.embed(...)[column]`.

    A sample is a mapping of modalities, of which any may be missing, or a text alone; one call may
    mix them. Everything that takes a `SentenceTransformer` takes it: losses, evaluators, vector
    stores. To store it, use `model.save`.
    """
    torchaudio_or_none()  # transformers must not import one that fails beside this torch
    with explained("wrap needs pip install 'fusionzoo[sentence-transformers]'", ImportError):
        from sentence_transformers import SentenceTransformer
        from sentence_transformers.base.modules import InputModule
    dims = {name: int(x.shape[1]) for name, x in model.embed([{}]).items()}
    if column not in dims:
        raise FusionZooError(f"the model has no vectors {column!r}; it has {', '.join(dims)}")

    class FusionModule(InputModule):  # type: ignore[misc]
        """The model as the only module of a SentenceTransformer."""

        def __init__(self) -> None:
            super().__init__()
            self.model, self.tokenizer, self.max_seq_length = model, None, None

        @property
        def modalities(self) -> list[str]:
            return [*model.modalities, "message"]  # "message": a sample is a mapping

        def get_embedding_dimension(self) -> int:
            return dims[column]

        def preprocess(self, inputs: list[Any], prompt: Any = None, **_: Any) -> dict[str, Any]:
            rows = [x if isinstance(x, dict) else {"text": x} for x in inputs]
            return {"batch": self.model.batch(rows)}

        def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
            batch: Batch = features["batch"].to(self.model.device)
            vectors: dict[str, Tensor] = self.model.embed(batch)
            return {**features, "sentence_embedding": vectors[column]}

        def save(self, output_path: str, *_: Any, **__: Any) -> None:
            self.model.save(output_path)

    return SentenceTransformer(modules=[FusionModule()], device=str(model.device))
