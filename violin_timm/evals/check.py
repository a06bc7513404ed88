"""`violin check`: one attention layer against the formula, on this machine.

    violin check
    violin check --height 7 --width 12 --class-token --device cuda

On seeded Q, K and V, the layer is compared with a reference written pair by pair in float64 from the paper's formulas
(section 3): ranks from `curve_order`, then ``mean_c gamma ** |rank_i - rank_j|``, then the softmax. It shares no code
with the masks and backends it judges.
"""

import argparse
import sys
from typing import Dict, List, NamedTuple, Optional, Tuple

import numpy as np
import torch
from torch import nn

from ..attention import ViolinAttention
from ..curves import curve_order
from ..geometry import grid_positions
from ..settings import MaskSettings

__all__ = ['Line', 'check', 'main', 'reference_attention', 'reference_mask']

# written out, in the order of beta's columns: to read them from the code under test would prove less
CURVES = ('snake', 'snake_T', 'zigzag', 'zigzag_T', 'hilbert', 'hilbert_T', 'peano', 'peano_T')
TOLERANCE = 1e-5  # relative, of float32 results against float64
BATCH = 2


class Line(NamedTuple):
    """One line of the report."""

    name: str
    good: bool
    text: str


def reference_mask(beta: np.ndarray, height: int, width: int, num_prefix: int) -> np.ndarray:
    """Mask ``[H, P + N, P + N]`` for beta ``[H, C]``, a pair of patches at a time."""
    ranks = np.zeros((len(CURVES), height * width), dtype=np.int64)
    for c, name in enumerate(CURVES):
        for step, patch in enumerate(curve_order(name, height, width).tolist()):
            ranks[c, patch] = step
    gamma = 1.0 / (1.0 + np.exp(-beta))
    length = num_prefix + height * width
    mask = np.ones((len(beta), length, length))
    for i in range(height * width):
        for j in range(height * width):
            distance = np.abs(ranks[:, i] - ranks[:, j])
            mask[:, num_prefix + i, num_prefix + j] = (gamma**distance).sum(1) / len(CURVES)
    return mask


def reference_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, alpha: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """``softmax(alpha * (Q K^T / sqrt(D)) * M) V`` for ``[B, H, L, D]``, alpha ``[H]`` and M ``[H, L, L]``."""
    out = np.empty_like(v)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            logits = alpha[h] * (q[b, h] @ k[b, h].T / np.sqrt(q.shape[-1])) * mask[h]
            weights = np.exp(logits - logits.max(axis=1, keepdims=True))
            out[b, h] = weights / weights.sum(axis=1, keepdims=True) @ v[b, h]
    return out


def check(
    height: int = 14,
    width: int = 14,
    heads: int = 6,
    head_dim: int = 64,
    class_token: bool = False,
    seed: int = 0,
    device: str = 'cpu',
) -> List[Line]:
    """Compare one layer with the reference.

    Args:
        height: Rows of patches.
        width: Columns of patches.
        heads: Number of attention heads.
        head_dim: Width of each of them.
        class_token: Whether a class token comes first.
        seed: Of Q, K, V, beta and alpha.
        device: Where the layer runs, in float32; the reference is NumPy.

    Returns:
        The lines of the report; all are good if the layer is right.
    """
    prefix = int(class_token)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layer = ViolinAttention(heads * head_dim, heads, settings=MaskSettings(mask_init='pretrain')).to(device)
        qkv = torch.randn(BATCH, prefix + height * width, 3, heads, head_dim)
        towards = torch.randn(BATCH, prefix + height * width, heads * head_dim)
    # Q, K and V are given, and wanted is what attention makes of them
    layer.qkv, layer.proj = nn.Identity(), nn.Identity()
    positions = grid_positions(','.join(layer.decay.settings.components), height, width, layer.decay.beta)
    out = layer(qkv.flatten(2).to(device), positions=positions)
    (out * towards.to(device)).sum().backward()
    with torch.no_grad():
        mask = layer.decay(positions, prefix)

    wanted_mask = reference_mask(_numpy(layer.decay.beta), height, width, prefix)
    q, k, v = _numpy(qkv).transpose(2, 0, 3, 1, 4)
    wanted = reference_attention(q, k, v, _numpy(layer.decay.alpha), wanted_mask)
    wanted = wanted.transpose(0, 2, 1, 3).reshape(BATCH, prefix + height * width, heads * head_dim)
    added = sum(p.numel() for p in layer.decay.parameters())
    return [
        _device_line(out),
        Line('output', out.shape == wanted.shape, f'shape {list(out.shape)}'),
        Line(
            'parameters',
            added == heads * (len(CURVES) + 1),
            f'{added} added a layer; {heads} heads x ({len(CURVES)} curves + 1) are due',
        ),
        _agreement('agreement', _numpy(out), wanted),
        _agreement('mask agreement', _numpy(mask), wanted_mask),
        *_structure(mask, prefix),
        _gradient(
            'gradient of beta',
            layer.decay.beta,
            inactive='one patch: all distances are 0' if height * width == 1 else '',
        ),
        _gradient(
            'gradient of alpha',
            layer.decay.alpha,
            inactive='one token: a softmax over one key is 1' if prefix + height * width == 1 else '',
        ),
    ]


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def _device_line(out: torch.Tensor) -> Line:
    name = f' ({torch.cuda.get_device_name(out.device)})' if out.device.type == 'cuda' else ''
    dtype = str(out.dtype).removeprefix('torch.')
    return Line('device', True, f'{out.device}{name}, {dtype}, torch {torch.__version__}')


def _agreement(name: str, got: np.ndarray, wanted: np.ndarray) -> Line:
    """Largest difference, absolute and relative to the largest value."""
    if got.shape != wanted.shape:
        return Line(name, False, f'shape {list(got.shape)}; the reference has {list(wanted.shape)}')
    difference = np.abs(got - wanted).max()
    relative = difference / np.abs(wanted).max()
    return Line(
        name,
        bool(relative <= TOLERANCE),
        f'max difference {difference:.1e}, relative {relative:.1e} (allowed {TOLERANCE:.0e})',
    )


def _structure(mask: torch.Tensor, prefix: int) -> Tuple[Line, ...]:
    asymmetry = (mask - mask.mT).abs().max().item()
    diagonal = (mask.diagonal(dim1=1, dim2=2) - 1.0).abs().max().item()
    lines = (
        Line('mask symmetry', asymmetry <= 1e-6, f'max |M - M^T| = {asymmetry:.1e}'),
        Line('mask diagonal', diagonal <= 1e-6, f'max |M_ii - 1| = {diagonal:.1e}'),
    )
    if not prefix:
        return lines
    token = (mask[:, 0] - 1.0).abs().max().item()
    return *lines, Line('class token row', token == 0.0, f'max |M_0j - 1| = {token:.1e}')


def _gradient(name: str, parameter: nn.Parameter, inactive: str) -> Line:
    """Finite and not zero; of a parameter that cannot matter here, finite and zero."""
    grad = parameter.grad
    if grad is None:
        return Line(name, False, 'none')
    norm = grad.double().norm().item()
    if inactive:
        return Line(name, norm <= 1e-6, f'norm {norm:.1e}; inactive ({inactive})')
    return Line(name, 0.0 < norm < float('inf'), f'norm {norm:.3e}, must be finite and not zero')


def main(argv: Optional[List[str]] = None) -> int:
    """Run the command.

    Args:
        argv: Arguments (default: the program's).

    Returns:
        Exit status: 0 if all agrees, 1 if something is off, 2 for arguments that cannot be.
    """
    try:
        args = vars(_parser().parse_args(argv))
    except SystemExit as stop:  # argparse has said what is wrong, or printed the help
        return stop.code
    lines = check(**args)
    token = 'a class token' if args['class_token'] else 'no class token'
    print(
        f'{args["height"]}x{args["width"]} patches, {token}, {args["heads"]} heads of {args["head_dim"]}, '
        f'seed {args["seed"]}\n'
    )
    for line in lines:
        print(f'{"ok" if line.good else "WRONG":<7}{line.name:<19}{line.text}')
    wrong = [line.name for line in lines if not line.good]
    print(f'\n{"wrong: " + ", ".join(wrong) if wrong else "all right"}')
    return 1 if wrong else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog='violin check',
        description='Compare one attention layer with the formula, pair by pair in float64.',
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    defaults: Dict[str, Tuple[int, str]] = {
        'height': (14, 'rows of patches'),
        'width': (14, 'columns of patches'),
        'heads': (6, 'attention heads'),
        'head-dim': (64, 'width of a head'),
    }
    for name, (default, text) in defaults.items():
        parser.add_argument(f'--{name}', metavar='N', type=_positive, default=default, help=text)
    parser.add_argument('--class-token', action='store_true', help='put a class token first')
    parser.add_argument('--seed', metavar='N', type=_seed, default=0, help='seed of Q, K, V, beta and alpha')
    parser.add_argument('--device', type=_device, default='cpu', help='where the layer runs')
    return parser


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f'got {text!r}; a whole number from 1 is allowed')
    return int(text)


def _seed(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f'got {text!r}; a whole number from 0 to 2 ** 63 - 1 is allowed')
    return int(text)


def _device(text: str) -> str:
    try:
        torch.empty(1, device=text).cpu()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch without CUDA asserts
        here = ['cpu'] + [f'cuda:{i}' for i in range(torch.cuda.device_count())]
        here += ['mps'] if torch.backends.mps.is_available() else []
        raise argparse.ArgumentTypeError(f'got {text!r}; allowed here are {", ".join(here)}') from error
    return text


if __name__ == '__main__':
    sys.exit(main())
