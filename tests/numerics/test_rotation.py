"""Principal components of a covariance that is known."""

import torch

from compress.numerics.rotation import principal_components


def test_known_components_come_back_in_order():
    draw = torch.Generator().manual_seed(0)
    basis, _ = torch.linalg.qr(torch.randn(6, 6, generator=draw, dtype=torch.float64))
    sizes = torch.tensor([3.0, 0.0, 5.0, 1.0, 4.0, 2.0], dtype=torch.float64)
    rotation, energy = principal_components((basis * sizes) @ basis.T)
    assert torch.allclose(energy, sizes.sort(descending=True).values, atol=1e-12)
    assert torch.allclose(rotation.T @ rotation, torch.eye(6, dtype=torch.float64), atol=1e-12)
    wanted = basis[:, sizes.argsort(descending=True)]
    assert torch.allclose((rotation * wanted).sum(0).abs(), torch.ones(6, dtype=torch.float64), atol=1e-12)
    assert bool((rotation.gather(0, rotation.abs().argmax(0, keepdim=True)) > 0).all())
