"""What `violin benchmark` measures: the table of cases, and the two sides of each.

A case pits a Violin against timm's plain model of the same architecture, tokens and weights, with fused attention:
what a user would pick instead. To add a case, give it a line in `CASES`.
"""

from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Callable, Dict, Optional, Tuple

import timm
import torch
import torch.nn.functional as F
from torch import nn

from ..attention import Decay
from ..backends.eager import eager_attention
from ..backends.flex import flex_attention
from ..geometry import grid_positions
from ..masks import Pairs, decay_rates
from ..settings import MaskSettings

__all__ = ['CASES', 'SIDES', 'SUITES', 'Case', 'plain_mask', 'sides', 'twins']

SIDES = ('violin', 'plain')
SUITES = ('quick', 'issue', 'full', 'gpu')

# Violin: timm's model of its shape, and what has to be said to make it one
TWINS: Dict[str, Tuple[str, Dict[str, Any]]] = {
    'violin_deit_small': ('deit_small_patch16_224', {}),
    'violin_deit_base': ('deit_base_patch16_224', {}),
    'violin_dino_small_patch8': ('vit_small_patch8_224', {'num_classes': 0}),
    'violin_pixel_tiny': ('vit_tiny_patch16_224', {'patch_size': 1, 'num_classes': 100}),
    'violin_pixel_nano': (
        'vit_tiny_patch16_224',
        {'patch_size': 1, 'embed_dim': 64, 'depth': 4, 'num_heads': 4, 'in_chans': 1, 'num_classes': 10},
    ),
}


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Args:
        name: What it is called on the command line.
        kind: ``inference``, ``training`` (forward, loss, backward, AdamW), ``memory_inference`` and
            ``memory_training`` (peak of either model in a process of its own), ``mask``, ``mask_log`` and
            ``mask_forward`` (one layer's mask against `plain_mask`), ``mask_share`` (all masks against the training
            step they are part of), ``backend`` (flex against eager attention), ``added`` (parameters and FLOPs).
        target: Upper bound of the value that the table shows.
        suites: Suites it belongs to; every case belongs to ``full``.
        model: Name of the Violin.
        image: Rows and columns in pixels.
        batch: Images.
        class_token: A class token, as against GAP.
        autocast: Dtype of torch.autocast, or '' for float32 throughout.
        compiled: Both sides through torch.compile.
        value: What the target bounds: ``ratio``, or ``maps``, the peak in float32 maps of heads x L x L.
    """

    name: str
    kind: str
    target: Optional[float] = None
    suites: Tuple[str, ...] = ()
    model: str = 'violin_deit_small'
    image: Tuple[int, int] = (224, 224)
    batch: int = 1
    class_token: bool = False
    autocast: str = ''
    compiled: bool = False
    value: str = 'ratio'

    def settings(self) -> Dict[str, Any]:
        """Everything but the name and where it is used, for the record; the same after a trip through JSON."""
        kept = {key: value for key, value in asdict(self).items() if key not in ('name', 'suites', 'target')}
        return {**kept, 'image': list(self.image)}


_DINO = {'model': 'violin_dino_small_patch8', 'image': (432, 768), 'class_token': True}  # 54 x 96 patches
_PIXEL = {'model': 'violin_pixel_tiny', 'image': (32, 32), 'batch': 8}
_ISSUE, _GPU, _BOTH = ('issue',), ('gpu',), ('issue', 'gpu')

CASES: Dict[str, Case] = {
    case.name: case
    for case in (
        Case('inference_224_b1', 'inference', 1.05, ('quick', *_BOTH)),
        Case('inference_224_b8', 'inference', 1.05, ('quick', 'issue'), batch=8),
        Case('inference_224_b32', 'inference', 1.05, _BOTH, batch=32),
        Case('training_224_b8', 'training', 1.06, ('quick', 'issue'), batch=8),
        Case('training_224_b16', 'training', 1.06, _BOTH, batch=16),
        Case('inference_448_b2', 'inference', None, _ISSUE, image=(448, 448), batch=2),
        Case('inference_512_b2', 'inference', 1.15, _BOTH, image=(512, 512), batch=2),
        Case('training_512_b2', 'training', 1.5, _ISSUE, image=(512, 512), batch=2),
        Case('training_512_b8', 'training', 1.25, _BOTH, image=(512, 512), batch=8),
        Case('training_pixel_b8', 'training', None, _BOTH, **_PIXEL),
        Case('inference_dino_5184', 'inference', None, _BOTH, **_DINO),
        Case('mask_196', 'mask', 1 / 3, ('quick', *_BOTH)),
        Case('mask_1024', 'mask', 1 / 3, _BOTH, image=(512, 512)),
        Case('mask_log_196', 'mask_log', suites=_ISSUE),
        Case('mask_log_1024', 'mask_log', suites=_ISSUE, image=(512, 512)),
        Case('mask_share_224_b16', 'mask_share', 0.02, _ISSUE, batch=16),
        Case('memory_training_pixel_b8', 'memory_training', 1.3, _BOTH, **_PIXEL),
        Case('memory_training_512_b8', 'memory_training', None, _ISSUE, image=(512, 512), batch=8),
        Case('memory_inference_dino_5184', 'memory_inference', 3.0, _BOTH, value='maps', **_DINO),
        Case('added_deit_base_384', 'added', None, ('quick', *_BOTH), model='violin_deit_base', image=(384, 384)),
        Case('inference_token_224_b8', 'inference', batch=8, class_token=True),
        Case('mask_forward_196', 'mask_forward'),
        Case('mask_forward_1024', 'mask_forward', image=(512, 512)),
        Case('inference_bf16_224_b8', 'inference', batch=8, autocast='bfloat16'),
        Case('inference_bf16_224_b256', 'inference', suites=_GPU, batch=256, autocast='bfloat16'),
        Case('training_bf16_224_b8', 'training', batch=8, autocast='bfloat16'),
        Case('training_bf16_224_b128', 'training', suites=_GPU, batch=128, autocast='bfloat16'),
        Case('training_bf16_512_b32', 'training', suites=_GPU, image=(512, 512), batch=32, autocast='bfloat16'),
        Case('inference_compile_224_b8', 'inference', batch=8, compiled=True),
        Case('inference_compile_512_b2', 'inference', image=(512, 512), batch=2, compiled=True),
        Case('training_compile_224_b8', 'training', batch=8, compiled=True),
        Case('training_compile_bf16_224_b128', 'training', suites=_GPU, batch=128, autocast='bfloat16', compiled=True),
        Case('flex_196', 'backend', suites=_GPU, batch=32),
        Case('flex_576', 'backend', suites=_GPU, image=(384, 384), batch=32),
        Case('flex_1024', 'backend', suites=_GPU, image=(512, 512), batch=32),
    )
}


def twins(case: Case, which: Tuple[str, ...] = SIDES, device: str = 'cpu') -> Dict[str, nn.Module]:
    """The models of a case by side, with the same backbone weights where both are asked for.

    Raises:
        RuntimeError: If they differ in more than decay parameters, or timm's is not fused.
    """
    plain, arguments = TWINS[case.model]
    arguments = {
        'img_size': case.image,
        'class_token': case.class_token,
        'fc_norm': False,
        'global_pool': 'token' if case.class_token else 'avg',
        **arguments,
    }
    names = {'violin': case.model, 'plain': plain}
    models = {side: timm.create_model(names[side], **arguments).to(device) for side in which}
    if 'plain' in models and not models['plain'].blocks[0].attn.fused_attn:
        raise RuntimeError('fused_attn: got False; a fair comparison needs it, unset TIMM_FUSED_ATTN')
    if len(models) == 2:
        missing, unexpected = models['violin'].load_state_dict(models['plain'].state_dict(), strict=False)
        other = [key for key in missing if '.decay.' not in key] + list(unexpected)
        if other:
            raise RuntimeError(f'{case.model}: not the twin of {plain}, by {", ".join(other)}')
    return models


def sides(case: Case, device: str = 'cpu') -> Dict[str, Callable[[], Any]]:
    """The two pieces of work that are timed against each other, each a call without arguments."""
    build = {
        'inference': _model_sides,
        'training': _model_sides,
        'mask': _mask_sides,
        'mask_log': _mask_sides,
        'mask_forward': _mask_sides,
        'mask_share': _share_sides,
        'backend': _backend_sides,
    }
    return build[case.kind](case, device)


def work(case: Case, model: nn.Module, device: str = 'cpu') -> Callable[[], Any]:
    """One inference or training step of a model, as a call."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(case.batch, model.patch_embed.proj.in_channels, *case.image, generator=generator).to(device)
    training = case.kind.endswith('training')
    run = torch.compile(model.train(training)) if case.compiled else model.train(training)
    kind = torch.device(device).type
    autocast = partial(torch.autocast, kind, getattr(torch, case.autocast or 'bfloat16'), enabled=bool(case.autocast))
    if not training:

        def infer():
            with torch.inference_mode(), autocast():
                return run(images)

        return infer
    labels = torch.randint(model.num_classes, (case.batch,), generator=generator).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step():
        with autocast():
            loss = F.cross_entropy(run(images), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()

    return step


def _model_sides(case: Case, device: str) -> Dict[str, Callable[[], Any]]:
    return {side: work(case, model, device) for side, model in twins(case, device=device).items()}


def plain_mask(decay: Decay, distances: torch.Tensor, log: bool = False) -> torch.Tensor:
    """The mask in plain differentiable operations over ``[H, C, N, N]``, distances ``[C, N, N]`` given: the reference.

    Autograd keeps several tensors of that size for the backward. Alpha is on the mask.

    Args:
        decay: The layer's parameters.
        distances: Of all pairs of patches.
        log: Exponentials of rates, as we compute; otherwise the formula as it stands, ``sigmoid(beta) ** d``, which is
            what the authors' code computes.
    """
    if log:
        powers = torch.exp(-decay_rates(decay.beta)[..., None, None] * distances)
    else:
        powers = torch.sigmoid(decay.beta)[..., None, None] ** distances
    return decay.alpha[:, None, None] * powers.mean(1)


def _mask_sides(case: Case, device: str) -> Dict[str, Callable[[], Any]]:
    """One layer of 6 heads. What a model works out once for all layers is given to both sides."""
    decay = Decay(6, MaskSettings()).to(device)
    height, width = (side // 16 for side in case.image)
    positions = grid_positions(','.join(decay.settings.components), height, width, decay.beta)
    pairs = Pairs.of(positions)
    distances = (positions[:, :, None] - positions[:, None]).abs().sum(-1).float()
    grad = torch.randn(6, height * width, height * width, generator=torch.Generator().manual_seed(0)).to(device)

    def complete(mask: Callable[[], torch.Tensor]) -> None:
        if case.kind == 'mask_forward':
            with torch.inference_mode():
                mask()
        else:
            torch.autograd.grad(mask(), tuple(decay.parameters()), grad)

    return {
        'violin': lambda: complete(lambda: decay(positions, 0, True, pairs)),
        'plain': lambda: complete(lambda: plain_mask(decay, distances, log=case.kind != 'mask')),
    }


def _share_sides(case: Case, device: str) -> Dict[str, Callable[[], Any]]:
    """Masks of all layers, forward and backward, beside the training step that they are a part of."""
    model = twins(case, ('violin',), device)['violin']
    layers = [block.attn for block in model.blocks]
    height, width = model.patch_embed.grid_size
    positions = layers[0].grid(height, width)
    length = model.num_prefix_tokens + height * width
    grad = torch.randn(layers[0].num_heads, length, length, generator=torch.Generator().manual_seed(0)).to(device)
    parameters = [p for layer in layers for p in layer.decay.parameters()]

    def masks():
        made = model.mask_bank.get(layers, positions, model.num_prefix_tokens, (model.curve_names, height, width))
        torch.autograd.grad(made, parameters, [grad] * len(made))

    return {'violin': masks, 'plain': work(replace_kind(case, 'training'), model, device)}


def replace_kind(case: Case, kind: str) -> Case:
    """The same case as another kind."""
    return Case(**{**asdict(case), 'kind': kind})


def _backend_sides(case: Case, device: str) -> Dict[str, Callable[[], Any]]:
    """flex (as `violin`) against eager (as `plain`) attention in bfloat16, forward and backward."""
    length = case.image[0] * case.image[1] // 256
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (
        torch.randn(case.batch, 6, length, 64, generator=generator).to(device, torch.bfloat16) for _ in range(4)
    )
    mask = torch.rand(6, length, length, generator=generator).to(device)
    inputs = [tensor.requires_grad_() for tensor in (q, k, v, mask)]

    def complete(attend):
        torch.autograd.grad(attend(*inputs, 0.125, 'mul'), inputs, grad)

    return {
        'violin': lambda: complete(flex_attention),
        'plain': lambda: complete(partial(eager_attention, after_softmax=False)),
    }
