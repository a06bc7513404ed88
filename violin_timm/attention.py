"""timm's attention with a decay mask: `ViolinAttention`, and `Decay`, the parameters it adds."""

import math
from dataclasses import replace
from typing import Optional

import torch
import torch.nn.functional as F
from timm.layers import Attention, maybe_add_mask, register_notrace_module, resolve_self_attn_mask
from torch import nn

from .backends import masked_attention
from .geometry import grid_positions
from .masks import Pairs, decay_mask, decay_rates
from .settings import MaskSettings
from .strategies import STRATEGIES

__all__ = ['Decay', 'ViolinAttention']

torch.fx.wrap('masked_attention')  # a leaf of fx graphs: it looks at dtypes, which a tracer cannot branch on


@register_notrace_module
class Decay(nn.Module):
    """Decay parameters of one attention layer: about ten numbers per head.

    ``beta [H, C]`` (a buffer for ``mask='fixed'``), ``alpha [H]`` and, for ``curve_weights='learned'``,
    ``curve_logits [H, C]``; a setting of ``none`` leaves the parameter out. Being a module, it can be named in peft's
    ``modules_to_save``.

    Initial values come from a generator of their own, derived from ``torch.initial_seed()`` and the layer, so that for
    one seed the backbone starts alike with and without a mask, and the arms of a comparison are paired.
    """

    def __init__(self, num_heads: int, settings: MaskSettings, layer: int = 0, device=None, dtype=None) -> None:
        super().__init__()
        dd = {'device': device, 'dtype': dtype}
        self.num_heads = num_heads
        self.settings = settings
        self.layer = layer
        shape = (num_heads, len(settings.components))
        if settings.mask == 'fixed':
            self.register_buffer('beta', torch.empty(shape, **dd))
        else:
            self.beta = nn.Parameter(torch.empty(shape, **dd)) if settings.mask == 'learned' else None
        weighted = settings.mask != 'none' and settings.curve_weights == 'learned'
        self.curve_logits = nn.Parameter(torch.empty(shape, **dd)) if weighted else None
        self.alpha = nn.Parameter(torch.empty(num_heads, **dd)) if settings.alpha == 'learned' else None
        self.reset_parameters()

    def extra_repr(self) -> str:
        return f'{self.num_heads} heads, mask={self.settings.mask}, alpha={self.settings.alpha}'

    @torch.jit.ignore
    def reset_parameters(self) -> None:
        """Draw the values anew. One seed and layer give the same values, whatever was drawn before."""
        with torch.no_grad():
            for index, (name, draw) in enumerate(self._draws().items()):
                value = getattr(self, name)
                if value is None or value.is_meta:
                    continue
                generator = torch.Generator('cpu').manual_seed(self._seed(index))
                value.copy_(draw(torch.empty(value.shape, device='cpu', dtype=torch.float32), generator))

    @torch.jit.ignore
    def set_mask_init(self, mask_init: str) -> None:
        """Choose another initialisation and draw from it."""
        self.settings = replace(self.settings, mask_init=mask_init)
        self.reset_parameters()

    @torch.jit.ignore
    def _seed(self, index: int) -> int:
        # distinct streams for layers and parameters; manual_seed takes what fits 64 bits
        return (torch.initial_seed() + 0x9E3779B97F4A7C15 * (1 + 4 * self.layer + index)) % 2**63

    @torch.jit.ignore
    def _draws(self) -> dict:
        settings = self.settings
        mean, std = settings.alpha_normal()
        uniform = settings.beta_uniform()

        def draw_beta(value, generator):
            if settings.mask == 'fixed':
                return value.fill_(math.log(settings.gamma) - math.log1p(-settings.gamma))
            if uniform is not None:
                return value.uniform_(*uniform, generator=generator)
            return value.normal_(0.0, 0.5 if settings.beta_std is None else settings.beta_std, generator=generator)

        return {
            'beta': draw_beta,
            'alpha': lambda value, generator: value.normal_(mean, std, generator=generator),
            'curve_logits': lambda value, generator: value.zero_(),
        }

    def forward(
        self,
        positions: torch.Tensor,
        num_prefix: int = 0,
        with_alpha: bool = False,
        pairs: Optional[Pairs] = None,
    ) -> torch.Tensor:
        """The layer's mask.

        Args:
            positions: ``[C, N, D]``.
            num_prefix: Number P of prefix tokens.
            with_alpha: Multiply the mask, prefix included, by alpha.
            pairs: `Pairs.of` the positions, where a caller has them already.

        Returns:
            ``[H, P + N, P + N]``, float32 or better.
        """
        beta, logits, alpha = self.beta, self.curve_logits, self.alpha
        assert beta is not None, "a layer with mask='none' has no mask"
        assert num_prefix >= 0, 'positions: there are more patches than tokens'
        rates = decay_rates(beta)
        assert positions.shape[0] == rates.shape[1], 'positions: of another number of curves than the layer has'
        if logits is not None:
            weights = logits.to(rates.dtype).softmax(-1)
        else:
            weights = torch.full_like(rates, 1.0 / rates.shape[1])
        prefix: Optional[torch.Tensor] = None
        if with_alpha and alpha is not None:
            prefix = alpha.to(rates.dtype)
            weights = weights * prefix[:, None]
        return decay_mask(rates, weights, positions, num_prefix, prefix, pairs)


class ViolinAttention(Attention):
    """timm's `Attention`, with every score multiplied by a learned decay of the distance of its two patches.

        Y_h = softmax(alpha_h * (Q_h K_h^T / sqrt(d)) * M_h) V_h              (paper, equation 5)

    The arguments are timm's, and those of `MaskSettings` as one value. Without settings, or with neither mask nor
    alpha, it is timm's attention to the last bit, parameters included.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        settings: Optional[MaskSettings] = None,
        layer: int = 0,
        device=None,
        dtype=None,
        **kwargs,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **kwargs)
        self.add_decay(settings, layer, device=device, dtype=dtype)

    @torch.jit.ignore
    def add_decay(self, settings: Optional[MaskSettings], layer: int = 0, device=None, dtype=None) -> None:
        """Attach fresh decay parameters, or none; on an attention layer of timm's whose class was changed, too."""
        settings = settings or MaskSettings(mask='none', alpha='none')
        strategy = STRATEGIES[settings.strategy]
        self.operation = strategy.operation
        self.after_softmax = strategy.after_softmax
        self.alpha_on_mask = settings.alpha_on == 'mask'
        self.has_mask = settings.mask != 'none'
        self.decay = None
        if self.has_mask or settings.alpha != 'none':
            self.decay = Decay(self.num_heads, settings, layer, device=device, dtype=dtype).train(self.training)

    @torch.jit.ignore
    def grid(self, height: int, width: int) -> torch.Tensor:
        """Positions of a grid of ``height x width`` patches, to be handed to `forward`."""
        assert self.decay is not None, 'an attention without decay needs no positions'
        return grid_positions(','.join(self.decay.settings.components), height, width, self.qkv.weight)

    def forward(
        self,
        x: torch.Tensor,
        attn_mask: Optional[torch.Tensor] = None,
        is_causal: bool = False,
        positions: Optional[torch.Tensor] = None,
        mask: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            x: Tokens ``[B, P + N, dim]``, P prefix tokens first.
            attn_mask: As in timm: boolean (False cuts) or added to the masked logits.
            is_causal: As in timm.
            positions: ``[C, N, D]`` of the grid, from `grid`; the number of prefix tokens follows from it.
            mask: This layer's finished mask for that grid, ``decay(positions, P, with_alpha=alpha_on_mask)``, where a
                model has built it already.

        Returns:
            ``[B, P + N, dim_out]``.
        """
        B, L, _ = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        qkv = self.qkv(x).reshape(B, L, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        dropout_p = self.attn_drop.p if self.training else 0.0
        if self.has_mask:
            x = self._masked(q, k, v, positions, mask, attn_mask, is_causal, dropout_p)
        else:
            x = self._plain(q, k, v, attn_mask, is_causal, dropout_p)
        x = self.norm(x.transpose(1, 2).reshape(B, L, self.attn_dim))
        if gate is not None:
            x = x * gate
        return self.proj_drop(self.proj(x))

    def _masked(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        positions: Optional[torch.Tensor],
        mask: Optional[torch.Tensor],
        attn_mask: Optional[torch.Tensor],
        is_causal: bool,
        dropout_p: float,
    ) -> torch.Tensor:
        if positions is None:
            raise ValueError('positions: got None; masked attention needs the positions of its grid, see grid()')
        decay = self.decay
        assert decay is not None
        if mask is None:
            mask = decay(positions, q.shape[2] - positions.shape[1], self.alpha_on_mask)
        if decay.alpha is not None and not self.alpha_on_mask:
            q = q * decay.alpha[:, None, None].to(q.dtype)
        return masked_attention(
            q,
            k,
            v,
            mask,
            self.scale,
            self.operation,
            self.after_softmax,
            attn_mask,
            is_causal,
            dropout_p,
            self.fused_attn,
        )

    def _plain(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        attn_mask: Optional[torch.Tensor],
        is_causal: bool,
        dropout_p: float,
    ) -> torch.Tensor:
        """timm's own two paths, after alpha."""
        decay = self.decay
        if decay is not None:  # one test at a time: TorchScript drops the branch of a None, but not of an `and`
            alpha = decay.alpha
            if alpha is not None:
                q = q * alpha[:, None, None].to(q.dtype)
        if self.fused_attn:
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=attn_mask, dropout_p=dropout_p, is_causal=is_causal
            )
        scores = (q * self.scale) @ k.transpose(-2, -1)
        bias = resolve_self_attn_mask(q.shape[2], scores, attn_mask, is_causal)
        return self.attn_drop(maybe_add_mask(scores, bias).softmax(dim=-1)) @ v
