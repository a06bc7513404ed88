"""The authors' checkpoints through timm's own ways: recorded logits, features, attention and gradients."""

import argparse
import json

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file

from violin_timm import attention
from violin_timm.geometry import DEFAULT_CURVES
from violin_timm.models.authors import AUTHORS_CURVES, is_authors, to_native

TINY = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2)
CASES = {'cls=0|pos=1': {}, 'cls=1|pos=1': dict(class_token=True), 'cls=0|pos=0': dict(pos_embed='none')}
HEAD = {'head.mlp.0.weight': torch.ones(4, 48), 'head.last_layer.weight_g': torch.ones(4, 1)}


def prefixed(state, prefix):
    return {f'{prefix}{key}': value for key, value in state.items()}


WRAPPINGS = {
    'bare': lambda s: s,
    'model': lambda s: {'model': s, 'epoch': 1, 'args': argparse.Namespace(lr=0.1)},
    'model of ddp': lambda s: {'model': prefixed(s, 'module.')},
    'teacher': lambda s: {
        'student': {k: v + 1 for k, v in prefixed(s, 'module.backbone.').items()},
        'teacher': {**prefixed(s, 'module.backbone.'), **prefixed(HEAD, 'module.')},
        'epoch': 7,
    },
    'teacher without ddp': lambda s: {'teacher': {**prefixed(s, 'backbone.'), **HEAD}},
    'student': lambda s: {'student': {**prefixed(s, 'module.backbone.'), **prefixed(HEAD, 'module.')}},
}


def sections(path):
    """``{case: {'param': ..., 'grad': ..., 'x': ...}}``; one case called '' where the file has one model."""
    cases = {}
    for key, value in load_file(path).items():
        case, name = key.split('/', 1) if key.startswith('cls=') else ('', key)
        case = cases.setdefault(case, {'param': {}, 'grad': {}})
        kind, _, inner = name.partition('/')
        if inner:
            case[kind][inner] = value
        else:
            case[kind] = value
    return cases


@pytest.fixture(scope='module')
def deit(golden):
    cases = sections(golden('deit_model_authors.safetensors'))
    assert cases.keys() == CASES.keys()
    for settings in json.loads(golden('deit_model_authors.json').read_text()).values():
        assert settings == dict(TINY, num_classes=10, norm_eps=1e-6)
    return cases


@pytest.fixture(scope='module')
def dino(golden):
    return sections(golden('dino_model_authors.safetensors'))['']


def create(path, variant='violin_deit_tiny', num_classes=10, **kwargs):
    torch.manual_seed(5)
    return timm.create_model(
        variant,
        pretrained=True,
        num_classes=num_classes,
        **{**TINY, **kwargs},
        pretrained_cfg_overlay=dict(file=str(path), num_classes=num_classes),
    ).eval()


def save(path, state, wrapping='bare'):
    path = path / 'authors.pth'
    torch.save(WRAPPINGS[wrapping](state), path)
    return path


def kwargs_of(case):
    return {'class_token': False, **CASES[case]}


@pytest.mark.parametrize('wrapping', WRAPPINGS)
@pytest.mark.parametrize('case', CASES)
def test_deit_logits_and_mask_gradients(case, wrapping, deit, close, tmp_path):
    recorded = deit[case]
    model = create(save(tmp_path, recorded['param'], wrapping), **kwargs_of(case))
    logits = model(recorded['x'])
    close(logits, recorded['logits'], what='logits')
    torch.nn.functional.cross_entropy(logits, torch.tensor([1, 7])).backward()
    expected = to_native(recorded['grad'], DEFAULT_CURVES)
    masks = {name: p.grad for name, p in model.named_parameters() if '.decay.' in name}
    assert masks.keys() == expected.keys() and len(masks) == 4
    for name, gradient in expected.items():
        if case.startswith('cls=1') and name == 'blocks.1.attn.decay.beta':
            assert (gradient == 0).all() and (masks[name] == 0).all()  # a class token's row of the mask is 1
        else:
            assert (gradient != 0).any()
            close(masks[name], gradient, what=name)


def test_deit_as_safetensors(deit, close, tmp_path):
    recorded = deit['cls=1|pos=1']
    save_file(recorded['param'], tmp_path / 'authors.safetensors')
    model = create(tmp_path / 'authors.safetensors', class_token=True)
    close(model(recorded['x']), recorded['logits'])


def test_curves_in_another_order(deit, close, tmp_path):
    """Betas follow their curves by name."""
    recorded = deit['cls=0|pos=1']
    path = save(tmp_path, recorded['param'])
    shuffled = ('peano_T', 'zigzag', 'snake', 'hilbert', 'zigzag_T', 'snake_T', 'peano', 'hilbert_T')
    model = create(path, class_token=False, curves=shuffled)
    close(model(recorded['x']), recorded['logits'])
    default = create(path, class_token=False)
    for i, name in enumerate(shuffled):
        assert torch.equal(
            model.blocks[0].attn.decay.beta[:, i], default.blocks[0].attn.decay.beta[:, DEFAULT_CURVES.index(name)]
        )


def test_zigzags_are_swapped(deit, close, tmp_path):
    assert AUTHORS_CURVES.index('zigzag_T') == 6 and AUTHORS_CURVES.index('zigzag') == 7
    recorded = deit['cls=0|pos=1']
    swapped = {
        k.replace('list.6', 'list.x').replace('list.7', 'list.6').replace('list.x', 'list.7'): v
        for k, v in recorded['param'].items()
    }
    model = create(save(tmp_path, swapped), class_token=False)
    assert (model(recorded['x']) - recorded['logits']).abs().max() > 1e-5
    native = to_native(recorded['param'], DEFAULT_CURVES)['blocks.0.attn.decay.beta']
    for ours, k in (('zigzag_T', 6), ('zigzag', 7), ('snake', 0), ('hilbert_T', 3)):
        assert torch.equal(native[:, DEFAULT_CURVES.index(ours)], recorded['param'][f'blocks.0.attn.ai_list.{k}'])


def test_fixed_mask_is_stacked_gamma(deit, tmp_path):
    state = {k: v for k, v in deit['cls=0|pos=1']['param'].items() if 'ai_list' not in k}
    gamma = torch.rand(2, 8, 3) * 0.5 + 0.45
    for layer in range(2):
        state[f'blocks.{layer}.attn.ai_list'] = gamma[layer]
    model = create(save(tmp_path, state), class_token=False, mask='fixed')
    for layer, block in enumerate(model.blocks):
        for i, name in enumerate(DEFAULT_CURVES):
            torch.testing.assert_close(block.attn.decay.beta[:, i].sigmoid(), gamma[layer, AUTHORS_CURVES.index(name)])


def test_no_alpha(deit, tmp_path):
    state = {k: v for k, v in deit['cls=0|pos=1']['param'].items() if 'normalize' not in k}
    model = create(save(tmp_path, state), class_token=False, alpha='none')
    assert model(deit['cls=0|pos=1']['x']).isfinite().all()
    fresh = create(tmp_path / 'authors.pth', class_token=False)  # alpha drawn as for fine-tuning
    assert (fresh.blocks[0].attn.decay.alpha - 1).abs().max() < 0.05


@pytest.mark.parametrize('num_classes', [10, 7])
def test_class_token_checkpoint_into_gap(num_classes, deit, tmp_path):
    """What the authors' own code cannot do."""
    recorded = deit['cls=1|pos=1']
    path = save(tmp_path, recorded['param'])
    model = timm.create_model(
        'violin_deit_tiny',
        pretrained=True,
        class_token=False,
        num_classes=num_classes,
        **TINY,
        pretrained_cfg_overlay=dict(file=str(path), num_classes=10),
    )
    assert torch.equal(model.pos_embed, recorded['param']['pos_embed'][:, 1:])
    assert torch.equal(model.blocks[1].attn.decay.alpha, recorded['param']['blocks.1.attn.normalize'])


@pytest.mark.parametrize(
    'kwargs, error, message',
    [
        (dict(class_token=True), ValueError, r'class_token: got True.*pass class_token=False'),
        (dict(curves='snake,hilbert'), ValueError, 'curves: got snake, hilbert; the file has masks of snake'),
        (dict(mask='none'), ValueError, 'curves: got none'),
        (dict(geometry='manhattan'), ValueError, 'curves: got manhattan'),
        (dict(alpha='none'), RuntimeError, r'left over: blocks\.0\.attn\.decay\.alpha'),
        (dict(depth=3), RuntimeError, r'missing: blocks\.2'),
        (dict(pos_embed='none', depth=1), RuntimeError, r'left over: blocks\.1'),
    ],
    ids=str,
)
def test_misfits_are_refused(kwargs, error, message, deit, tmp_path):
    path = save(tmp_path, deit['cls=0|pos=1']['param'])
    with pytest.raises(error, match=message):
        create(path, **{'class_token': False, **kwargs})


@pytest.mark.parametrize('key', ['blocks.1.attn.ai_list.3', 'blocks.0.attn.normalize', 'norm.bias'])
@pytest.mark.parametrize('num_classes', [10, 7])
def test_one_key_too_few_is_refused(key, num_classes, deit, tmp_path):
    state = dict(deit['cls=0|pos=1']['param'])
    del state[key]
    with pytest.raises((RuntimeError, ValueError), match=r'missing: |got curves'):
        timm.create_model(
            'violin_deit_tiny',
            pretrained=True,
            class_token=False,
            num_classes=num_classes,
            **TINY,
            pretrained_cfg_overlay=dict(file=str(save(tmp_path, state)), num_classes=10),
        )


def test_layouts_are_told_apart(deit):
    state = deit['cls=0|pos=1']['param']
    assert is_authors(state)
    assert not is_authors(to_native(state, DEFAULT_CURVES))
    assert not is_authors(timm.create_model('deit_tiny_patch16_224', **TINY).state_dict())


# --- DINO


@pytest.fixture(params=WRAPPINGS)
def dino_model(request, dino, tmp_path):
    return create(
        save(tmp_path, dino['param'], request.param),
        'violin_dino_small',
        0,
        pos_embed_resample='dino',
        dynamic_img_size=True,
    )


def test_dino_features_of_two_crops_and_the_first_again(dino_model, dino, close):
    with torch.no_grad():
        close(dino_model(dino['x']), dino['y'], what='y')
        close(dino_model(dino['crop']), dino['y_crop'], what='y_crop')
        close(dino_model(dino['x']), dino['y_again'], what='y_again')


def test_dino_last_attention(dino_model, dino, close, monkeypatch):
    maps = []
    compute = attention.masked_attention

    def spy(q, k, v, *args):
        unit = torch.eye(v.shape[2]).expand(*v.shape[:3], -1)
        maps.append(compute(q, k, unit, *args))  # values of 1 in turn: the weights themselves
        return compute(q, k, v, *args)

    monkeypatch.setattr(attention, 'masked_attention', spy)
    for block in dino_model.blocks:
        block.attn.fused_attn = False  # values as wide as the map
    dino_model(dino['x'])
    assert len(maps) == 2
    close(maps[-1], dino['last_attention'])


def test_dino_crop_needs_dinos_resampling(dino, tmp_path):
    model = create(save(tmp_path, dino['param']), 'violin_dino_small', 0, dynamic_img_size=True)
    difference = (model(dino['crop']) - dino['y_crop']).abs().max() / dino['y_crop'].abs().max()
    assert difference > 1e-4


def test_dino_resampled_while_loading(dino, close, tmp_path):
    """A static model of the crop's size."""
    model = create(save(tmp_path, dino['param']), 'violin_dino_small', 0, pos_embed_resample='dino', img_size=16)
    close(model(dino['crop']), dino['y_crop'])
