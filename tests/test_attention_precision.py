"""Numbers and memory of `ViolinAttention`: masks meet scores in float32, every beta learns, few maps are saved."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from violin_timm.strategies import STRATEGIES


class LargeMaps(TorchDispatchMode):
    """Records the dtype of every ``[..., L, L]`` result of arithmetic; matmuls and copies aside."""

    ALLOWED = ('bmm', 'matmul', 'view', '_to_copy', 'expand', 'transpose', 'detach', 'clone', 'permute', 't.')

    def __init__(self, length):
        super().__init__()
        self.length, self.seen = length, []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.name().removeprefix('aten::')
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if (
                torch.is_tensor(value)
                and value.is_floating_point()
                and value.shape[-2:] == (self.length,) * 2
                and not any(allowed in name for allowed in self.ALLOWED)
            ):
                self.seen.append((name, value.dtype))
        return result


@pytest.mark.parametrize('how', ['model', 'autocast'])
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('strategy', STRATEGIES)
def test_mask_meets_scores_in_float32(strategy, dtype, how, fused, layer, tokens):
    model_dtype = dtype if how == 'model' else torch.float32
    attention = layer(strategy=strategy, dtype=model_dtype)
    x = tokens(17, dtype=model_dtype)
    with torch.autocast('cpu', dtype, enabled=how == 'autocast'), LargeMaps(17) as maps:
        y = attention(x, positions=attention.grid(4, 4))
    assert y.dtype == dtype
    names = [name for name, _ in maps.seen]
    assert any('softmax' in name for name in names) and any('mul' in name or 'add' in name for name in names)
    assert all(kind == torch.float32 for _, kind in maps.seen), maps.seen
    y.float().square().sum().backward()
    for parameter in attention.decay.parameters():
        assert parameter.grad.isfinite().all() and (parameter.grad != 0).any()


def test_learns_from_where_finetuning_starts(fused, layer, tokens):
    """In float32 the authors' formula has no gradient for most of these betas."""
    attention = layer(mask_init='finetune', dtype=torch.float32, dim=48)
    assert (torch.sigmoid(attention.decay.beta) == 1).any()
    y = attention(tokens(17, dim=48, dtype=torch.float32), positions=attention.grid(4, 4))
    y.square().sum().backward()
    assert (attention.decay.beta.grad != 0).all()


def test_saves_no_map_of_every_curve_for_backward(layer, tokens):
    attention, length = layer(dtype=torch.float32), 1 + 49
    attention.fused_attn = False
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        attention(tokens(length, batch=1, dtype=torch.float32), positions=attention.grid(7, 7))
    maps = [shape for shape in saved if math.prod(shape) >= 49 * 49]
    assert maps  # scores and weights of every head
    assert all(math.prod(shape) <= 3 * length**2 for shape in maps), maps
