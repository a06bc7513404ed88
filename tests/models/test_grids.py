"""Any grid, in any order: outputs and gradients are those of a model that was built for that grid alone."""

import copy

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed

import violin_timm  # noqa: F401
from violin_timm.geometry import positions
from violin_timm.models.vit import resample_pos_embed_dino

TINY = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2, num_classes=10, beta_range=(0, 3))
VARIANTS = ['violin_deit_tiny', 'violin_deit3_small', 'violin_dino_small']
SIZES = [(32, 32), (16, 40), (40, 16), (8, 48), (8, 8)]


def create(variant='violin_deit_tiny', **kwargs):
    torch.manual_seed(1)
    return perturb(timm.create_model(variant, **{**TINY, **kwargs}))


def perturb(model):
    """Weights away from the initial ones, under which attention hardly matters."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if '.decay.' not in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
    return model


def built_for(model, variant, size, **kwargs):
    """A static model of that grid, with the weights of another whose position embedding is resampled."""
    static = timm.create_model(variant, **{**TINY, **kwargs, 'img_size': size})
    state = model.state_dict()
    if 'pos_embed' in state:
        prefix = 0 if model.no_embed_class else model.num_prefix_tokens
        state['pos_embed'] = resample_abs_pos_embed(
            state['pos_embed'], static.patch_embed.grid_size, (4, 4), num_prefix_tokens=prefix
        )
    static.load_state_dict(state)
    return static


def image(size, batch=2):
    return torch.randn(batch, 3, *size, generator=torch.Generator().manual_seed(size[0] + 100 * size[1]))


def results(model, *images):
    """Outputs, and gradients of all parameters but the position embedding (whose grids differ)."""
    model.zero_grad()
    outputs = [model(x) for x in images]
    sum(y.square().sum() for y in outputs).backward()
    return outputs, {n: p.grad.clone() for n, p in model.named_parameters() if n != 'pos_embed'}


def assert_equal(actual, expected, tolerance=1e-5):
    for y, z in zip(actual[0], expected[0], strict=True):
        torch.testing.assert_close(y, z, rtol=tolerance, atol=tolerance * z.abs().max().item())
    assert actual[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert actual[1][name].isfinite().all()
        scale = gradient.abs().max().item()
        torch.testing.assert_close(actual[1][name], gradient, rtol=0, atol=10 * tolerance * scale, msg=name)


@pytest.mark.parametrize('pos_embed', ['learn', 'none'])
@pytest.mark.parametrize('variant', VARIANTS)
def test_dynamic_grids_alternating_equal_static_ones(variant, pos_embed):
    dynamic = create(variant, dynamic_img_size=True, pos_embed=pos_embed)
    expected = {size: results(built_for(dynamic, variant, size, pos_embed=pos_embed), image(size)) for size in SIZES}
    for size in (*SIZES, *reversed(SIZES), SIZES[1]):
        assert_equal(results(dynamic, image(size)), expected[size])


@pytest.mark.parametrize('size', [(16, 40), (40, 16), (8, 48)])
def test_non_square_grid_uses_its_own_positions(size):
    """Against a model that is handed the positions explicitly, block by block."""
    model = create(img_size=size).eval()
    height, width = size[0] // 8, size[1] // 8
    components = model.blocks[0].attn.decay.settings.components
    place = torch.tensor(positions(components, height, width))
    x = model._pos_embed(model.patch_embed(image(size)))
    for block in model.blocks:
        x = x + block.attn(block.norm1(x), positions=place)
        x = x + block.mlp(block.norm2(x))
    torch.testing.assert_close(model.forward_features(image(size)), model.norm(x))
    mirrored = torch.tensor(positions(components, width, height))
    y = model.blocks[0].attn(x, positions=mirrored)
    if height > 1:
        assert not torch.allclose(y, model.blocks[0].attn(x, positions=place), rtol=1e-3)


def test_as_many_patches_in_another_shape():
    """8 x 18 and 12 x 12 in one process."""
    model = create(dynamic_img_size=True, pos_embed='none')
    wide, square = (64, 144), (96, 96)
    expected = {
        size: results(built_for(model, 'violin_deit_tiny', size, pos_embed='none'), image(size))
        for size in (wide, square)
    }
    for size in (wide, square, wide, square):
        assert_equal(results(model, image(size)), expected[size])
    # the same tokens on the other grid are another thing
    tokens = torch.randn(1, 144, 48)
    attention = model.blocks[0].attn
    outputs = [attention(tokens, positions=attention.grid(*grid)) for grid in ((8, 18), (12, 12))]
    assert not torch.allclose(*outputs, rtol=1e-3)


@pytest.mark.parametrize('variant', VARIANTS)
def test_checkpointing_across_crops(variant):
    """The forward of the first crop is recomputed after the last one went through, of as many patches in part."""
    crops = [image((32, 32)), image((16, 16)), image((16, 64)), image((64, 16))]
    model = create(variant, dynamic_img_size=True)
    expected = results(model, *crops)
    model.set_grad_checkpointing()
    assert_equal(results(model, *crops), expected, 1e-6)
    separate = [results(model, crop) for crop in crops]
    for name, gradient in expected[1].items():
        summed = sum(gradients[name] for _, gradients in separate)
        torch.testing.assert_close(summed, gradient, rtol=1e-4, atol=1e-4 * gradient.abs().max().item())


def test_checkpointing_really_recomputes():
    model = create()
    calls = []
    model.blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))
    model.set_grad_checkpointing()
    model(image((32, 32))).sum().backward()
    assert len(calls) == 2


def test_checkpointed_intermediates():
    model = create(dynamic_img_size=True)
    for size in ((32, 32), (16, 64)):
        expected = model.forward_intermediates(image(size))
        model.set_grad_checkpointing()
        actual = model.forward_intermediates(image(size))
        model.set_grad_checkpointing(False)
        for x, y in zip([actual[0], *actual[1]], [expected[0], *expected[1]], strict=True):
            torch.testing.assert_close(x, y)


def test_dynamic_padding_makes_a_larger_grid():
    model = create(dynamic_img_size=True, dynamic_img_pad=True)
    x = image((28, 36))
    padded = torch.nn.functional.pad(x, (0, 4, 0, 4))
    torch.testing.assert_close(model(x), model(padded))
    features = model.forward_intermediates(x, intermediates_only=True)
    assert features[-1].shape == (2, 48, 4, 5)


def test_wrong_size_is_refused_where_the_size_is_fixed():
    with pytest.raises(AssertionError, match=r'height \(16\)'):
        create()(image((16, 64)))  # as many patches as 32 x 32


@pytest.mark.parametrize('variant', VARIANTS)
@pytest.mark.parametrize('size', [(16, 40), (64, 64), (16, 64)])
def test_set_input_size(variant, size):
    model = create(variant)
    expected = results(built_for(model, variant, size), image(size))
    model.set_input_size(img_size=size)
    assert_equal(results(model, image(size)), expected)
    before = list(model.state_dict())
    assert before == list(create(variant).state_dict())  # keys never depend on the grid
    model.set_input_size(img_size=(32, 32))
    assert model(image((32, 32))).shape == (2, 10)


def test_set_input_size_changes_the_patch_size():
    model = create(pos_embed='none')
    model.set_input_size(img_size=(32, 64), patch_size=16)
    other = timm.create_model('violin_deit_tiny', **{**TINY, 'img_size': (32, 64), 'patch_size': 16}, pos_embed='none')
    other.load_state_dict(model.state_dict())
    assert model.patch_embed.grid_size == (2, 4)
    assert_equal(results(model, image((32, 64))), results(other, image((32, 64))))


@pytest.mark.parametrize('size', [(16, 40), (48, 48)])
def test_dino_resampling_is_the_same_in_every_way(size):
    """Dynamic, by set_input_size, and by hand."""
    dynamic = create('violin_dino_small', dynamic_img_size=True, pos_embed_resample='dino')
    resized = create('violin_dino_small', pos_embed_resample='dino')
    resized.set_input_size(img_size=size)
    static = timm.create_model('violin_dino_small', **{**TINY, 'img_size': size})
    state = dynamic.state_dict()
    grid = (size[0] // 8, size[1] // 8)
    state['pos_embed'] = resample_pos_embed_dino(state['pos_embed'], grid, (4, 4))
    static.load_state_dict(state)
    expected = results(static, image(size))
    assert_equal(results(dynamic, image(size)), expected)
    assert_equal(results(resized, image(size)), expected)
    timms = built_for(dynamic, 'violin_dino_small', size)
    assert not torch.allclose(timms(image(size)), expected[0][0], rtol=1e-3)


@pytest.mark.parametrize('kwargs', [{}, dict(mask='fixed'), dict(mask='none'), dict(curve_weights='learned')], ids=str)
def test_deepcopy(kwargs):
    if 'mask' in kwargs:
        kwargs['beta_range'] = None
    model = create(dynamic_img_size=True, **kwargs)
    results(model, image((16, 40)))
    twin = copy.deepcopy(model)
    assert list(twin.state_dict()) == list(model.state_dict())
    for size in SIZES:
        assert_equal(results(twin, image(size)), results(model, image(size)), 0)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert any(p.any() for p in model.blocks[0].attn.parameters())


@pytest.mark.parametrize('mask', ['learned', 'fixed'])
@pytest.mark.parametrize('variant', VARIANTS)
def test_meta_device_then_to_empty_then_load(variant, mask):
    kwargs = dict(mask=mask, beta_range=None, dynamic_img_size=True)
    source = create(variant, **kwargs)
    for way in ('context', 'argument'):
        with torch.device('meta' if way == 'context' else 'cpu'):
            model = timm.create_model(
                variant, **{**TINY, **kwargs}, **(dict(device='meta') if way == 'argument' else {})
            )
        assert all(t.is_meta for t in model.state_dict().values())
        assert model(torch.empty(2, 3, 16, 40, device='meta')).shape == (2, 10)
        model.to_empty(device='cpu')
        model.load_state_dict(source.state_dict())
        for size in SIZES[:3]:
            assert_equal(results(model, image(size)), results(source, image(size)), 0)


def test_meta_device_then_assign():
    source = create()
    with torch.device('meta'):
        model = timm.create_model('violin_deit_tiny', **TINY)
    model.load_state_dict(source.state_dict(), assign=True)
    assert torch.equal(model(image((32, 32))), source(image((32, 32))))


def test_inference_mode_then_training():
    size = (24, 56)  # a grid that no other test has seen
    model = create(dynamic_img_size=True)
    with torch.inference_mode():
        seen = model.eval()(image(size))
    y, gradients = results(model.train(), image(size))
    torch.testing.assert_close(y[0], seen.clone())
    assert all((g != 0).any() for n, g in gradients.items() if '.decay.' in n)


def shift(model):
    return [block.attn.decay.beta for block in model.blocks]


CHANGES = {
    'in place': lambda m: [b.sub_(1.0) for b in shift(m)],
    'through .data': lambda m: [b.data.sub_(1.0) for b in shift(m)],
    'through an array': lambda m: [b.detach().numpy().__isub__(1) for b in shift(m)],
    'one layer': lambda m: m.blocks[1].attn.decay.beta.sub_(1.0),
    'alpha': lambda m: m.blocks[0].attn.decay.alpha.mul_(2.0),
    'new parameter': lambda m: [
        setattr(b.attn.decay, 'beta', torch.nn.Parameter(b.attn.decay.beta - 1)) for b in m.blocks
    ],
    'load_state_dict': lambda m: m.load_state_dict(
        {k: v - 1 if k.endswith('beta') else v for k, v in m.state_dict().items()}
    ),
    'assigned': lambda m: m.load_state_dict(
        {k: v - 1 if k.endswith('beta') else v for k, v in m.state_dict().items()}, assign=True
    ),
    'reset': lambda m: [b.attn.decay.set_mask_init('pretrain') for b in m.blocks],
}


@pytest.mark.parametrize('mode', [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize('change', CHANGES)
def test_masks_at_inference_follow_their_parameters(change, mode):
    """However these are changed, and whatever was computed before."""
    model = create(dynamic_img_size=True, beta_range=None, mask_init='none').eval()
    with mode():
        before = {size: model(image(size)) for size in SIZES[:3]}
        assert all(torch.equal(model(image(size)), y) for size, y in before.items())
    with torch.no_grad():
        CHANGES[change](model)
    twin = create(dynamic_img_size=True).eval()
    twin.load_state_dict(model.state_dict())
    for size, y in before.items():
        expected = twin(image(size))  # with gradients: nothing is kept
        with mode():
            actual = model(image(size))
        scale = expected.abs().max().item()
        torch.testing.assert_close(actual.clone(), expected.detach(), rtol=1e-5, atol=1e-5 * scale)
        assert not torch.allclose(actual, y, rtol=1e-3)


def test_training_steps_between_validations():
    """Every validation sees the masks of the last step."""
    model = create(dynamic_img_size=True, beta_range=None, mask_init='none')
    optimiser = torch.optim.SGD([p for n, p in model.named_parameters() if '.decay.' in n], lr=10.0)
    seen = []
    for size in (SIZES[0], SIZES[1]) * 2:
        with torch.inference_mode():
            seen.append(model(image(SIZES[1])).clone())
        model(image(size)).square().mean().backward()
        optimiser.step()
        optimiser.zero_grad()
    twin = create(dynamic_img_size=True)
    twin.load_state_dict(model.state_dict())
    with torch.inference_mode():
        last = model(image(SIZES[1]))
        torch.testing.assert_close(last.clone(), twin(image(SIZES[1])).clone(), rtol=1e-5, atol=1e-4)
    assert all(not torch.equal(one, other) for one, other in zip(seen, [*seen[1:], last], strict=True))


@pytest.mark.parametrize('dtype', [torch.float64, torch.bfloat16])
def test_masks_at_inference_follow_the_dtype(dtype):
    model = create().eval()
    x = image((32, 32))
    with torch.inference_mode():
        model(x)
        model.to(dtype)
        y = model(x.to(dtype))
    twin = create().to(dtype).eval()
    assert y.dtype == dtype
    torch.testing.assert_close(y.clone(), twin(x.to(dtype)).detach(), rtol=1e-2, atol=1e-2 * y.abs().max().item())


def test_frozen_masks_train_the_backbone():
    """Masks made at inference serve a training forward whose masks need no gradient."""
    model = create(dynamic_img_size=True)
    expected = results(model, image((16, 40)))
    for block in model.blocks:
        block.attn.decay.requires_grad_(False)
    with torch.inference_mode():
        model(image((16, 40)))
    y = model(image((16, 40)))
    model.zero_grad()
    y.square().sum().backward()
    for name, parameter in model.named_parameters():
        if name in expected[1] and '.decay.' not in name:
            scale = expected[1][name].abs().max().item()
            torch.testing.assert_close(parameter.grad, expected[1][name], rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
def test_model_in_half_precision(dtype):
    model = create(dynamic_img_size=True)
    expected = model(image((16, 40)))
    y = model.to(dtype)(image((16, 40)).to(dtype))
    assert y.dtype == dtype
    assert (y.float() - expected).abs().max() < 0.1 * expected.abs().max()


@pytest.mark.parametrize('num_prefix', [0, 1, 4])
@pytest.mark.parametrize('old, new', [((4, 4), (6, 6)), ((4, 4), (2, 5)), ((3, 5), (5, 3))])
def test_dino_resampling_is_dinos(old, new, num_prefix):
    """Bicubic by a scale factor, not antialiased; and nothing to do for the same grid."""
    position = torch.randn(1, num_prefix + old[0] * old[1], 8)
    assert resample_pos_embed_dino(position, old, old, num_prefix) is position
    resampled = resample_pos_embed_dino(position, new, old, num_prefix)
    assert torch.equal(resampled[:, :num_prefix], position[:, :num_prefix])
    grid = position[:, num_prefix:].reshape(1, *old, 8).permute(0, 3, 1, 2)
    expected = torch.nn.functional.interpolate(
        grid, scale_factor=((new[0] + 0.1) / old[0], (new[1] + 0.1) / old[1]), mode='bicubic'
    )
    assert expected.shape[2:] == new
    torch.testing.assert_close(resampled[:, num_prefix:], expected.permute(0, 2, 3, 1).reshape(1, -1, 8))
