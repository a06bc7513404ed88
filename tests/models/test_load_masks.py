"""Masks of models that load weights: drawn anew where the file is plain, as they were where it is our own."""

import pytest
import timm
import torch

TINY = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2)


# --- which initialisation


@pytest.mark.parametrize(
    'given, beta',
    [
        ({}, (15, 20)),
        (dict(mask_init='finetune'), (15, 20)),
        (dict(mask_init='pretrain'), (5, 9)),
        (dict(beta_range=(1, 2)), (1, 2)),
        (dict(mask_init='pretrain', beta_range=(1, 2)), (1, 2)),
    ],
    ids=str,
)
def test_initialisation_of_fresh_masks(given, beta, tmp_path, plain_model, write_weights, model_from):
    model = model_from(write_weights(tmp_path, plain_model().state_dict()), **given)
    for block in model.blocks:
        value = block.attn.decay.beta
        assert (value >= beta[0]).all() and (value <= beta[1]).all()
    mean = torch.stack([block.attn.decay.alpha for block in model.blocks]).mean()
    assert (abs(mean - 1) < 0.05) == (given.get('mask_init', 'finetune') == 'finetune')


def test_ablation_without_initialisation(tmp_path, plain_model, write_weights, model_from):
    model = model_from(write_weights(tmp_path, plain_model().state_dict()), mask_init='none')
    assert all(block.attn.decay.beta.abs().max() < 3 for block in model.blocks)


def test_without_weights_the_default_is_pretrain():
    model = timm.create_model('violin_deit_tiny', **TINY)
    assert all((block.attn.decay.beta >= 5).all() and (block.attn.decay.beta <= 9).all() for block in model.blocks)


def test_loading_for_one_seed_is_repeatable_and_paired(tmp_path, plain_model, write_weights, model_from):
    path = write_weights(tmp_path, plain_model().state_dict())
    models = []
    for extra in (0, 5):
        torch.manual_seed(3)
        torch.rand(extra)
        models.append(model_from(path))
    for block, other in zip(models[0].blocks, models[1].blocks, strict=True):
        assert torch.equal(block.attn.decay.beta, other.attn.decay.beta)


@pytest.mark.parametrize(
    'settings',
    [
        dict(mask='fixed'),
        dict(mask='fixed', alpha='none'),
        dict(mask='none'),
        dict(alpha='none'),
        dict(curve_weights='learned'),
        dict(geometry='manhattan'),
        dict(strategy='add_v1', alpha_on='scores'),
    ],
    ids=str,
)
def test_plain_weights_into_every_arm(settings, tmp_path, plain_model, write_weights, model_from, image):
    source = plain_model()
    model = model_from(write_weights(tmp_path, source.state_dict()), **settings)
    assert model(image()).isfinite().all()
    for name, value in source.state_dict().items():
        assert torch.equal(model.state_dict()[name], value)
    if settings.get('mask') == 'fixed':
        torch.testing.assert_close(model.blocks[1].attn.decay.beta.sigmoid(), torch.full((3, 8), 0.9996))


# --- our own weights


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
@pytest.mark.parametrize('class_token', [True, False])
def test_native_weights_bring_their_masks(class_token, suffix, tmp_path, write_weights, model_from, image):
    torch.manual_seed(1)
    source = timm.create_model('violin_deit_tiny', **TINY, num_classes=10, class_token=class_token).eval()
    path = write_weights(tmp_path, source.state_dict(), suffix)
    torch.manual_seed(2)
    model = model_from(path, class_token=class_token)
    assert torch.equal(model(image()), source(image()))
    direct = timm.create_model(
        'violin_deit_tiny', **TINY, num_classes=10, class_token=class_token, checkpoint_path=str(path)
    ).eval()
    assert torch.equal(direct(image()), source(image()))


@pytest.mark.parametrize(
    'source_arm, arm, fresh',
    [
        (dict(alpha='none'), {}, 'alpha'),
        (dict(mask='none'), {}, 'beta'),
        ({}, dict(curve_weights='learned'), 'curve_logits'),
    ],
)
def test_kinds_of_mask_parameters_that_a_file_lacks_are_drawn(
    source_arm, arm, fresh, tmp_path, write_weights, model_from
):
    source = timm.create_model('violin_deit3_small', **TINY, num_classes=10, **source_arm)
    model = model_from(write_weights(tmp_path, source.state_dict()), 'deit3', **arm)
    for name, value in model.state_dict().items():
        if name.endswith(fresh):
            assert name not in source.state_dict() and value.isfinite().all()
        else:
            assert torch.equal(value, source.state_dict()[name]), name
