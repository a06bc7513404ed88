"""Fixtures of the tests that load weights: small models of timm's own, their files, and our models from such files."""

import pytest
import timm
import torch
from safetensors.torch import save_file

import violin_timm  # noqa: F401

TINY = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2)
KINDS = {
    'deit': ('violin_deit_tiny', 'deit_tiny_patch16_224'),
    'deit3': ('violin_deit3_small', 'deit3_small_patch16_224'),
    'dino': ('violin_dino_small', 'vit_small_patch16_224.dino'),
}


@pytest.fixture(scope='session')
def plain_model():
    """timm's own model, of random weights under which attention matters: ``plain_model('deit3', reg_tokens=2)``."""

    def _plain_model(kind='deit', num_classes=10, **kwargs):
        if kind == 'dino':
            num_classes = 0
        torch.manual_seed(1)
        model = timm.create_model(KINDS[kind][1], **{**TINY, **kwargs}, num_classes=num_classes)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.2 * torch.randn_like(parameter)
        return model.eval()

    return _plain_model


@pytest.fixture(scope='session')
def write_weights():
    """Path of a new file of weights in a folder: ``write_weights(tmp_path, state, '.safetensors')``."""

    def _write_weights(path, content, suffix='.pth'):
        path = path / f'weights{suffix}'
        if suffix == '.safetensors':
            save_file(content, path)
        else:
            torch.save(content, path)
        return path

    return _write_weights


@pytest.fixture(scope='session')
def model_from():
    """A Violin with the weights of a file: ``model_from(path, 'deit3', class_token=False)``.

    `num_classes` is of the model, `source_classes` what timm is told of the file's.
    """

    def _model_from(path, kind='deit', num_classes=10, source_classes=10, **kwargs):
        if kind == 'dino':
            num_classes = source_classes = 0
        return timm.create_model(
            KINDS[kind][0],
            pretrained=True,
            num_classes=num_classes,
            **{**TINY, **kwargs},
            pretrained_cfg_overlay=dict(file=str(path), num_classes=source_classes),
        ).eval()

    return _model_from


@pytest.fixture(scope='session')
def image():
    """Two images, ``[2, 3, *size]``: the same numbers for the same size."""

    def _image(size=(32, 32)):
        return torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(4))

    return _image
