"""timm's Vision Transformer with decay masks.

A model works out the grid of its patches, turns it into positions once per forward, and hands them to every block as an
argument. Nothing remembers a "current grid": activation checkpointing recomputes a forward long after another crop went
through, and two grids can have as many patches.
"""

from typing import Any, Dict, List, Optional, Tuple, Union

import torch
import torch.nn.functional as F
from timm.layers import PatchDropout
from timm.models import VisionTransformer, checkpoint
from timm.models._features import feature_take_indices
from timm.models._input import update_model_args
from timm.models.vision_transformer import Block, ResPostBlock
from torch import nn

from ..attention import ViolinAttention
from ..geometry import grid_positions
from ..settings import MaskSettings
from .bank import MaskBank

__all__ = ['ViolinBlock', 'ViolinMixin', 'ViolinResPostBlock', 'ViolinVisionTransformer']

torch.fx.wrap('grid_positions')  # leaves of fx graphs; fx looks for the names in the module that calls them
torch.fx.wrap('resample_pos_embed_dino')


class ViolinBlock(Block):
    """timm's pre-norm block, which hands positions on to its attention."""

    def forward(
        self,
        x: torch.Tensor,
        attn_mask: Optional[torch.Tensor] = None,
        is_causal: bool = False,
        positions: Optional[torch.Tensor] = None,
        mask: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        attended = self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal, positions=positions, mask=mask)
        x = x + self.drop_path1(self.ls1(attended))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class ViolinResPostBlock(ResPostBlock):
    """timm's post-norm block, which hands positions on to its attention."""

    def forward(
        self,
        x: torch.Tensor,
        attn_mask: Optional[torch.Tensor] = None,
        is_causal: bool = False,
        positions: Optional[torch.Tensor] = None,
        mask: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        x = x + self.drop_path1(
            self.norm1(self.attn(x, attn_mask=attn_mask, is_causal=is_causal, positions=positions, mask=mask))
        )
        return x + self.drop_path2(self.norm2(self.mlp(x)))


class ViolinMixin:
    """What a Violin does differently from timm's `VisionTransformer`, of which its class is to be a subclass too."""

    curve_names: str  # components of the geometry joined by commas, '' without a mask
    pos_embed_resample: str = 'timm'  # or 'dino', for other grids than that of the position embedding

    @torch.jit.ignore
    def check_patch_drop(self) -> None:
        """Refuse patch dropout: it leaves a set of patches that is no grid, another one for every image."""
        if isinstance(self.patch_drop, PatchDropout):
            raise ValueError(
                f'patch_drop_rate: got {self.patch_drop.prob}; a mask needs every patch of the grid, so only 0 is '
                f"allowed (or mask='none')"
            )

    @torch.jit.ignore
    def add_masks(self, settings: MaskSettings) -> None:
        """Give every block's attention fresh decay parameters, on the device and in the dtype of its weights."""
        if settings.mask != 'none':
            self.check_patch_drop()
        self.mask_bank = MaskBank()
        self.curve_names = '' if settings.mask == 'none' else ','.join(settings.components)
        for layer, block in enumerate(self.blocks):
            weight = block.attn.qkv.weight
            block.attn.add_decay(settings, layer, device=weight.device, dtype=weight.dtype)

    def _grid(self, x: torch.Tensor) -> Tuple[int, int]:
        """Rows and columns of the patches in the output of `patch_embed`."""
        if self.dynamic_img_size:  # NHWC until the position embedding was added
            return x.shape[1], x.shape[2]
        grid_size = self.patch_embed.grid_size
        return grid_size[0], grid_size[1]

    @torch.jit.unused
    def _layer_masks(self, positions: torch.Tensor, height: int, width: int) -> List[torch.Tensor]:
        """Finished masks of all blocks; none where a graph is recorded, whose layers build their own."""
        graph = torch.jit.is_tracing() or torch.compiler.is_compiling() or isinstance(positions, torch.fx.Proxy)
        if graph or torch.overrides.has_torch_function_unary(positions):
            return []
        return self.mask_bank.get(
            [block.attn for block in self.blocks], positions, self.num_prefix_tokens, (self.curve_names, height, width)
        )

    def _embed(self, x: torch.Tensor) -> Tuple[torch.Tensor, Optional[torch.Tensor], List[torch.Tensor]]:
        """Image ``[B, C, H, W]`` -> tokens ``[B, P + N, dim]``, positions ``[C, N, D]`` (None without a mask), and the
        masks ``[H, P + N, P + N]`` of all blocks where they are at hand.
        """
        x = self.patch_embed(x)
        positions: Optional[torch.Tensor] = None
        masks: List[torch.Tensor] = []
        if self.curve_names:
            height, width = self._grid(x)
            positions = grid_positions(self.curve_names, height, width, x)
            if not torch.jit.is_scripting():
                masks = self._layer_masks(positions, height, width)
        if self.pos_embed_resample == 'dino' and self.dynamic_img_size and self.pos_embed is not None:
            x = self._pos_embed_dino(x)
        else:
            x = self._pos_embed(x)
        return self.norm_pre(self.patch_drop(x)), positions, masks

    @torch.jit.unused
    def _pos_embed_dino(self, x: torch.Tensor) -> torch.Tensor:
        """timm's `_pos_embed` with DINO's resampling, for patches ``[B, H, W, dim]``."""
        num_prefix = 0 if self.no_embed_class else self.num_prefix_tokens
        position = resample_pos_embed_dino(self.pos_embed, self._grid(x), self.patch_embed.grid_size, num_prefix)
        x = x.flatten(1, 2)
        tokens = [t.expand(x.shape[0], -1, -1) for t in (self.cls_token, self.reg_token) if t is not None]
        if self.no_embed_class:
            return self.pos_drop(torch.cat([*tokens, x + position], dim=1))
        return self.pos_drop(torch.cat([*tokens, x], dim=1) + position)

    @torch.jit.unused
    def _checkpointed(
        self,
        block: nn.Module,
        x: torch.Tensor,
        attn_mask: Optional[torch.Tensor],
        is_causal: bool,
        positions: Optional[torch.Tensor],
        mask: Optional[torch.Tensor],
    ) -> torch.Tensor:
        return checkpoint(block, x, attn_mask, is_causal, positions, mask)

    def forward_features(
        self,
        x: torch.Tensor,
        attn_mask: Optional[torch.Tensor] = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Tokens after the last block and the final norm, ``[B, P + N, dim]``; arguments as in timm."""
        x, positions, masks = self._embed(x)
        for i, block in enumerate(self.blocks):
            mask = masks[i] if len(masks) > 0 else None
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = self._checkpointed(block, x, attn_mask, is_causal, positions, mask)
            else:
                x = block(x, attn_mask=attn_mask, is_causal=is_causal, positions=positions, mask=mask)
        return self.norm(x)

    def forward_intermediates(
        self,
        x: torch.Tensor,
        indices: Optional[Union[int, List[int]]] = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = 'NCHW',
        intermediates_only: bool = False,
        output_dict: bool = False,
        attn_mask: Optional[torch.Tensor] = None,
        is_causal: bool = False,
    ) -> Union[List[torch.Tensor], Tuple[torch.Tensor, List[torch.Tensor]], Dict[str, Any]]:
        """Features of chosen blocks; arguments and results as in timm's `VisionTransformer.forward_intermediates`."""
        assert output_fmt in ('NCHW', 'NLC'), 'Output format must be one of NCHW or NLC.'
        take_indices, max_index = feature_take_indices(len(self.blocks), indices)
        B, _, height, width = x.shape
        x, positions, masks = self._embed(x)
        if torch.jit.is_scripting() or not stop_early:  # noqa: SIM108  TorchScript cannot slice blocks
            blocks = self.blocks
        else:
            blocks = self.blocks[: max_index + 1]
        taken = []
        for i, block in enumerate(blocks):
            mask = masks[i] if len(masks) > 0 else None
            if self.grad_checkpointing and not torch.jit.is_scripting():
                x = self._checkpointed(block, x, attn_mask, is_causal, positions, mask)
            else:
                x = block(x, attn_mask=attn_mask, is_causal=is_causal, positions=positions, mask=mask)
            if i in take_indices:
                taken.append(self.norm(x) if norm else x)

        num_prefix = self.num_prefix_tokens
        prefixes = [y[:, :num_prefix] for y in taken] if num_prefix else None
        features = [y[:, num_prefix:] for y in taken]
        if output_fmt == 'NCHW':
            H, W = self.patch_embed.dynamic_feat_size((height, width))
            features = [y.reshape(B, H, W, -1).permute(0, 3, 1, 2).contiguous() for y in features]
        if output_dict:
            result = {'image_intermediates': features}
            if prefixes is not None and return_prefix_tokens:
                result['image_intermediates_prefix'] = prefixes
            if not intermediates_only:
                result['image_features'] = self.norm(x)
            return result
        if not torch.jit.is_scripting() and return_prefix_tokens and prefixes is not None:
            features = list(zip(features, prefixes))
        if intermediates_only:
            return features
        return self.norm(x), features

    def set_input_size(
        self,
        img_size: Optional[Tuple[int, int]] = None,
        patch_size: Optional[Tuple[int, int]] = None,
    ) -> None:
        """Change the input resolution or patch size; as in timm, but for `pos_embed_resample`."""
        position, old_grid = self.pos_embed, self.patch_embed.grid_size
        super().set_input_size(img_size=img_size, patch_size=patch_size)
        grid = self.patch_embed.grid_size
        if position is not None and self.pos_embed_resample == 'dino' and grid != old_grid:
            num_prefix = 0 if self.no_embed_class else self.num_prefix_tokens
            self.pos_embed = nn.Parameter(
                resample_pos_embed_dino(position.detach(), grid, old_grid, num_prefix), position.requires_grad
            )

    def load_state_dict(self, state_dict, strict: bool = True, assign: bool = False):
        """As in torch; a checkpoint with the other kind of pooling is refused by the name of the argument."""
        has_token = 'cls_token' in state_dict
        if strict and has_token != self.has_class_token and 'patch_embed.proj.weight' in state_dict:
            raise RuntimeError(
                f'class_token: got {self.has_class_token}, but the checkpoint has {"a" if has_token else "no"} class '
                f'token; build the model with class_token={has_token}'
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    @torch.jit.ignore
    def no_weight_decay(self) -> set:
        """Names, as fnmatch patterns, that take no weight decay: timm's, and every decay parameter."""
        return super().no_weight_decay() | {'*.decay.*'}


class ViolinVisionTransformer(ViolinMixin, VisionTransformer):
    """Vision Transformer with masked attention (VIOLIN, arXiv 2606.14757).

    Takes the arguments of timm's `VisionTransformer` and those of `MaskSettings`. Three defaults differ:

    - `class_token` is the switch between a class token and global average pooling (GAP). `global_pool` follows it
      (``token`` or ``avg``), and `class_token` follows `global_pool` where that alone is given.
    - `fc_norm` is False: with GAP, the final norm acts on the tokens before the mean, as in the authors' code.

    What was built is recorded as model arguments, so that ``save_for_hf`` and ``local-dir:`` rebuild it.
    """

    def __init__(
        self,
        *,
        class_token: Optional[bool] = None,
        global_pool: Optional[str] = None,
        fc_norm: Optional[bool] = None,
        pos_embed_resample: str = 'timm',
        **kwargs,
    ) -> None:
        settings = MaskSettings.pop_from(kwargs)
        if pos_embed_resample not in ('timm', 'dino'):
            raise ValueError(f'pos_embed_resample: got {pos_embed_resample!r}; choose from timm, dino')
        class_token, global_pool = pooling(class_token, global_pool)
        for name, own in (('block_fn', ViolinBlock), ('attn_layer', ViolinAttention)):
            if kwargs.setdefault(name, own) is not own:
                raise ValueError(f'{name}: got {kwargs[name]!r}; a Violin has its own, {own.__name__}')
        super().__init__(class_token=class_token, global_pool=global_pool, fc_norm=bool(fc_norm), **kwargs)
        self.pos_embed_resample = pos_embed_resample
        self.add_masks(settings)
        update_model_args(self, class_token=class_token, global_pool=global_pool, fc_norm=bool(fc_norm))


def resample_pos_embed_dino(
    position: torch.Tensor,
    new_size: Tuple[int, int],
    old_size: Tuple[int, int],
    num_prefix: int = 1,
) -> torch.Tensor:
    """Resample a position embedding as facebookresearch/dino does.

    Bicubic without antialiasing, and by a scale factor of ``(new + 0.1) / old`` instead of the sizes: DINO's guard
    against rounding, which shifts the samples a little. timm resamples to the size, with antialiasing.

    Args:
        position: ``[1, P + H * W, dim]``.
        new_size: Rows and columns wanted.
        old_size: H and W.
        num_prefix: Number P of leading entries that stay.

    Returns:
        ``[1, P + rows * columns, dim]``.
    """
    if tuple(new_size) == tuple(old_size):
        return position
    prefix, grid = position[:, :num_prefix], position[:, num_prefix:]
    grid = grid.reshape(1, old_size[0], old_size[1], -1).permute(0, 3, 1, 2)
    scale = [(new + 0.1) / old for new, old in zip(new_size, old_size)]
    grid = F.interpolate(grid.float(), scale_factor=scale, mode='bicubic').to(position.dtype)
    return torch.cat([prefix, grid.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


def pooling(class_token: Optional[bool], global_pool: Optional[str], default: bool = True) -> Tuple[bool, str]:
    """Class token and pooling from what was given of them.

    Args:
        class_token: Whether there is a class token, or None.
        global_pool: timm's pooling type, or None.
        default: `class_token` where neither was given.

    Raises:
        ValueError: If the pooling reads a class token that was switched off.
    """
    if class_token is None:
        class_token = default if not global_pool else global_pool == 'token'  # '' pools nothing, so says nothing
    if global_pool is None:
        global_pool = 'token' if class_token else 'avg'
    if global_pool == 'token' and not class_token:
        raise ValueError(
            "global_pool: got 'token' with class_token=False; pass class_token=True, or another global_pool: "
            'avg, avgmax, max, map, prr'
        )
    return class_token, global_pool
