"""`ViolinAttention` against the authors' recorded numbers, a per-pair reference, timm's own layer, and the paper."""

import itertools
import json
import math

import pytest
import torch
from safetensors.torch import load_file
from timm.layers import Attention, set_fused_attn, use_fused_attn
from torch.utils._python_dispatch import TorchDispatchMode

from violin_timm import ViolinAttention, curve_order
from violin_timm.geometry import DEFAULT_CURVES
from violin_timm.models.authors import to_native
from violin_timm.settings import MaskSettings
from violin_timm.strategies import ALPHA_ON, STRATEGIES

AUTHORS_STRATEGIES = ('mul_v1', 'mul_v2', 'add_v1', 'mul_after_sm', 'add_after_sm')
CASES = [
    f'{strategy}|{case}'
    for strategy in AUTHORS_STRATEGIES
    for case in ('cls=0|learned|scale=1', 'cls=1|learned|scale=1', 'cls=0|fixed|scale=1', 'cls=1|learned|scale=0')
]


@pytest.fixture(scope='module')
def authors(golden):
    numbers = load_file(golden('attention_authors.safetensors'))
    cases = {}
    for key, value in numbers.items():
        case, name = key.split('/', 1)
        cases.setdefault(case, {})[name] = value
    assert set(cases) == set(CASES) == set(json.loads(golden('attention_authors.json').read_text()))
    return cases


def native(case, kind):
    """Entries ``kind/...`` of a case under our names."""
    prefixed = {f'b.attn.{k.removeprefix(kind)}': v for k, v in case.items() if k.startswith(kind)}
    if any('ai_list' in k for k in prefixed):
        prefixed = to_native(prefixed, DEFAULT_CURVES)
    return {k.removeprefix('b.attn.'): v for k, v in prefixed.items()}


@pytest.mark.parametrize('fused', [False, True])
@pytest.mark.parametrize('name', CASES)
def test_equals_the_authors(name, fused, authors, close):
    case = authors[name]
    strategy, class_token, mask, scale = name.split('|')
    attention = ViolinAttention(
        48,
        3,
        qkv_bias=True,
        settings=MaskSettings(strategy=strategy, mask=mask, alpha='learned' if scale == 'scale=1' else 'none'),
    )
    attention.load_state_dict(native(case, 'param/'))
    attention.fused_attn = fused
    x = case['x'].clone().requires_grad_()
    assert x.shape[1] == 16 + (class_token == 'cls=1')
    y = attention(x, positions=attention.grid(4, 4))
    close(y, case['y'], what='y')
    y.backward(case['gy'])
    close(x.grad, case['gx'], what='gx')
    expected = {'decay.alpha': case['grad/normalize']} if scale == 'scale=1' else {}
    if mask == 'learned':
        expected['decay.beta'] = native(case, 'grad/')['decay.beta']
    assert expected
    for parameter, gradient in expected.items():
        assert (gradient != 0).any()
        close(attention.get_parameter(parameter).grad, gradient, what=parameter)


def layer(cls=ViolinAttention, dim=12, num_heads=3, seed=1, dtype=torch.float64, layer_kwargs=(), **settings):
    torch.manual_seed(seed)
    kwargs = dict(qkv_bias=True, **dict(layer_kwargs))
    if cls is ViolinAttention:
        kwargs['settings'] = MaskSettings(**settings)
    return cls(dim, num_heads, **kwargs).to(dtype)


def tokens(count, batch=2, dim=12, dtype=torch.float64):
    return torch.randn(batch, count, dim, generator=torch.Generator().manual_seed(2)).to(dtype)


def softmax(logits):
    powers = [math.exp(value - max(logits)) for value in logits]
    return [power / sum(powers) for power in powers]


def per_pair(attention, x, grid, num_prefix, strategy, alpha_on, bias):
    """Masked attention of one image, one pair of tokens after another, in Python's floats."""
    length, heads = len(x), attention.num_heads
    size = attention.head_dim
    q, k, v = (x @ attention.qkv.weight.T + attention.qkv.bias).view(length, 3, heads, size).permute(1, 2, 0, 3)
    orders = [curve_order(name, *grid).tolist() for name in attention.decay.settings.components]
    result = torch.zeros(length, heads * size, dtype=torch.float64)
    for h, i in itertools.product(range(heads), range(length)):
        alpha = attention.decay.alpha[h].item()
        gammas = [1 / (1 + math.exp(-b)) for b in attention.decay.beta[h].tolist()]
        scores, masks = [], []
        for j in range(length):
            score, mask = (q[h, i] @ k[h, j]).item() / math.sqrt(size), 1.0
            if min(i, j) >= num_prefix:
                steps = [abs(o.index(i - num_prefix) - o.index(j - num_prefix)) for o in orders]
                mask = sum(g**d for g, d in zip(gammas, steps, strict=True)) / len(gammas)
            scores.append(alpha * score if alpha_on == 'scores' else score)
            masks.append(alpha * mask if alpha_on == 'mask' else mask)
        added = bias[i].tolist()
        if strategy in ('mul_v1', 'mul_v2', 'add_v1'):
            meet = {'mul_v1': lambda a, m: a * m, 'mul_v2': lambda a, m: a * (1 + m), 'add_v1': lambda a, m: a + m}
            weights = softmax([meet[strategy](a, m) + b for a, m, b in zip(scores, masks, added, strict=True)])
        else:
            shares = softmax([a + b for a, b in zip(scores, added, strict=True)])
            meet = {'mul_after_sm': lambda s, m: s * m, 'add_after_sm': lambda s, m: s + m}[strategy]
            weights = [0.0 if b == -math.inf else meet(s, m) for s, m, b in zip(shares, masks, added, strict=True)]
        result[i, h * size : (h + 1) * size] = sum(w * v[h, j] for j, w in enumerate(weights))
    return result @ attention.proj.weight.T + attention.proj.bias


@pytest.mark.parametrize('num_prefix', [0, 1, 2, 5])
@pytest.mark.parametrize('alpha_on', ALPHA_ON)
@pytest.mark.parametrize('strategy', AUTHORS_STRATEGIES)
@torch.no_grad()
def test_equals_per_pair_reference(strategy, alpha_on, num_prefix):
    attention = layer(strategy=strategy, alpha_on=alpha_on, beta_range=(-1, 4), alpha_mean=1.0)
    x = tokens(num_prefix + 6, batch=1)
    length = x.shape[1]
    positions = attention.grid(2, 3)
    bias = torch.randn(length, length, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    cut = bias > -0.5
    cut.fill_diagonal_(True)
    infinite = torch.zeros_like(bias)
    causal = infinite.masked_fill(~torch.ones_like(cut).tril(), -math.inf)
    for arguments, added in (
        ({}, infinite),
        (dict(attn_mask=bias), bias),
        (dict(is_causal=True), causal),
        (dict(attn_mask=cut), infinite.masked_fill(~cut, -math.inf)),
        (dict(attn_mask=cut, is_causal=True), causal),
    ):  # timm: is_causal takes precedence
        actual = attention(x, positions=positions, **arguments)[0]
        expected = per_pair(attention, x[0], (2, 3), num_prefix, strategy, alpha_on, added)
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


# --- timm's meaning of everything that is timm's


def all_ones(attention):
    """A mask of ones and alpha 1."""
    with torch.no_grad():
        attention.decay.beta.fill_(1e4)
        attention.decay.alpha.fill_(1.0)
    return attention


def timm_arguments(length):
    generator = torch.Generator().manual_seed(6)
    additive = torch.randn(length, length, generator=generator, dtype=torch.float64)
    cut = additive > -0.5
    cut.fill_diagonal_(True)
    per_head = torch.randn(2, 3, length, length, generator=generator, dtype=torch.float64)
    return {
        'nothing': {},
        'boolean': dict(attn_mask=cut),
        'additive': dict(attn_mask=additive),
        'infinite': dict(attn_mask=additive.masked_fill(~cut, -math.inf)),
        'causal': dict(is_causal=True),
        'per head': dict(attn_mask=per_head),
        'keys of each image': dict(attn_mask=cut[:2, None, None]),
    }


@pytest.mark.parametrize('kind', timm_arguments(3))
@pytest.mark.parametrize('strategy', ['mul_v1', 'mul_v2', 'add_v1', 'mul_after_sm', 'add_after_sm'])
def test_attn_mask_means_what_it_means_in_timm(strategy, kind):
    """With a mask of ones every strategy is timm's attention, but for a factor 2 of the logits or the sum of values."""
    ours, plain = all_ones(layer(strategy=strategy)), layer(Attention)
    assert all(torch.equal(p, ours.get_parameter(n)) for n, p in plain.named_parameters())
    x, arguments = tokens(1 + 6), timm_arguments(7)[kind]
    actual = ours(x, positions=ours.grid(2, 3), **arguments)
    if strategy == 'mul_v2':  # S(2A)
        with torch.no_grad():
            plain.qkv.weight[:12] *= 2
            plain.qkv.bias[:12] *= 2
    expected = plain(x, **arguments)
    if strategy == 'add_after_sm':  # S(A) + 1 where no key is cut
        bias = torch.zeros(7, 7, dtype=torch.float64)
        if arguments.get('is_causal'):
            bias = bias.masked_fill(~torch.ones(7, 7, dtype=torch.bool).tril(), -math.inf)
        elif kind != 'nothing':
            given = arguments['attn_mask']
            bias = given if given.dtype != torch.bool else bias.masked_fill(~given, -math.inf)
        kept = (bias > -math.inf).double()
        values = plain.qkv(x)[..., 24:].view(2, 7, 3, 4).transpose(1, 2)
        summed = (kept @ values).transpose(1, 2).reshape(2, 7, 12)
        expected = expected + summed @ plain.proj.weight.T
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize('fused', [False, True])
@pytest.mark.parametrize(
    'options',
    [
        dict(),
        dict(qk_norm=True),
        dict(scale_norm=True),
        dict(gated=True),
        dict(attn_head_dim=6),
        dict(dim_out=8),
        dict(proj_bias=False),
    ],
    ids=str,
)
def test_options_of_timms_layer(options, fused):
    options = dict(options, norm_layer=torch.nn.LayerNorm)
    ours, plain = all_ones(layer(layer_kwargs=options)), layer(Attention, layer_kwargs=options)
    plain.fused_attn = fused
    x = tokens(6)
    torch.testing.assert_close(ours(x, positions=ours.grid(2, 3)), plain(x), rtol=1e-9, atol=1e-11)


def test_dropout_of_attention_and_projection_is_timms():
    options = dict(attn_drop=0.4, proj_drop=0.3)
    ours, plain = all_ones(layer(layer_kwargs=options)), layer(Attention, layer_kwargs=options)
    plain.fused_attn = False
    x = tokens(6)
    positions = ours.grid(2, 3)
    outputs = []
    for function in (lambda: ours(x, positions=positions), lambda: plain(x)):
        torch.manual_seed(7)
        outputs.append(function())
    torch.testing.assert_close(*outputs, rtol=1e-9, atol=1e-11)
    ours.eval(), plain.eval()
    assert not torch.allclose(outputs[0], ours(x, positions=positions))
    torch.testing.assert_close(ours(x, positions=positions), plain(x), rtol=1e-9, atol=1e-11)


@pytest.fixture(params=[False, True], ids=['unfused', 'fused'])
def fused(request):
    before = use_fused_attn(), use_fused_attn(experimental=True)
    set_fused_attn(request.param)
    yield request.param
    set_fused_attn(*before)


@pytest.mark.parametrize('kind', timm_arguments(3))
@pytest.mark.parametrize('settings', [None, MaskSettings(mask='none', alpha='none')], ids=['no settings', 'none'])
def test_without_mask_and_alpha_is_timms_to_the_last_bit(settings, kind, fused):
    torch.manual_seed(1)
    plain = Attention(12, 3, qkv_bias=True)
    ours = ViolinAttention(12, 3, qkv_bias=True, settings=settings)
    assert ours.fused_attn == plain.fused_attn == fused
    assert list(ours.state_dict()) == list(plain.state_dict())
    ours.load_state_dict(plain.state_dict())
    x = tokens(7, dtype=torch.float32)
    arguments = {
        k: v.float() if torch.is_tensor(v) and v.is_floating_point() else v for k, v in timm_arguments(7)[kind].items()
    }
    results = []
    for attention in (ours, plain):
        leaf = x.clone().requires_grad_()
        y = attention(leaf, **arguments)
        y.square().sum().backward()
        results.append((y, leaf.grad, attention.qkv.weight.grad))
    for actual, expected in zip(*results, strict=True):
        assert torch.equal(actual, expected)


def test_fused_switch_changes_nothing_with_a_mask(fused):
    attention = layer(strategy='mul_v1')
    assert attention.fused_attn == fused
    x = tokens(7)
    y = attention(x, positions=attention.grid(2, 3))
    torch.testing.assert_close(
        y[0], per_pair(attention, x[0], (2, 3), 1, 'mul_v1', 'mask', torch.zeros(7, 7)).detach(), rtol=1e-9, atol=1e-11
    )


# --- the four arms

ARMS = {
    'plain': ('none', 'none'),
    'alpha only': ('none', 'learned'),
    'mask only': ('learned', 'none'),
    'both': ('learned', 'learned'),
    'fixed': ('fixed', 'none'),
    'fixed and alpha': ('fixed', 'learned'),
}


@pytest.mark.parametrize('arm', ARMS)
def test_arm_has_its_parameters_and_no_other(arm):
    mask, alpha = ARMS[arm]
    attention = layer(mask=mask, alpha=alpha)
    added = dict(attention.named_parameters()).keys() - dict(layer(Attention).named_parameters()).keys()
    assert added == ({'decay.beta'} if mask == 'learned' else set()) | ({'decay.alpha'} if alpha != 'none' else set())
    keys = attention.state_dict().keys() - layer(Attention).state_dict().keys()
    assert keys == added | ({'decay.beta'} if mask == 'fixed' else set())
    count = sum(attention.get_parameter(n).numel() for n in added)
    assert count == 3 * (8 * (mask == 'learned') + (alpha == 'learned'))


def test_arms_differ_by_what_they_are_called(fused):
    """alpha only: scaled logits; mask only: alpha 1; both: their product."""
    x = tokens(7)
    alpha = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
    arms = {name: layer(mask=mask, alpha=a) for name, (mask, a) in ARMS.items()}
    for attention in arms.values():
        if attention.decay is not None and attention.decay.alpha is not None:
            attention.decay.alpha.data.copy_(alpha)
    y = {name: a(x, positions=a.grid(2, 3) if a.has_mask else None) for name, a in arms.items()}

    plain = layer(Attention)
    scaled = layer(Attention)
    scaled.qkv.weight.data[:12] *= alpha.repeat_interleave(4)[:, None]
    scaled.qkv.bias.data[:12] *= alpha.repeat_interleave(4)
    torch.testing.assert_close(y['plain'], plain(x))
    torch.testing.assert_close(y['alpha only'], scaled(x))
    for name, reference in (('mask only', 1.0), ('both', alpha), ('fixed', 1.0), ('fixed and alpha', alpha)):
        attention = layer(mask=ARMS[name][0])
        attention.decay.alpha.data.copy_(torch.as_tensor(reference))
        torch.testing.assert_close(y[name], attention(x, positions=attention.grid(2, 3)))
    assert len({tuple(value.flatten().tolist()) for value in y.values()}) == len(ARMS)


def test_fixed_mask_has_the_gamma_that_was_asked_for():
    attention = layer(mask='fixed', gamma=0.9, curves='raster', dtype=torch.float32)
    mask = attention.decay(attention.grid(1, 6))
    torch.testing.assert_close(mask[0, 0], 0.9 ** torch.arange(6))
    assert not attention.decay.beta.requires_grad


def test_learned_curve_weights_are_equal_at_first_and_learn():
    mean, learned = layer(), layer(curve_weights='learned')
    x = tokens(6)
    positions = mean.grid(2, 3)
    y = learned(x, positions=positions)
    torch.testing.assert_close(y, mean(x, positions=positions))
    y.square().sum().backward()
    assert learned.decay.curve_logits.shape == (3, 8)
    assert learned.decay.curve_logits.grad.isfinite().all() and (learned.decay.curve_logits.grad != 0).any()


# --- numbers


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
def test_mask_meets_scores_in_float32(strategy, dtype, how, fused):
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


def test_learns_from_where_finetuning_starts(fused):
    """In float32 the authors' formula has no gradient for most of these betas."""
    attention = layer(mask_init='finetune', dtype=torch.float32, dim=48)
    assert (torch.sigmoid(attention.decay.beta) == 1).any()
    y = attention(tokens(17, dim=48, dtype=torch.float32), positions=attention.grid(4, 4))
    y.square().sum().backward()
    assert (attention.decay.beta.grad != 0).all()


def test_saves_no_map_of_every_curve_for_backward():
    attention, length = layer(dtype=torch.float32), 1 + 49
    attention.fused_attn = False
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        attention(tokens(length, batch=1, dtype=torch.float32), positions=attention.grid(7, 7))
    maps = [shape for shape in saved if math.prod(shape) >= 49 * 49]
    assert maps  # scores and weights of every head
    assert all(math.prod(shape) <= 3 * length**2 for shape in maps), maps


# --- the paper's statements


@pytest.mark.parametrize('strategy', STRATEGIES)
@pytest.mark.parametrize('num_prefix', [0, 2])
def test_permutation_equivariance(strategy, num_prefix):
    """C.1: tokens permuted together with their positions give permuted outputs; alone, they do not."""
    attention, x = layer(strategy=strategy, beta_range=(0, 3)), tokens(num_prefix + 12)
    positions = attention.grid(3, 4)
    shuffle = torch.randperm(12)
    whole = torch.cat([torch.arange(num_prefix), num_prefix + shuffle])
    y = attention(x, positions=positions)
    torch.testing.assert_close(attention(x[:, whole], positions=positions[:, shuffle]), y[:, whole])
    assert not torch.allclose(attention(x[:, whole], positions=positions), y[:, whole])


@pytest.mark.parametrize('curve', DEFAULT_CURVES)
def test_permuting_the_mask_is_permuting_the_sequence(curve):
    """C.3: a curve's mask is the one-dimensional decay on tokens put into the curve's order, and back."""
    x = tokens(12)
    along, line = layer(curves=curve, beta_range=(0, 3)), layer(curves='raster', beta_range=(0, 3))
    order = torch.tensor(curve_order(curve, 3, 4))
    expected = torch.empty_like(x)
    expected[:, order] = line(x[:, order], positions=line.grid(1, 12))
    torch.testing.assert_close(along(x, positions=along.grid(3, 4)), expected)
    mask, base = along.decay(along.grid(3, 4)), line.decay(line.grid(1, 12))
    torch.testing.assert_close(mask[:, order][:, :, order], base)


# --- refusals


def test_masked_attention_needs_positions():
    with pytest.raises(ValueError, match='positions: got None'):
        layer()(tokens(6))


def test_more_patches_than_tokens_are_refused():
    attention = layer()
    with pytest.raises((AssertionError, ValueError), match='positions'):
        attention(tokens(6), positions=attention.grid(3, 3))


def test_positions_of_other_curves_are_refused():
    attention = layer()
    other = layer(curves='snake')
    with pytest.raises((AssertionError, ValueError), match='positions'):
        attention(tokens(6), positions=other.grid(2, 3))
