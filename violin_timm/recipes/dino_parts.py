"""DINO's modules: the projection head, the network of backbone and head on crops of several sizes, and timm's task."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any, Sequence

import torch
import torch.nn.functional as F
from timm.task import TrainingTask
from timm.utils import dispatch_clip_grad, unwrap_model
from torch import nn

from ..engine.optim import Stepper
from .dino_loss import DinoLoss, clip_each, follow


class NormedLinear(nn.Module):
    """`y = x (g v / |v|)^T`: a linear layer without bias whose rows have the norms `g`.

    Parameters have the names of torch's old `weight_norm`, `weight_g [out, 1]` and `weight_v [out, in]`, so that DINO's
    heads load; unlike that one it can be copied.
    """

    def __init__(self, in_features: int, out_features: int, learn_norm: bool) -> None:
        super().__init__()
        self.weight_g = nn.Parameter(torch.ones(out_features, 1), requires_grad=learn_norm)
        self.weight_v = nn.Parameter(nn.Linear(in_features, out_features, bias=False).weight.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight_v * (self.weight_g / self.weight_v.norm(dim=1, keepdim=True)))


class DinoHead(nn.Module):
    """Features `[N, D]` -> outputs `[N, K]`: an MLP with GELU to a bottleneck, its L2 norm, a `NormedLinear`."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int = 65536,
        hidden_dim: int = 2048,
        bottleneck_dim: int = 256,
        layers: int = 3,
        norm_last_layer: bool = True,
    ) -> None:
        """
        Args:
            in_dim: D.
            out_dim: K.
            hidden_dim: Width of the MLP.
            bottleneck_dim: Its outputs.
            layers: Its linear layers.
            norm_last_layer: Keep the last layer's row norms at 1.
        """
        super().__init__()
        widths = [in_dim, *[hidden_dim] * (layers - 1), bottleneck_dim]
        steps: list[nn.Module] = []
        for before, after in pairwise(widths):
            steps += [nn.Linear(before, after), nn.GELU()]
        self.mlp = nn.Sequential(*steps[:-1])
        for linear in self.mlp[::2]:
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        self.last_layer = NormedLinear(bottleneck_dim, out_dim, learn_norm=not norm_last_layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class CropNetwork(nn.Module):
    """A backbone without classifier and a head, on views of several sizes: a forward of the backbone for each size."""

    def __init__(self, backbone: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.backbone, self.head = backbone, head

    def forward(self, views: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features `[V * B, D]` and outputs `[V * B, K]`, view after view.

        Args:
            views: Images `[B, C, H, W]`; neighbours of one size share a batch.
        """
        groups: list[list[torch.Tensor]] = []
        for view in views:
            if groups and groups[-1][0].shape == view.shape:
                groups[-1].append(view)
            else:
                groups.append([view])
        features = torch.cat([self.backbone(torch.cat(group)) for group in groups])
        return features, self.head(features)

    def no_weight_decay(self) -> set[str]:
        """The backbone's names, as they are from here; fnmatch patterns stay what they are."""
        inner = self.backbone.no_weight_decay() if hasattr(self.backbone, 'no_weight_decay') else set()
        return {name if name.startswith('*') else f'backbone.{name}' for name in inner}


class DinoTask(TrainingTask):
    """Student, teacher and loss as timm's training task.

    Checkpoints hold the student's backbone as `state_dict` and the teacher's as `state_dict_ema`, with timm's bare
    keys, so that `timm.create_model(checkpoint_path=)` loads the teacher; heads and centre are elsewhere, in
    `task_state` and `task_state_ema`.
    """

    def __init__(self, student: CropNetwork, loss: DinoLoss, teacher_views: int, device: torch.device) -> None:
        """
        Args:
            student: On its device already; the teacher starts as its copy.
            loss: Moved there.
            teacher_views: Leading views that the teacher sees.
            device: Of both.
        """
        super().__init__(device=device, verbose=False)
        self.trainable_module = student
        self.trainable_module_ema = copy.deepcopy(student).requires_grad_(False).eval()
        self.criterion, self.teacher_views = loss.to(device), teacher_views

    @property
    def student(self) -> CropNetwork:
        """Without DDP around it."""
        return unwrap_model(self.trainable_module)

    @property
    def teacher(self) -> CropNetwork:
        """In evaluation mode for good: drop-path is the student's alone."""
        return self.trainable_module_ema

    def prepare_distributed(self, device_ids: list | None = None, **ddp_kwargs: Any) -> DinoTask:
        """Wrap the student in DDP."""
        self.trainable_module = nn.parallel.DistributedDataParallel(
            self.trainable_module, device_ids=device_ids, **ddp_kwargs
        )
        return self

    def get_eval_model(self, module: nn.Module | None = None, ema: bool = False) -> nn.Module:
        """A backbone: what checkpoints hold and evaluations see."""
        return module if module is not None else (self.teacher if ema else self.student).backbone

    def get_task_state(self, module: nn.Module | None = None, ema: bool = False) -> dict[str, Any]:
        """Head, and with the teacher's the centre."""
        network = self.teacher if ema else self.student
        center = {'center': self.criterion.center} if ema else {}
        return {'head': network.head.state_dict(), **center}

    def load_task_state(
        self, state: dict | None, strict: bool = True, module: nn.Module | None = None, ema: bool = False
    ) -> None:
        """Put back what `get_task_state` returned.

        Raises:
            RuntimeError: There is none.
        """
        if not state:
            raise RuntimeError('it holds no projection head; --initial-checkpoint takes a backbone alone')
        (self.teacher if ema else self.student).head.load_state_dict(state['head'])
        if ema:
            self.criterion.center.copy_(state['center'])

    def forward(self, views: Sequence[torch.Tensor], teacher_temp: float) -> dict[str, torch.Tensor]:
        """The loss of a batch; the centre moves.

        Args:
            views: Images `[B, C, H, W]`, those that the teacher sees first.
            teacher_temp: The teacher's temperature.

        Returns:
            `loss`; of the teacher its distributions `targets [G * B, K]` and `features [G * B, D]`.
        """
        with torch.no_grad():
            features, outputs = self.teacher(views[: self.teacher_views])
        targets = self.criterion.targets(outputs, teacher_temp)
        student = self.trainable_module(views)[1]
        loss = self.criterion(student, targets, len(views), self.teacher_views)
        self.criterion.update_center(outputs)
        return {'loss': loss, 'targets': targets, 'features': features}

    def follow(self, momentum: float) -> None:
        """Move the teacher towards the student."""
        follow(self.teacher, self.student, momentum)


class DinoStepper(Stepper):
    """The step of `violin train`, with clipping of each gradient by itself, and parameters that may stay put."""

    def step(self, loss: torch.Tensor, frozen: Sequence[nn.Parameter] = ()) -> None:
        """One update.

        Args:
            loss: A scalar.
            frozen: Parameters that this update leaves alone, momentum and weight decay included.
        """
        scaler = self.scaler._scaler if self.scaler is not None else None
        (scaler.scale(loss) if scaler else loss).backward()
        if scaler:
            scaler.unscale_(self.optimizer)
        if self.clip is not None:
            if self.clip_mode == 'each':
                clip_each(self.task.get_clip_parameters(), self.clip)
            else:
                dispatch_clip_grad(list(self.task.get_clip_parameters()), self.clip, mode=self.clip_mode)
        for parameter in frozen:
            parameter.grad = None
        if scaler:
            scaler.step(self.optimizer)
            scaler.update()
        else:
            self.optimizer.step()
        self.optimizer.zero_grad()
