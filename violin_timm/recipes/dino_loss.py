"""DINO's arithmetic: the loss with its centre, the schedules, the clipping. Pure pieces, no model and no loop.

Formulas of "Emerging Properties in Self-Supervised Vision Transformers" (arXiv 2104.14294) and of its public code.
"""

from __future__ import annotations

import math
from typing import Iterable

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class DinoLoss(nn.Module):
    """Cross entropy between the teacher's view of an image and the student's other views of it.

    With `q = softmax((t - c) / T_t)` of the teacher's outputs `t`, `p = softmax(s / T_s)` of the student's, and a
    centre `c` that follows the mean of `t`:

        loss = mean over images and pairs (g, v), g != v, of -sum_k q_g[k] log p_v[k]

    The views of the teacher are the first of the student's.
    """

    def __init__(self, out_dim: int, student_temp: float = 0.1, center_momentum: float = 0.9) -> None:
        """
        Args:
            out_dim: Number K of outputs of the heads.
            student_temp: T_s.
            center_momentum: Part of the old centre in the new one.
        """
        super().__init__()
        self.student_temp, self.center_momentum = student_temp, center_momentum
        self.register_buffer('center', torch.zeros(1, out_dim))

    def targets(self, teacher: torch.Tensor, teacher_temp: float) -> torch.Tensor:
        """The teacher's distributions `[G * B, K]`, in float32, from its outputs of that shape."""
        return F.softmax((teacher.detach().float() - self.center) / teacher_temp, dim=-1)

    def forward(self, student: torch.Tensor, targets: torch.Tensor, views: int, teacher_views: int) -> torch.Tensor:
        """The loss, a scalar.

        Args:
            student: Outputs `[V * B, K]`, view after view.
            targets: From `targets`, `[G * B, K]`.
            views: V.
            teacher_views: G.

        Raises:
            ValueError: There is one view, so no pair.
        """
        if views < 2 or not 1 <= teacher_views <= views:
            raise ValueError(f'views: got {views} with {teacher_views} of the teacher; at least 2 with 1 make a pair')
        log_p = F.log_softmax(student.float() / self.student_temp, dim=-1).chunk(views)
        q = targets.chunk(teacher_views)
        every = sum(q)
        total = torch.zeros((), device=student.device)
        for view, log_q in enumerate(log_p):
            # all of a view's pairs at once; without sum - q, which would cancel
            others = sum(q[:view] + q[view + 1 :]) if view < teacher_views else every
            if isinstance(others, torch.Tensor):
                total = total - (others * log_q).sum(-1).mean()
        return total / (teacher_views * views - teacher_views)

    @torch.no_grad()
    def update_center(self, teacher: torch.Tensor) -> None:
        """Move the centre towards the mean of the teacher's outputs `[N, K]`, over all processes."""
        mean = teacher.float().mean(0, keepdim=True)
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        self.center.lerp_(mean, 1 - self.center_momentum)


def cosine_schedule(
    base: float, final: float, epochs: int, updates_per_epoch: int, warmup_epochs: int = 0, start: float = 0.0
) -> np.ndarray:
    """A value for every update of a run `[epochs * updates_per_epoch]`, float64.

    Linear from `start` to `base`, both reached, within the warm-up; then half a cosine towards `final`.

    Raises:
        ValueError: The warm-up is longer than the run.
    """
    if warmup_epochs > epochs:
        raise ValueError(f'warmup_epochs: got {warmup_epochs}, more than the {epochs} epochs of the run')
    ramp = np.linspace(start, base, warmup_epochs * updates_per_epoch)
    steps = np.arange(epochs * updates_per_epoch - len(ramp))
    wave = final + 0.5 * (base - final) * (1 + np.cos(np.pi * steps / max(len(steps), 1)))
    return np.concatenate((ramp, wave))


def temperature_schedule(warmup: float, final: float, warmup_epochs: int, epochs: int) -> np.ndarray:
    """The teacher's temperature in every epoch `[epochs]`: linear from `warmup` to `final`, then constant.

    A warm-up longer than the run is cut off by its end: the slope stays, `final` is not reached.
    """
    ramp = np.linspace(warmup, final, warmup_epochs)[:epochs]
    return np.concatenate((ramp, np.full(epochs - len(ramp), final)))


@torch.no_grad()
def clip_each(parameters: Iterable[nn.Parameter], limit: float) -> None:
    """Scale every gradient down to norm `limit`, each by itself, in place; those below it stay as they are."""
    grads = [p.grad for p in parameters if p.grad is not None]
    if grads:
        factors = [(limit / (norm + 1e-6)).clamp(max=1.0) for norm in torch._foreach_norm(grads)]
        torch._foreach_mul_(grads, factors)


@torch.no_grad()
def follow(teacher: nn.Module, student: nn.Module, momentum: float) -> None:
    """Move a teacher towards its student: parameters by `1 - momentum`, buffers (which are no average) all the way.

    Args:
        teacher: A copy of the student's architecture; the order of its parameters is what pairs them.
        student: Not wrapped in DDP.
        momentum: Part of the teacher that stays.
    """
    torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 1 - momentum)
    for own, other in zip(teacher.buffers(), student.buffers()):
        own.copy_(other)


@torch.no_grad()
def entropies(targets: torch.Tensor) -> torch.Tensor:
    """How sharp and how varied distributions `[N, K]` are, in nats.

    Returns:
        `[2]`: the mean entropy of each (log K: uniform, all information lost), and the entropy of their mean (0: every
        image gets the same output).
    """
    each = -(targets * targets.clamp_min(1e-30).log()).sum(-1).mean()
    mean = targets.mean(0)
    return torch.stack([each, -(mean * mean.clamp_min(1e-30).log()).sum()])


@torch.no_grad()
def spread(features: torch.Tensor) -> torch.Tensor:
    """Deviation of features `[N, D]` on the unit sphere, a scalar: 0 if all point the same way, at most 1."""
    mean = F.normalize(features.float(), dim=-1).mean(0)
    return (1 - mean.square().sum()).clamp_min(0).sqrt()  # the total variance of unit vectors is 1 - |mean|^2


def collapse_warnings(entropy: float, batch_entropy: float, feature_spread: float, out_dim: int) -> list[str]:
    """What looks like collapse in an epoch's means of `entropies` and `spread`; nothing if all is well.

    Args:
        entropy: Of each output.
        batch_entropy: Of their mean.
        feature_spread: From `spread`.
        out_dim: Number of outputs.
    """
    uniform = math.log(out_dim)
    found = []
    if entropy > 0.99 * uniform:
        found.append(f'the teacher is all but uniform (entropy {entropy:.2f} of at most {uniform:.2f})')
    if batch_entropy < 0.05 * uniform:
        found.append(f"the teacher's outputs are all but one (entropy of their mean {batch_entropy:.2f})")
    if feature_spread < 0.02:
        found.append(f'features of all images are nearly the same (spread {feature_spread:.4f} of at most 1)')
    return found
