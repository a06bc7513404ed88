"""Every registered variant: sizes, weights it points to, default pooling, and timm's own model with the mask off."""

import functools

import pytest
import timm
import torch
from timm.layers import set_fused_attn, use_fused_attn

from violin_timm.models import ViolinVisionTransformer

VARIANTS = timm.list_models('violin*')
TAGGED = timm.list_pretrained('violin*')
TINY = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2, num_classes=10)
OFF = dict(mask='none', alpha='none')
PLAIN = {
    'violin_deit_tiny': 'deit_tiny_patch16_224',
    'violin_deit3_small': 'deit3_small_patch16_224',
    'violin_dino_small': 'vit_small_patch16_224.dino',
}


@functools.cache
def on_meta(name, **kwargs):
    with torch.device('meta'):
        return timm.create_model(name, **kwargs)


def count(model):
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_the_variants_are_registered():
    assert {
        'violin_deit_tiny',
        'violin_deit_small',
        'violin_deit_base',
        'violin_deit3_small',
        'violin_deit3_base',
        'violin_deit3_large',
        'violin_deit3_huge',
        'violin_dino_small',
        'violin_dino_small_patch8',
        'violin_dino_base',
        'violin_dino_base_patch8',
        'violin_pixel_tiny',
    } <= set(VARIANTS)


@pytest.mark.parametrize('name', VARIANTS)
def test_forward(name):
    """At the native patch size, on a grid of 2 x 3."""
    meta = on_meta(name)
    assert isinstance(meta, ViolinVisionTransformer)
    if count(meta) > 100e6:
        pytest.skip('more than 100 M parameters')
    patch = meta.patch_embed.patch_size[0]
    model = timm.create_model(name, img_size=(2 * patch, 3 * patch)).eval()
    assert count(model) <= count(meta)
    with torch.inference_mode():
        x = torch.randn(2, model.in_chans, 2 * patch, 3 * patch)
        y, features = model(x), model.forward_features(x)
    assert y.shape == (2, model.num_classes or model.num_features)
    assert y.isfinite().all()
    assert (features[0] != features[1]).any()  # a head may start at zero


@pytest.mark.parametrize('name', VARIANTS)
def test_forward_at_native_size_has_the_right_shapes(name):
    model = on_meta(name)
    size = model.patch_embed.img_size
    y = model(torch.empty(1, model.in_chans, *size, device='meta'))
    assert y.shape == (1, model.num_classes or model.num_features)
    assert model.patch_embed.grid_size == {
        'violin_deit3_huge': (16, 16),
        'violin_dino_small_patch8': (28, 28),
        'violin_dino_base_patch8': (28, 28),
        'violin_pixel_tiny': (32, 32),
        'violin_pixel_nano': (8, 8),
    }.get(name, (14, 14))


@pytest.mark.parametrize(
    'name, expected',
    [('violin_deit_tiny', 5_717_356), ('violin_deit_small', 22_050_544), ('violin_deit_base', 86_567_416)],
)
def test_parameters_as_the_authors_count_them(name, expected):
    assert count(on_meta(name)) == expected


@pytest.mark.parametrize('name', VARIANTS)
def test_mask_adds_layers_x_heads_x_curves_plus_one(name):
    model = on_meta(name)
    added = len(model.blocks) * model.blocks[0].attn.num_heads * (8 + 1)
    assert count(model) - count(on_meta(name, **OFF)) == added
    if name == 'violin_deit_base':
        assert added == 1296


# --- pretrained weights


def plain_name(cfg):
    return cfg.hf_hub_id.removeprefix('timm/')


def test_every_paper_model_has_weights_to_start_from():
    families = {name.split('.')[0] for name in TAGGED}
    assert families == {name for name in VARIANTS if 'pixel' not in name}
    assert len(TAGGED) == 22


@pytest.mark.parametrize('name', TAGGED)
def test_pretrained_cfg_is_that_of_timms_plain_weights(name):
    cfg = timm.get_pretrained_cfg(name)
    plain = timm.get_pretrained_cfg(plain_name(cfg))
    # timm writes 'timm/' for a hub id made of its own name
    full_id = plain.hf_hub_id + f'{plain.architecture}.{plain.tag}' if plain.hf_hub_id == 'timm/' else plain.hf_hub_id
    assert cfg.hf_hub_id == full_id
    theirs, ours = plain.to_dict(), cfg.to_dict()
    for key in ('architecture', 'tag', 'hf_hub_id', 'custom_load'):
        theirs.pop(key, None), ours.pop(key, None)
    assert ours == theirs
    assert not cfg.custom_load
    assert name.split('.')[1] == plain.tag + '_384' * ('patch16_384' in plain.architecture)
    assert (cfg.input_size == (3, 384, 384)) == name.endswith('_384')


@pytest.mark.parametrize('name', TAGGED)
def test_shapes_are_those_of_timms_plain_model(name):
    cfg = timm.get_pretrained_cfg(name)
    ours, plain = on_meta(name, class_token=True), on_meta(plain_name(cfg))
    shapes = {k: v.shape for k, v in ours.state_dict().items() if '.decay.' not in k}
    assert shapes == {k: v.shape for k, v in plain.state_dict().items()}
    assert ours.patch_embed.img_size == plain.patch_embed.img_size == cfg.input_size[1:]


# --- class token or GAP


@pytest.mark.parametrize('name', VARIANTS)
def test_default_pooling(name):
    model = on_meta(name)
    gap = 'violin_deit_' in name or 'pixel' in name
    assert model.has_class_token == (model.cls_token is not None) == (not gap)
    assert model.global_pool == ('avg' if gap else 'token')
    assert isinstance(model.norm, torch.nn.LayerNorm) and isinstance(model.fc_norm, torch.nn.Identity)


@pytest.mark.parametrize('name', ['violin_deit_tiny', 'violin_deit3_small', 'violin_dino_small', 'violin_pixel_tiny'])
@pytest.mark.parametrize(
    'given, class_token, pool',
    [
        (dict(class_token=True), True, 'token'),
        (dict(class_token=False), False, 'avg'),
        (dict(global_pool='token'), True, 'token'),
        (dict(global_pool='avg'), False, 'avg'),
        (dict(global_pool='max'), False, 'max'),
        (dict(class_token=True, global_pool='avg'), True, 'avg'),
        (dict(class_token=False, global_pool='max'), False, 'max'),
        (dict(class_token=True, global_pool=''), True, ''),
        (dict(class_token=False, global_pool=''), False, ''),
    ],
)
def test_class_token_is_the_switch(name, given, class_token, pool):
    model = timm.create_model(name, **TINY, **given)
    assert model.has_class_token == (model.cls_token is not None) == class_token
    assert model.global_pool == pool
    assert model.num_prefix_tokens == class_token
    assert model._model_args['class_token'] == class_token and model._model_args['global_pool'] == pool
    assert model(torch.randn(2, 3, 32, 32)).shape == ((2, 10) if pool else (2, 16 + class_token, 10))


@pytest.mark.parametrize('name', ['violin_deit_tiny', 'violin_dino_small'])
def test_token_pooling_without_a_token_is_refused(name):
    with pytest.raises(ValueError, match="global_pool: got 'token' with class_token=False"):
        timm.create_model(name, **TINY, class_token=False, global_pool='token')


# --- what can be asked for, and what is refused


@pytest.mark.parametrize(
    'kwargs',
    [
        dict(pos_embed='none'),
        dict(curves='snake,hilbert_T'),
        dict(curves=['peano']),
        dict(geometry='manhattan'),
        dict(geometry='random', num_random=2),
        dict(mask='fixed'),
        dict(mask='none'),
        dict(alpha='none'),
        dict(strategy='add_after_sm'),
        dict(alpha_on='scores'),
        dict(curve_weights='learned'),
        dict(in_chans=1),
        dict(num_classes=0),
        dict(dynamic_img_size=True),
        dict(reg_tokens=3),
        dict(drop_path_rate=0.2),
        dict(class_token=True, reg_tokens=2, no_embed_class=True),
        dict(init_values=0.1),
        dict(qk_norm=True),
        dict(pre_norm=True),
        dict(global_pool='map'),
        dict(mask_init='finetune'),
        dict(img_size=(16, 40)),
        dict(pos_embed='none', class_token=True),
        dict(fc_norm=True),
        dict(mask='none', patch_drop_rate=0.5),
        dict(weight_init='jax'),
        dict(pos_embed_resample='dino', dynamic_img_size=True),
    ],
    ids=str,
)
def test_argument_works_through_create_model(kwargs):
    kwargs = {**TINY, **kwargs}
    model = timm.create_model('violin_deit_tiny', **kwargs)
    size = kwargs['img_size'] if isinstance(kwargs['img_size'], tuple) else (32, 32)
    y = model(torch.randn(2, kwargs.get('in_chans', 3), *size))
    assert y.shape == (2, kwargs['num_classes'] or 48)
    y.square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
    decay = model.blocks[0].attn.decay
    for name in set(kwargs) & {'mask', 'alpha', 'geometry', 'strategy', 'curve_weights', 'alpha_on', 'mask_init'}:
        assert getattr(decay.settings, name) == kwargs[name]
    if kwargs.get('mask') != 'none':
        components = decay.settings.components
        assert decay.beta.shape == (3, len(components)) and model.curve_names == ','.join(components)
    assert (model.pos_embed is None) == (kwargs.get('pos_embed') == 'none')


@pytest.mark.parametrize(
    'kwargs, error, message',
    [
        (dict(curves='hilbrt'), ValueError, 'hilbrt'),
        (dict(mask='lerned'), ValueError, "mask: got 'lerned'"),
        (dict(strategy='mul'), ValueError, "strategy: got 'mul'"),
        (dict(mask='none', curves='snake'), ValueError, 'curves: got'),
        (dict(patch_drop_rate=0.5), ValueError, r'patch_drop_rate: got 0\.5'),
        (dict(attn_layer=torch.nn.Identity), ValueError, 'attn_layer: got'),
        (dict(block_fn=torch.nn.Identity), ValueError, 'block_fn: got'),
        (dict(pos_embed_resample='bicubic'), ValueError, "pos_embed_resample: got 'bicubic'; choose from timm, dino"),
        (dict(curve='snake'), TypeError, 'curve'),
        (dict(mask_ratio=0.5), TypeError, 'mask_ratio'),
    ],
    ids=str,
)
def test_what_cannot_be_honoured_is_refused_by_name(kwargs, error, message):
    with pytest.raises(error, match=message):
        timm.create_model('violin_deit_tiny', **TINY, **kwargs)


# --- with the mask off, timm's own model


@pytest.fixture(params=[False, True], ids=['unfused', 'fused'])
def fused(request):
    before = use_fused_attn(), use_fused_attn(experimental=True)
    set_fused_attn(request.param)
    yield
    set_fused_attn(*before)


def pair(name, plain_kwargs=(), **kwargs):
    """Ours with the mask off, timm's own, and their common weights drawn at random, biases and norms too."""
    plain = timm.create_model(PLAIN[name], **{**TINY, **kwargs, **dict(plain_kwargs)})
    ours = timm.create_model(name, **{**TINY, **OFF, **kwargs})
    generator = torch.Generator().manual_seed(3)
    state = {k: v + 0.4 * torch.randn(v.shape, generator=generator) for k, v in plain.state_dict().items()}
    plain.load_state_dict(state)
    ours.load_state_dict(state)
    assert list(ours.state_dict()) == list(state)
    return ours, plain


def run(model, image, seed=None):
    model.zero_grad()
    if seed is not None:
        torch.manual_seed(seed)
    y = model(image)
    y.square().sum().backward()
    return [y, *(p.grad for _, p in sorted(model.named_parameters()))]


def assert_same_bits(ours, theirs):
    assert len(ours) == len(theirs)
    for actual, expected in zip(ours, theirs, strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    'kwargs',
    [
        {},
        dict(reg_tokens=2),
        dict(qk_norm=True),
        dict(pos_embed='none'),
        dict(num_classes=0),
        dict(in_chans=1),
        dict(dynamic_img_size=True),
        dict(no_embed_class=True),
        dict(init_values=0.5),
    ],
    ids=str,
)
@pytest.mark.parametrize('name', PLAIN)
def test_equals_timms_own_model_to_the_last_bit(name, kwargs, fused):
    ours, plain = pair(name, class_token=True, **kwargs)
    image = torch.randn(2, kwargs.get('in_chans', 3), 32, 32)
    assert_same_bits(run(ours, image), run(plain, image))
    if 'dynamic_img_size' in kwargs:
        image = torch.randn(2, 3, 24, 40)
        assert_same_bits(run(ours, image), run(plain, image))


def test_gap_equals_timms_own_model_to_the_last_bit(fused):
    ours, plain = pair('violin_deit_tiny', dict(class_token=False, global_pool='avg', fc_norm=False))
    image = torch.randn(2, 3, 32, 32)
    assert_same_bits(run(ours, image), run(plain, image))


@pytest.mark.parametrize('checkpointing', [False, True])
def test_training_with_every_dropout_equals_timms_to_the_last_bit(checkpointing):
    rates = dict(
        drop_path_rate=0.3,
        attn_drop_rate=0.2,
        proj_drop_rate=0.2,
        drop_rate=0.2,
        pos_drop_rate=0.2,
        patch_drop_rate=0.25,
    )
    ours, plain = pair('violin_deit_tiny', class_token=True, **rates)
    for model in (ours, plain):
        model.train().set_grad_checkpointing(checkpointing)
    image = torch.randn(4, 3, 32, 32)
    assert_same_bits(run(ours, image, seed=5), run(plain, image, seed=5))


@pytest.mark.parametrize(
    'mask',
    [torch.ones(17, 17, dtype=torch.bool).tril(), torch.linspace(-2, 2, 17 * 17).view(17, 17)],
    ids=['boolean', 'added'],
)
def test_features_and_attention_masks_equal_timms(mask):
    ours, plain = pair('violin_deit3_small')
    image = torch.randn(2, 3, 32, 32)
    assert torch.equal(ours.forward_features(image, attn_mask=mask), plain.forward_features(image, attn_mask=mask))
    assert torch.equal(ours.forward_features(image, is_causal=True), plain.forward_features(image, is_causal=True))
    for options in (
        dict(),
        dict(indices=1, norm=True),
        dict(indices=[0], stop_early=True, intermediates_only=True),
        dict(return_prefix_tokens=True, output_fmt='NLC'),
        dict(output_dict=True, return_prefix_tokens=True),
        dict(attn_mask=mask),
    ):
        results = [model.forward_intermediates(image, **options) for model in (ours, plain)]
        flat = [torch.utils._pytree.tree_flatten(result) for result in results]
        assert flat[0][1] == flat[1][1], options
        assert_same_bits(flat[0][0], flat[1][0])


def test_mask_changes_the_features():
    """The comparisons above would pass as well if masks were never used."""
    _, plain = pair('violin_deit3_small')
    masked = timm.create_model('violin_deit3_small', **TINY, alpha='none', beta_range=(1, 2))
    masked.load_state_dict({**masked.state_dict(), **plain.state_dict()})
    image = torch.randn(2, 3, 32, 32)
    assert not torch.allclose(masked(image), plain(image), rtol=1e-3, atol=1e-3)
    mask = torch.ones(17, 17, dtype=torch.bool).tril()
    for options in (dict(attn_mask=mask), dict(is_causal=True)):
        last = masked.forward_features(image, **options)
        assert not torch.allclose(last, masked.forward_features(image))
        intermediates = masked.forward_intermediates(image, **options, norm=True, output_fmt='NLC')
        assert torch.equal(last, intermediates[0])
        assert torch.equal(last[:, 1:], intermediates[1][-1])
