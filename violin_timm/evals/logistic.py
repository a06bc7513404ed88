"""Multinomial logistic regression on features computed once."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def fit_logistic(
    features: torch.Tensor, labels: torch.Tensor, classes: int, cost: float = 1.0, iterations: int = 200
) -> tuple[torch.Tensor, torch.Tensor]:
    """Minimise `|W|^2 / 2 + cost * (summed cross entropy)`, which has one minimum, by L-BFGS from zero.

    Args:
        features: `[N, D]`; scale them first.
        labels: `[N]`.
        classes: Number of classes C.
        cost: As scikit-learn's C.
        iterations: At most this many.

    Returns:
        W `[C, D]` and the bias `[C]`, which is not penalised.
    """
    weight = features.new_zeros(classes, features.shape[1]).requires_grad_()
    bias = features.new_zeros(classes).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [weight, bias], max_iter=iterations, tolerance_grad=1e-6, tolerance_change=1e-10, line_search_fn='strong_wolfe'
    )
    penalty = 0.5 / (cost * len(features))

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(F.linear(features, weight, bias), labels) + penalty * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    return weight.detach(), bias.detach()


def logistic_accuracy(
    train: tuple[torch.Tensor, torch.Tensor],
    test: tuple[torch.Tensor, torch.Tensor],
    cost: float = 1.0,
    device: torch.device | str = 'cpu',
) -> tuple[float, float]:
    """Top-1 and top-5 accuracy, in per cent, of a logistic regression on standardised features.

    Args:
        train: Features `[N, D]` and labels `[N]` to learn from.
        test: The same of the images to classify.
        cost: See `fit_logistic`.
        device: Where it is computed.
    """
    (features, labels), (wanted, truth) = ([tensor.to(device) for tensor in pair] for pair in (train, test))
    classes = int(max(labels.max(), truth.max())) + 1
    mean, std = features.mean(0), features.std(0).clamp_min(1e-6)
    weight, bias = fit_logistic((features - mean) / std, labels, classes, cost)
    ranked = F.linear((wanted - mean) / std, weight, bias).topk(min(5, classes)).indices == truth[:, None]
    return 100 * ranked[:, 0].double().mean().item(), 100 * ranked.any(1).double().mean().item()
