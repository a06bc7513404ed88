"""One fine-tuning run: what it starts from, its schedule, what it leaves."""

import math

import numpy as np
import pytest
import timm
import torch

import violin_timm
from violin_timm.data.tensors import Tensors
from violin_timm.engine.config import ConfigError, settings
from violin_timm.recipes.finetune import Job, finetune, rates
from violin_timm.recipes.finetune_build import arm_settings, build_model, channels_of, data_config, model_of
from violin_timm.recipes.protocol_flags import ARMS, VTAB
from violin_timm.recipes.protocol_models import MODEL, save_model

KWARGS = {'patch_size': 4, 'embed_dim': 24, 'depth': 2, 'num_heads': 2}
CPU = torch.device('cpu')


@pytest.fixture(scope='module')
def plain_file(tmp_path_factory):
    """A plain Violin's training checkpoint, as `violin train` leaves it."""
    return save(tmp_path_factory.mktemp('plain') / 'last.pth.tar', {'mask': 'none', 'alpha': 'none'})


@pytest.fixture(scope='module')
def violin_file(tmp_path_factory):
    return save(tmp_path_factory.mktemp('violin') / 'last.pth.tar', {'curves': 'hilbert,snake'})


def save(path, masks, **more):
    torch.manual_seed(7)
    kwargs = {**KWARGS, **masks, 'class_token': True, 'img_size': 16}
    model = timm.create_model('violin_deit_tiny', num_classes=5, **kwargs)
    recorded = {'model': 'violin_deit_tiny', 'model_kwargs': {k: v for k, v in kwargs.items() if k != 'img_size'}}
    recorded |= {'img_size': 16, **more}
    torch.save({'state_dict': model.state_dict(), 'arch': 'violin_deit_tiny', 'args': recorded}, path)
    return str(path)


def make(**values):
    base = {'device': 'cpu', 'workers': 0, 'epochs': 2, 'batch_size': 8, 'data_dir': '.', 'lrs': [1e-3]}
    return settings(VTAB, **{**base, **values})


def images(count, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return Tensors(
        torch.randint(0, 256, (count, 3, 16, 16), generator=draw, dtype=torch.uint8),
        torch.randint(0, 3, (count,), generator=draw),
    )


def run(args, arm='violin', lr=1e-3, seed=0):
    def open_splits(size, interpolation):
        assert (size, interpolation) == ((16, 16), 'bicubic')
        return images(20), images(9, 1)

    return finetune(args, Job('task', arm, 'final', lr, seed), 3, open_splits, CPU)


def built(args, arm, seed=0, classes=3):
    return build_model(args, arm_settings(args, arm)[0], classes, seed)


def test_arms_start_alike_but_for_their_masks(plain_file):
    args = make(pretrained_path=plain_file, head_std=0.5)
    plain, alpha, violin = (built(args, arm).state_dict() for arm in ARMS)
    weights = torch.load(plain_file, weights_only=True)['state_dict']
    for key, value in plain.items():
        assert torch.equal(value, alpha[key]) and torch.equal(value, violin[key]), key
        assert key.startswith('head.') or torch.equal(value, weights[key]), key
    assert len(alpha) == len(plain) + 2 and len(violin) == len(plain) + 4
    assert violin['blocks.0.attn.decay.beta'].min() >= 15
    assert not torch.equal(plain['head.weight'], built(args, 'plain', seed=1).state_dict()['head.weight'])
    assert not plain['head.bias'].any() and plain['head.weight'].std() == pytest.approx(0.5, rel=0.3)


@pytest.mark.parametrize('peft', [{}, {'method': 'lora', 'rank': 2}, {'method': 'dora', 'rank': 2}])
def test_without_a_spread_of_alpha_a_fresh_mask_changes_nothing_at_step_0(plain_file, peft, close):
    args = make(pretrained_path=plain_file, head_std=0.5, alpha_std=0.0, peft=peft)
    x = torch.randn(2, 3, 16, 16)
    close(built(args, 'violin').eval()(x), built(args, 'plain').eval()(x), 1e-4)


@pytest.mark.parametrize('name', ['vit_tiny_patch16_224', 'deit_tiny_distilled_patch16_224'])
def test_any_timm_vit_becomes_a_violin(name):
    args = make(model=name, model_kwargs={'embed_dim': 24, 'depth': 2, 'num_heads': 2, 'patch_size': 4}, img_size=16)
    model = built(args, 'violin')
    assert type(model).__name__.startswith('Violin') and model.blocks[1].attn.decay.beta.min() >= 15
    result, predictions, _ = run(make(**{**vars(args), 'beta_range': [5, 9]}), lr=1e-2)
    assert len(predictions) == 9 and result['movement'][0]['beta_change_max'] > 0


def test_masks_of_a_violin_are_carried_or_drawn_anew(violin_file):
    trained = torch.load(violin_file, weights_only=True)['state_dict']
    key = 'blocks.0.attn.decay.beta'
    carried = built(make(pretrained_path=violin_file, masks='carried'), 'violin').state_dict()
    fresh = built(make(pretrained_path=violin_file), 'violin').state_dict()
    plain = built(make(pretrained_path=violin_file, masks='carried'), 'plain').state_dict()
    assert torch.equal(carried[key], trained[key]) and carried[key].shape == (2, 2)
    assert fresh[key].shape == (2, 8) and fresh[key].min() >= 15
    assert not [name for name in plain if '.decay.' in name]
    for name, value in plain.items():
        assert name.startswith('head.') or (torch.equal(value, trained[name]) and torch.equal(value, fresh[name]))


def test_carried_masks_need_masks(plain_file):
    with pytest.raises(ConfigError, match=r'masks.*fresh'):
        built(make(pretrained_path=plain_file, masks='carried'), 'violin')
    with pytest.raises(ConfigError, match='pretrained_path'):
        built(make(model='violin_deit_tiny', masks='carried', model_kwargs=KWARGS), 'violin')


def test_initialisation_is_a_setting_of_all_arms_or_of_one(plain_file):
    arms = {'near': {'beta_range': [5, 9]}, 'far': {}, 'alpha': {'mask': 'none'}, 'plain': ARMS['plain']}
    args = make(pretrained_path=plain_file, arms=arms, beta_range=[11, 12], alpha_std=0.0)
    beta = {arm: built(args, arm).blocks[0].attn.decay.beta for arm in ('near', 'far')}
    assert 5 <= beta['near'].min() <= beta['near'].max() <= 9 and 11 <= beta['far'].min() <= beta['far'].max() <= 12
    assert torch.equal(built(args, 'alpha').blocks[1].attn.decay.alpha, torch.ones(2))
    assert built(args, 'plain').blocks[0].attn.decay is None


@pytest.mark.parametrize(
    ('arm', 'message'),
    [
        ({'betta_range': [5, 9]}, "'betta_range'; choose from mask"),
        ({'curves': 'hilbrt'}, 'hilbrt'),
        ({'mask': 'none', 'beta_range': [5, 9]}, 'no effect'),
        ({'mask_lr_scale': -1}, 'mask_lr_scale=-1'),
        (['curves'], 'expected a mapping'),
    ],
)
def test_an_arm_that_cannot_be_is_named(arm, message):
    with pytest.raises(ConfigError, match=message):
        arm_settings(make(arms={'mine': arm}), 'mine')


def test_name_and_arguments_come_from_the_checkpoint_unless_given(violin_file):
    assert model_of(make(pretrained_path=violin_file))[1]['embed_dim'] == 24
    assert model_of(make(pretrained_path=violin_file, model_kwargs={'depth': 1}))[1]['depth'] == 1
    assert channels_of(make(pretrained_path=violin_file)) == 3 and channels_of(make(model='violin_pixel_nano')) == 1
    with pytest.raises(ConfigError, match=r"model: got ''"):
        model_of(make())
    with pytest.raises(ConfigError, match=r'did you mean violin_deit_tiny'):
        model_of(make(model='violin_diet_tiny'))


@pytest.mark.parametrize(
    ('recorded', 'given', 'expected'),
    [({}, {}, (3, 16, 16)), ({}, {'img_size': 32}, (3, 32, 32)), ({'in_chans': 1}, {}, (1, 16, 16))],
)
def test_images_have_the_size_that_the_model_is_built_with(tmp_path, recorded, given, expected):
    path = save(tmp_path / 'last.pth.tar', {'mask': 'none', 'alpha': 'none', **recorded})
    args = make(pretrained_path=path, **given)
    model = built(args, 'violin')
    config = data_config(args, model)
    assert config['input_size'] == expected and len(config['mean']) == expected[0] == channels_of(args)
    assert model(torch.zeros(1, *expected)).shape == (1, 3)
    with pytest.raises(ConfigError, match=r'mean: got \[0.5, 0.5\]'):
        data_config(make(pretrained_path=path, mean=[0.5, 0.5], **given), model)


def test_images_are_normalised_as_the_weights_have_seen_them_unless_told(tmp_path):
    path = save(tmp_path / 'last.pth.tar', {'mask': 'none', 'alpha': 'none'}, mean=[0.5, 0.4, 0.3], std=None)
    for given, mean in (({}, (0.5, 0.4, 0.3)), ({'mean': [0.1, 0.2, 0.3]}, (0.1, 0.2, 0.3))):
        args = make(pretrained_path=path, **given)
        config = data_config(args, built(args, 'plain'))
        assert tuple(config['mean']) == mean and tuple(config['std']) == (0.229, 0.224, 0.225)


@pytest.mark.parametrize('name', ['violin_deit_tiny', 'deit_tiny_patch16_224'])
def test_a_model_in_a_folder_is_known_by_its_config_and_its_masks_are_drawn_anew(tmp_path, name):
    size = {'img_size': 16, 'in_chans': 1}
    model = timm.create_model(name, num_classes=5, **size, **KWARGS)
    timm.models.save_for_hf(model, tmp_path / name, model_args={**size, **KWARGS})
    args = make(model=f'local-dir:{tmp_path / name}', pretrained=True)
    again = built(args, 'violin')
    assert channels_of(args) == 1 and again.blocks[0].attn.decay.beta.min() >= 15
    assert torch.equal(again.blocks[1].mlp.fc1.weight, model.blocks[1].mlp.fc1.weight)


@pytest.mark.parametrize('name', ['local-dir:/nowhere', 'violin_deit_tiny.fb_in1k'])
def test_weights_that_cannot_be_had_are_named(monkeypatch, name):
    def refuse(*_, **__):
        raise FileNotFoundError('no connection')

    monkeypatch.setattr(timm.models._builder, 'load_state_dict_from_hf', refuse)
    with pytest.raises(ConfigError, match=f'{name}.* cannot be had'):
        built(make(model=name, pretrained=True), 'plain')


def test_the_rate_rises_by_equal_steps_and_falls_along_a_cosine():
    groups = [{'params': [torch.nn.Parameter(torch.zeros(1))], 'lr_scale': scale} for scale in (1.0, 0.65)]
    optimizer = torch.optim.AdamW(groups, lr=1e-3)
    schedule, seen = rates(optimizer, 750, 0.1), []
    for update in range(1, 751):
        schedule.step_update(update)
        seen.append([group['lr'] for group in optimizer.param_groups])
    seen = np.array(seen) / 1e-3
    falling = [(1 + math.cos(math.pi * i / 674)) / 2 for i in range(1, 675)]
    np.testing.assert_allclose(seen[:, 0], [*(np.arange(1, 76) / 75), *falling, 0.0], atol=1e-12)
    np.testing.assert_allclose(seen[:, 1], 0.65 * seen[:, 0], atol=1e-12)


def test_a_run_repeats_and_its_seed_matters(plain_file):
    args = make(pretrained_path=plain_file, lrs=[1e-2])
    first, predictions, model = run(args)
    again, repeated, other = run(args)
    seconds = first.pop('seconds'), again.pop('seconds')
    assert first == again and np.array_equal(predictions, repeated) and all(seconds)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in model.state_dict().items())
    assert first['updates'] == 2 * (20 // 8) and first['images'] == {'train': 20, 'evaluated': 9}
    assert run(args, seed=1)[0]['train_loss'] != first['train_loss']


def test_measures_in_float32_the_last_model(plain_file):
    args = make(pretrained_path=plain_file, amp=True, lrs=[1e-2])
    result, predictions, model = run(args)
    x = images(9, 1)
    mean, std = (torch.tensor(v).view(1, 3, 1, 1) for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    with torch.no_grad():
        logits = model((x.images / 255 - mean) / std)
    assert logits.dtype == torch.float32
    assert np.array_equal(logits.argmax(1).numpy(), predictions)
    assert result['top1'] == pytest.approx(100 * (logits.argmax(1) == x.labels).float().mean().item())
    assert result['loss'] == pytest.approx(torch.nn.functional.cross_entropy(logits, x.labels).item(), rel=1e-5)


def test_a_run_that_diverges_counts_nothing(plain_file):
    result, _, _ = run(make(pretrained_path=plain_file, epochs=6), lr=1e30)
    assert result['diverged'] and result['top1'] == 0 and result['train_loss'] is None


def test_masks_learn_at_their_own_rate(plain_file):
    def moved(**arm):
        args = make(pretrained_path=plain_file, arms={'mine': {'beta_range': [5, 9], **arm}}, epochs=4)
        return [layer['beta_change_max'] for layer in run(args, 'mine')[0]['movement']]

    usual, faster, frozen = moved(), moved(mask_lr_scale=20.0), moved(mask_lr_scale=0.0)
    assert faster[0] > 5 * usual[0] > 0 and frozen[0] == 0


def rebuilt(path):
    """The model of a file, by nothing but what the file says."""
    saved = torch.load(path, weights_only=True)
    if 'violin_settings' not in saved:
        return timm.create_model(saved['arch'], checkpoint_path=str(path), **saved['args']['model_kwargs']).eval()
    model = timm.create_model(saved['arch'], **saved['args']['model_kwargs'])
    violin_timm.add_violin(model, **saved['violin_settings']).load_state_dict(saved['state_dict'])
    return model.eval()


ADDED = {'model': 'vit_tiny_patch16_224', 'model_kwargs': KWARGS, 'img_size': 16}
LORA, DORA = ({'method': method, 'rank': 2} for method in ('lora', 'dora'))


@pytest.mark.parametrize(
    ('arm', 'given'),
    [
        *(('plain', {'peft': peft}) for peft in ({}, LORA, DORA)),
        *(('violin', {'peft': peft}) for peft in ({}, LORA, DORA)),
        ({'geometry': 'manhattan', 'alpha': 'none', 'mask_init': 'none', 'beta_std': 0.1}, {}),
        ({'geometry': 'random', 'num_random': 3, 'strategy': 'add_v1'}, {}),
        ({'geometry': 'raster', 'curve_weights': 'learned'}, {}),
        *((arm, {'masks': 'carried'}) for arm in (*ARMS, {'strategy': 'mul_v2'})),
        *((arm, ADDED) for arm in (*ARMS, {'curves': 'hilbert,snake'})),
        ('violin', {**ADDED, 'peft': LORA}),
    ],
)
def test_a_saved_model_predicts_the_same(plain_file, violin_file, arm, given, tmp_path):
    arms, name = ({**ARMS, 'mine': arm}, 'mine') if isinstance(arm, dict) else (ARMS, arm)
    path = {'carried': violin_file}.get(given.get('masks'), plain_file)
    args = make(**{**({} if 'model' in given else {'pretrained_path': path}), 'arms': arms, **given})
    _, predictions, model = run(args, name, lr=1e-2)
    save_model(args, Job('task', name, 'final', 1e-2, 0), model, tmp_path)
    x = images(9, 1).images / 255
    config = data_config(args, model)
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ('mean', 'std'))
    again = rebuilt(tmp_path / MODEL)
    assert np.array_equal(again((x - mean) / std).argmax(1).numpy(), predictions)
    assert (tmp_path / 'adapter').exists() == bool(args.peft)


@pytest.mark.parametrize('given', [{}, ADDED])
def test_a_saved_model_may_be_tuned_further_with_its_masks(plain_file, given, tmp_path):
    args = make(
        **{**({} if given else {'pretrained_path': plain_file}), 'arms': {'mine': {'curves': 'peano,snake'}}, **given}
    )
    _, _, model = run(args, 'mine', lr=1e-2)
    save_model(args, Job('task', 'mine', 'final', 1e-2, 0), model, tmp_path)
    carried = make(
        pretrained_path=str(tmp_path / MODEL), masks='carried', arms={**ARMS, 'other': {'curves': 'snake,peano'}}
    )
    again, state = built(carried, 'violin'), model.state_dict()
    assert again.curve_names == 'peano,snake'
    for key, value in again.state_dict().items():
        assert key.startswith('head.') or torch.equal(value, state[key]), key
    with pytest.raises(ConfigError, match=r'snake, peano for masks=.carried.*peano, snake'):
        built(carried, 'other')


def test_a_saved_model_records_how_it_has_seen_images(tmp_path):
    """Also where its weights said so: who tunes it further gives it the same."""
    path = save(tmp_path / 'last.pth.tar', {'mask': 'none', 'alpha': 'none'}, mean=[0.5, 0.4, 0.3], std=None)
    args = make(pretrained_path=path)
    save_model(args, Job('task', 'violin', 'final', 1e-2, 0), built(args, 'violin'), tmp_path)
    further = make(pretrained_path=str(tmp_path / MODEL))
    config = data_config(further, built(further, 'violin'))
    assert tuple(config['mean']) == (0.5, 0.4, 0.3) and tuple(config['std']) == (0.229, 0.224, 0.225)


def test_a_tag_is_no_other_model(violin_file):
    args = make(pretrained_path=violin_file, model='violin_deit_tiny.fb_in1k', masks='carried')
    assert model_of(args)[1]['curves'] == 'hilbert,snake' and built(args, 'violin').curve_names == 'hilbert,snake'
