"""`add_violin`: timm's Vision Transformers become Violins in place; everything else is refused and left as it was."""

import copy

import pytest
import timm
import torch
from timm.layers import LayerScale
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock, ParallelThingsBlock
from timm.optim import create_optimizer_v2, param_groups_layer_decay
from timm.utils import ModelEmaV3
from torch import nn

from violin_timm import ViolinAttention, add_violin
from violin_timm.models import ViolinVisionTransformer

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2, num_classes=10)
MODELS = {
    'deit_tiny_patch16_224': 1,
    'deit3_small_patch16_224': 1,
    'vit_small_patch16_224.dino': 1,
    'vit_small_patch14_dinov2': 1,
    'vit_small_patch14_reg4_dinov2': 5,
    'vit_base_patch16_clip_quickgelu_224': 1,
    'vit_base_patch16_siglip_224': 0,
    'vit_base_patch16_siglip_gap_224': 0,
    'deit_tiny_distilled_patch16_224': 2,
    'vit_base_patch16_rpn_224': 0,
    'vit_tiny_patch16_224': 1,
    'vit_base_patch16_gap_224': 0,
    'vit_medium_patch16_reg4_gap_256': 4,
}  # and their prefix tokens


def create(name, **kwargs):
    """Random weights under which attention matters, LayerScale included."""
    torch.manual_seed(1)
    model = timm.create_model(name, **{**SMALL, **kwargs})
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LayerScale):
                module.gamma.fill_(1.0)
        for parameter in model.parameters():
            parameter += 0.2 * torch.randn_like(parameter)
    return model.eval()


def image(size=(32, 32)):
    return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(4))


@pytest.mark.parametrize('name', MODELS)
def test_outputs_stay_those_of_the_plain_model(name):
    model = create(name)
    with torch.no_grad():
        expected = model(image())
        features = model.forward_features(image())
    assert add_violin(model, alpha_std=0.0) is model
    assert all(type(block.attn) is ViolinAttention for block in model.blocks)
    with torch.no_grad():
        assert (model(image()) - expected).abs().max() < 1e-3 * expected.abs().max()
        assert (model.forward_features(image()) - features).abs().max() < 1e-3 * features.abs().max()
        # attention matters, and so do masks: other betas change the outputs by far more
        for block in model.blocks:
            block.attn.decay.beta.fill_(0.0)
        assert (model(image()) - expected).abs().max() > 1e-2 * expected.abs().max()


@pytest.mark.parametrize('name', MODELS)
def test_mask_has_the_prefix_tokens_of_the_model(name):
    model = add_violin(create(name))
    assert model.num_prefix_tokens == MODELS[name]
    masks = []
    model.blocks[0].attn.decay.register_forward_hook(lambda module, args, mask: masks.append((args, mask)))
    model(image())
    if masks:  # asked for by the attention itself
        ((args, mask),) = masks
        assert args[0].shape == (8, 16, 1) and mask.shape == (3, 16 + MODELS[name], 16 + MODELS[name])


@pytest.mark.parametrize('name', MODELS)
def test_only_masks_are_added(name):
    model = create(name)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    parameters = dict(model.named_parameters())
    add_violin(model)
    after = model.state_dict()
    assert after.keys() - before.keys() == {f'blocks.{i}.attn.decay.{p}' for i in range(2) for p in ('beta', 'alpha')}
    for key, value in before.items():
        assert torch.equal(after[key], value)
    for key, parameter in parameters.items():
        assert model.get_parameter(key) is parameter
    assert isinstance(model, ViolinVisionTransformer) or 'distilled' in name


@pytest.mark.parametrize('name', MODELS)
def test_gradients_reach_masks_and_backbone(name):
    model = add_violin(create(name), beta_range=(0, 3)).train()
    model.forward_features(image()).square().sum().backward()
    for block in model.blocks:
        for parameter in block.attn.decay.parameters():
            assert parameter.grad.isfinite().all() and (parameter.grad != 0).any()
        assert (block.attn.qkv.weight.grad != 0).any()


@pytest.mark.parametrize('name', ['deit_tiny_distilled_patch16_224', 'vit_small_patch14_reg4_dinov2'])
def test_is_a_timm_model_still(name):
    model = add_violin(create(name, dynamic_img_size=True), beta_range=(0, 3))
    expected = model(image((16, 40)))
    model.set_grad_checkpointing()
    torch.testing.assert_close(model(image((16, 40))), expected)
    twin = copy.deepcopy(model)
    torch.testing.assert_close(twin(image((16, 40))), expected)
    final, features = model.forward_intermediates(image((16, 40)))
    assert features[-1].shape == (2, 48, 2, 5) and final.shape[1] == 10 + model.num_prefix_tokens
    torch.testing.assert_close(final, model.forward_features(image((16, 40))))
    model.set_input_size((16, 40))
    model.reset_classifier(3)
    assert model(image((16, 40))).shape == (2, 3)


def test_hybrid_patch_embedding():
    """A grid is a grid, wherever its patches come from."""
    kwargs = dict(img_size=64, embed_dim=48, num_heads=3, depth=2, num_classes=10)
    model = timm.create_model('vit_tiny_r_s16_p8_224', **kwargs).eval()
    expected = model(image((64, 64)))
    add_violin(model, alpha_std=0.0)
    assert (model(image((64, 64))) - expected).abs().max() < 1e-3 * expected.abs().max()


def test_distilled_training_keeps_its_two_heads():
    model = add_violin(create('deit_tiny_distilled_patch16_224'))
    model.set_distilled_training(True)
    outputs = model.train()(image())
    assert isinstance(outputs, tuple) and [y.shape for y in outputs] == [(2, 10)] * 2


@pytest.mark.parametrize(
    'settings',
    [
        dict(),
        dict(mask='none'),
        dict(alpha='none'),
        dict(mask='none', alpha='none'),
        dict(mask='fixed'),
        dict(geometry='manhattan'),
        dict(curves=['snake', 'peano_T']),
        dict(strategy='add_after_sm'),
        dict(mask_init='pretrain'),
        dict(curve_weights='learned'),
        dict(geometry='random', num_random=2),
    ],
    ids=str,
)
def test_save_and_rebuild(settings, tmp_path):
    """As documented: the same two calls, the second with `violin_settings`, and the state dict."""
    model = add_violin(create('vit_small_patch14_reg4_dinov2'), **settings)
    torch.save({'state_dict': model.state_dict(), 'violin': model.violin_settings}, tmp_path / 'model.pth')
    saved = torch.load(tmp_path / 'model.pth', weights_only=True)
    torch.manual_seed(2)
    again = add_violin(timm.create_model('vit_small_patch14_reg4_dinov2', **SMALL), **saved['violin']).eval()
    assert again.violin_settings == saved['violin']
    again.load_state_dict(saved['state_dict'])
    assert torch.equal(again(image()), model(image()))


def test_mask_and_alpha_off_changes_no_bit():
    model = create('deit3_small_patch16_224')
    expected, keys = model(image()), list(model.state_dict())
    add_violin(model, mask='none', alpha='none')
    assert torch.equal(model(image()), expected) and list(model.state_dict()) == keys


def test_initialisation_is_for_finetuning_unless_told_otherwise():
    decay = add_violin(create('deit_tiny_patch16_224')).blocks[1].attn.decay
    assert (decay.beta >= 15).all() and (decay.beta <= 20).all() and (decay.alpha - 1).abs().max() < 0.06
    decay = add_violin(create('deit_tiny_patch16_224'), mask_init='pretrain').blocks[1].attn.decay
    assert (decay.beta >= 5).all() and (decay.beta <= 9).all() and (decay.alpha - 1).abs().max() > 0.06


def test_masks_are_those_of_a_registered_violin_of_the_same_seed():
    model = add_violin(create('deit_tiny_patch16_224'), mask_init='pretrain')
    torch.manual_seed(1)
    ours = timm.create_model('violin_deit_tiny', **SMALL)
    for block, other in zip(model.blocks, ours.blocks, strict=True):
        assert torch.equal(block.attn.decay.beta, other.attn.decay.beta)


def test_global_stream_is_left_alone():
    model = create('deit_tiny_patch16_224')
    before = torch.get_rng_state()
    add_violin(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize('training', [True, False])
def test_mode_dtype_hooks_and_frozen_weights_stay(training):
    model = create('deit_tiny_patch16_224').to(torch.float64).train(training)
    model.requires_grad_(False)
    calls = []
    model.blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))
    add_violin(model)
    assert all(module.training == training for module in model.modules())
    assert all(t.dtype == torch.float64 for t in model.state_dict().values())
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if '.decay.' in n
    }
    model(image().double())
    assert calls == [1]


@pytest.mark.parametrize('name', MODELS)
def test_no_weight_decay_and_layer_decay_groups(name):
    model = create(name)
    plain = set(model.no_weight_decay())
    add_violin(model)
    assert model.no_weight_decay() == plain | {'*.decay.*'}
    layer_of = {}
    for group in param_groups_layer_decay(
        model, weight_decay=0.05, no_weight_decay_list=model.no_weight_decay(), layer_decay=0.5
    ):
        layer_of |= {id(p): (group['lr_scale'], group['weight_decay']) for p in group['params']}
    groups = create_optimizer_v2(model, 'adamw', lr=1e-3, weight_decay=0.05).param_groups
    decayed = {id(p) for group in groups if group['weight_decay'] for p in group['params']}
    assert decayed
    for block in model.blocks:
        scale = layer_of[id(block.attn.qkv.weight)][0]
        for parameter in block.attn.decay.parameters():
            assert layer_of[id(parameter)] == (scale, 0.0)
            assert id(parameter) not in decayed
        assert id(block.attn.qkv.weight) in decayed
    assert layer_of[id(model.blocks[0].attn.decay.beta)][0] < layer_of[id(model.blocks[1].attn.decay.beta)][0]
    if hasattr(model, 'dist_token'):
        assert id(model.dist_token) not in decayed


# --- refusals

OTHERS = {
    'swin_tiny_patch4_window7_224': 'no global attention',
    'resnet10t': 'no global attention over one grid',
    'eva02_tiny_patch14_224': 'positional term of its own',
    'vit_small_patch16_dinov3': 'positional term of its own',
    'beit_base_patch16_224': 'positional term of its own',
    'naflexvit_base_patch16_gap': 'grids of different shapes',
    'vit_relpos_small_patch16_224': 'positional term of its own',
    'convnext_atto': 'no global attention',
    'cait_xxs24_224': 'not that of the Vision Transformer',
    'mixer_s16_224': None,
    'xcit_nano_12_p16_224': None,
    'efficientvit_b0': None,
    'pvt_v2_b0': None,
    'samvit_base_patch16': None,
}


def anatomy(model):
    return [(n, type(m)) for n, m in model.named_modules()], sorted(vars(model)), list(model.state_dict())


def refused(model, error=TypeError, **settings):
    before = anatomy(model)
    with pytest.raises(error) as caught:
        add_violin(model, **settings)
    assert anatomy(model) == before
    return str(caught.value)


@pytest.mark.parametrize('name', OTHERS)
def test_other_architectures_are_refused_with_a_reason(name):
    with torch.device('meta'):
        model = timm.create_model(name)
    message = refused(model)
    assert message.startswith('model: got ') and type(model).__name__ in message
    assert 'Allowed are VisionTransformer and VisionTransformerDistilled' in message
    assert (OTHERS[name] or ' it') in message


@pytest.mark.parametrize('block', [ParallelScalingBlock, ParallelThingsBlock, DiffParallelScalingBlock])
def test_parallel_blocks_are_refused(block):
    model = timm.create_model('vit_tiny_patch16_224', **SMALL, block_fn=block)
    assert f'blocks.0: got {block.__name__}' in refused(model)


def test_other_attention_is_refused_wherever_it_is():
    model = create('vit_tiny_patch16_224')
    model.blocks[1].attn = nn.MultiheadAttention(48, 3)
    assert 'blocks.1.attn: got MultiheadAttention' in refused(model)
    model = create('vit_tiny_patch16_224')
    model.blocks[1] = nn.Identity()
    assert 'blocks.1: got Identity' in refused(model)


def test_differential_attention_is_refused():
    model = timm.create_model('vit_tiny_patch16_224', **{**SMALL, 'num_heads': 2, 'attn_layer': 'diff'})
    assert 'blocks.0.attn: got DiffAttention' in refused(model)


def test_wrappers_are_refused_with_advice():
    bare = create('deit_tiny_patch16_224')
    for wrapper in (nn.DataParallel(bare), torch.compile(bare), ModelEmaV3(bare)):
        assert 'before it is compiled, wrapped or distributed' in refused(wrapper)
    assert type(bare) is timm.models.VisionTransformer


def test_distributed_wrapper_is_refused_with_advice(tmp_path):
    torch.distributed.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        wrapper = nn.parallel.DistributedDataParallel(create('deit_tiny_patch16_224'))
        assert 'before it is compiled, wrapped or distributed' in refused(wrapper)
    finally:
        torch.distributed.destroy_process_group()


def test_feature_wrapper_is_refused():
    model = timm.create_model('deit_tiny_patch16_224', features_only=True, out_indices=[0, 1], **SMALL)
    message = refused(model)
    assert 'FeatureGetterNet' in message and 'before it is compiled, wrapped or distributed' in message


def test_a_violin_is_refused():
    message = refused(timm.create_model('violin_deit_tiny', **SMALL))
    assert 'which is a Violin already' in message
    assert 'which is a Violin already' in refused(add_violin(create('deit_tiny_distilled_patch16_224')))


def test_subclass_with_a_forward_of_its_own_is_refused():
    class Other(timm.models.VisionTransformer):
        pass

    assert 'Other' in refused(Other(**SMALL))


@pytest.mark.parametrize('thing', [None, 'deit_tiny_patch16_224', nn.Identity()], ids=['None', 'name', 'Identity'])
def test_what_is_no_model_is_refused(thing):
    with pytest.raises(TypeError, match='model: got'):
        add_violin(thing)


@pytest.mark.parametrize(
    'settings, message',
    [
        (dict(curve='snake'), "curve: got 'snake', but add_violin has no such setting"),
        (dict(curves='hilbrt'), 'hilbrt'),
        (dict(mask='lerned'), "mask: got 'lerned'"),
        (dict(mask='none', curves='snake'), 'curves: got'),
        (dict(beta_std=1.0), 'beta_std: got'),
    ],
    ids=str,
)
def test_settings_are_checked_before_the_model_is_touched(settings, message):
    assert message in refused(create('deit_tiny_patch16_224'), ValueError, **settings)


def test_patch_dropout_is_refused():
    model = timm.create_model('vit_tiny_patch16_224', **SMALL, patch_drop_rate=0.5)
    assert 'patch_drop_rate: got 0.5' in refused(model, ValueError)
    add_violin(model, mask='none')
