"""Settings that are unknown, out of range or without effect stop the run before any work."""

import pytest

from violin_timm.geometry import DEFAULT_CURVES
from violin_timm.settings import MaskSettings


@pytest.mark.parametrize(
    'settings, message',
    [
        (dict(mask='learnt'), "mask: got 'learnt'; choose from learned, fixed, none"),
        (dict(mask=None), 'mask: got None'),
        (dict(alpha='fixed'), "alpha: got 'fixed'; choose from learned, none"),
        (dict(mask_init='finetuning'), "mask_init: got 'finetuning'; choose from pretrain, finetune, none"),
        (dict(curve_weights='sum'), "curve_weights: got 'sum'"),
        (dict(alpha_on='queries'), "alpha_on: got 'queries'; choose from mask, scores"),
        (dict(geometry='curve'), "geometry: got 'curve'"),
        (dict(curves='snake,hilbrt'), 'hilbrt'),
        (dict(curves=[]), 'curves: got none'),
        (dict(beta_range=(9, 5)), 'beta_range: got (9, 5)'),
        (dict(alpha_std=-0.1), 'alpha_std: got -0.1'),
        (dict(mask_init='none', beta_std=-1), 'beta_std: got -1'),
        (dict(mask='fixed', gamma=1.0), 'gamma: got 1.0'),
        (dict(mask='fixed', gamma=0.0), 'gamma: got 0.0'),
    ],
)
def test_refused_value(settings, message):
    with pytest.raises(ValueError) as error:
        MaskSettings(**settings)
    assert message in str(error.value)


@pytest.mark.parametrize(
    'settings, name',
    [
        (dict(mask='none', geometry='raster'), 'geometry'),
        (dict(mask='none', curves='snake'), 'curves'),
        (dict(mask='none', strategy='add_v1'), 'strategy'),
        (dict(mask='none', alpha_on='scores'), 'alpha_on'),
        (dict(mask='none', curve_weights='learned'), 'curve_weights'),
        (dict(mask='none', beta_range=(5, 9)), 'beta_range'),
        (dict(mask='fixed', beta_range=(5, 9)), 'beta_range'),
        (dict(mask='fixed', beta_std=0.5, mask_init='none'), 'beta_std'),
        (dict(gamma=0.996), 'gamma'),
        (dict(alpha='none', alpha_std=0.0), 'alpha_std'),
        (dict(alpha='none', alpha_mean=1.0), 'alpha_mean'),
        (dict(alpha='none', alpha_on='scores'), 'alpha_on'),
        (dict(num_random=4), 'num_random'),
        (dict(random_seed=1), 'random_seed'),
        (dict(mask_init='none', beta_range=(5, 9)), 'beta_range'),
        (dict(beta_std=0.5), 'beta_std'),
        (dict(mask_init='finetune', beta_std=0.5), 'beta_std'),
    ],
)
def test_value_without_effect_is_refused_by_name(settings, name):
    with pytest.raises(ValueError, match=f'^{name}: got .* no effect'):
        MaskSettings(**settings)


@pytest.mark.parametrize('mask', ['learned', 'fixed', 'none'])
@pytest.mark.parametrize('alpha', ['learned', 'none'])
def test_mask_and_alpha_are_independent(mask, alpha):
    settings = MaskSettings(mask=mask, alpha=alpha)
    assert (settings.mask, settings.alpha) == (mask, alpha)
    assert settings.components == DEFAULT_CURVES


def test_pop_from_takes_its_own_and_leaves_the_rest():
    kwargs = dict(curves='snake', embed_dim=48, alpha='none')
    settings = MaskSettings.pop_from(kwargs)
    assert settings == MaskSettings(curves='snake', alpha='none')
    assert kwargs == dict(embed_dim=48)


@pytest.mark.parametrize(
    'mask_init, uniform, normal',
    [
        (None, (5.0, 9.0), (0.0, 0.5)),
        ('pretrain', (5.0, 9.0), (0.0, 0.5)),
        ('finetune', (15.0, 20.0), (1.0, 0.01)),
        ('none', None, (0.0, 0.5)),
    ],
)
def test_initialisations_of_the_paper(mask_init, uniform, normal):
    settings = MaskSettings(mask_init=mask_init)
    assert settings.beta_uniform() == uniform
    assert settings.alpha_normal() == normal


def test_ranges_and_deviations_are_configurable():
    assert MaskSettings(beta_range=(1, 2)).beta_uniform() == (1, 2)
    assert MaskSettings(mask_init='finetune', beta_range=(0, 0)).beta_uniform() == (0, 0)
    assert MaskSettings(mask_init='finetune', alpha_std=0.0).alpha_normal() == (1.0, 0.0)
    assert MaskSettings(alpha_mean=2.0).alpha_normal() == (2.0, 0.5)
