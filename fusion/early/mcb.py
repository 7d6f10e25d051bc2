"""Compact bilinear pooling: the outer product, hashed to a few thousand dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fusionzoo.errors import check_number
from fusionzoo.structures import Features, FusionOutput

from ..base import FUSIONS, Fusion, RunningMeans, power_norm


@FUSIONS.register(
    family="early", paper="Fukui et al. 2016, arXiv:1606.01847", reads="pooled", linear_skip=True
)
class MCB(Fusion):
    """Approximate the outer product of the modalities by convolving their count sketches.

    psi_m[j] = sum over i with h_m(i) = j of s_m(i) x_m[i]; z = irfft(prod_m rfft(psi_m)) is the
    count sketch of the outer product with h = sum_m h_m mod J and s = prod_m s_m. embedding =
    W norm(z) + c, where norm is the signed square root followed by L2 normalisation. The hashes are
    buffers with a seed of their own; the FFT runs in single precision or better. Differs from the
    paper: a 1 is prepended to x_m, so that z also contains the lower orders.

    Missing: the sketch of its training mean.
    Pitfall: modalities must not share hashes, or the estimate is biased.
    Use when: features are so wide that other outer-product fusions are too large.

    Settings:
        sketch_dim: dimensions J of the count sketch, at least 2; a power of two is fastest, and
            exact in other runtimes (paper: 16000)
        normalise: whether to apply the signed square root and L2 normalisation to the sketch
        with_one: whether to prepend a 1 to each modality (paper: False)
        hash_seed: seed of the hash functions, which are fixed after construction

    Shapes:
        features[name].pooled: (B, dims[name])
        returns: embedding (B, dim), logits (B, K)
    """

    symmetric = True

    def __init__(
        self,
        dims: Mapping[str, int],
        dim: int,
        num_outputs: int,
        *,
        sketch_dim: int = 16384,
        normalise: bool = True,
        with_one: bool = True,
        hash_seed: int = 0,
    ) -> None:
        super().__init__(dims, dim, num_outputs)
        check_number("sketch_dim", sketch_dim, 2)
        self.sketch_dim, self.normalise, self.with_one = sketch_dim, normalise, with_one
        generator = torch.Generator().manual_seed(hash_seed)
        for name, width in dims.items():
            size = (width + with_one,)
            bucket = torch.randint(sketch_dim, size, generator=generator)
            sign = torch.randint(2, size, generator=generator) * 2 - 1
            self.register_buffer(f"bucket_{name}", bucket)
            self.register_buffer(f"sign_{name}", sign.to(torch.int8))
        self.means = RunningMeans(dims)
        self.out = nn.Linear(sketch_dim, dim)
        self.head = nn.Linear(dim, num_outputs)

    def forward(self, features: Mapping[str, Features]) -> FusionOutput:
        present = self.present(features)
        vectors = self.means(self.pooled(features), present)
        z = self.sketch(vectors).to(next(iter(vectors.values())).dtype)
        fused = self.out(power_norm(z) if self.normalise else z)
        embedding = self.or_null(fused, present)
        return FusionOutput(embedding, self.head(embedding), {}, None)

    def sketch(self, vectors: Mapping[str, Tensor]) -> Tensor:
        """Return the count sketch of the vectors' outer product, (B, J)."""
        first = next(iter(vectors.values()))
        if not first.shape[0]:
            return first.new_zeros(0, self.sketch_dim)  # the FFT refuses an empty batch
        spectra = []
        for name, x in vectors.items():
            x = x if x.dtype == torch.float64 else x.float()
            x = F.pad(x, (1, 0), value=1.0) if self.with_one else x
            bucket, sign = self.get_buffer(f"bucket_{name}"), self.get_buffer(f"sign_{name}")
            psi = x.new_zeros(x.shape[0], self.sketch_dim).index_add(1, bucket, x * sign)
            spectra.append(torch.fft.rfft(psi))
        return torch.fft.irfft(reduce(torch.mul, spectra), n=self.sketch_dim)
