"""DINO against numbers recorded from the authors' training code: losses, centres, head, schedules, clipping, crops."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from violin_timm.models import files
from violin_timm.recipes import dino_loss, dino_parts


@pytest.fixture(scope='module')
def recorded():
    folder = Path(__file__).parents[1] / 'golden'
    tensors = load_file(folder / 'dino_training_authors.safetensors')
    return tensors, json.loads((folder / 'dino_training_authors.json').read_text())


def test_recorded_losses_centres_and_gradient(recorded, close):
    tensors, about = recorded
    about = about['loss']
    loss = dino_loss.DinoLoss(about['out_dim'], about['student_temp'], about['center_momentum'])
    temps = dino_loss.temperature_schedule(
        about['warmup_teacher_temp'], about['teacher_temp'], about['warmup_teacher_temp_epochs'], about['epochs']
    )
    np.testing.assert_allclose(temps, about['teacher_temp_schedule'], rtol=1e-12)
    student = tensors['student'].clone().requires_grad_()
    for call, (epoch, expected) in enumerate(zip(about['evaluated_at_epochs'], about['losses'])):
        value = loss(student, loss.targets(tensors['teacher'], temps[epoch]), about['ncrops'], 2)
        loss.update_center(tensors['teacher'])
        assert value.item() == pytest.approx(expected, rel=1e-5)
        close(loss.center, tensors[f'center_after_{call + 1}'], 1e-5)
    loss(student, loss.targets(tensors['teacher'], temps[1]), about['ncrops'], 2).backward()
    close(student.grad, tensors['student_grad_epoch1_after4'], 1e-5)


def test_recorded_head(recorded, close):
    tensors, _ = recorded
    head = dino_parts.DinoHead(24, 32, hidden_dim=40, bottleneck_dim=16)
    head.load_state_dict({k.removeprefix('head/param/'): v for k, v in tensors.items() if k.startswith('head/param/')})
    close(head(tensors['head/x']), tensors['head/y'], 1e-5)


@pytest.mark.parametrize('name', ['cosine_scheduler', 'momentum_schedule'])
def test_recorded_schedules(recorded, name):
    about = recorded[1][name]
    a = {'warmup_epochs': 0, 'start_warmup_value': 0, **about['args']}
    values = dino_loss.cosine_schedule(
        a['base_value'], a['final_value'], a['epochs'], a['niter_per_ep'], a['warmup_epochs'], a['start_warmup_value']
    )
    np.testing.assert_allclose(values, about['values'], rtol=1e-12)


def test_recorded_clipping(recorded, close):
    tensors, about = recorded
    parameters = []
    for name in ('weight', 'bias'):
        parameters.append(nn.Parameter(torch.zeros_like(tensors[f'clip/{name}_before'])))
        parameters[-1].grad = tensors[f'clip/{name}_before'].clone()
    dino_loss.clip_each([*parameters, nn.Parameter(torch.zeros(1))], about['clip']['clip'])  # one without a gradient
    close(parameters[0].grad, tensors['clip/weight_after'], 1e-6)
    assert torch.equal(parameters[1].grad, tensors['clip/bias_after'])  # short enough: untouched


def test_recorded_backbone_on_crops_of_two_sizes(golden, close):
    tensors = load_file(golden('dino_model_authors.safetensors'))
    about = json.loads(golden('dino_model_authors.json').read_text())
    state = {k.removeprefix('param/'): v for k, v in tensors.items() if k.startswith('param/')}
    keys = ('img_size', 'patch_size', 'embed_dim', 'num_heads', 'depth')
    model, _ = files.build_and_load(
        {'teacher': {f'backbone.{key}': value for key, value in state.items()}}, 'violin_dino_small',
        **{key: about[key] for key in keys}, dynamic_img_size=True, pos_embed_resample='dino',
    )  # fmt: skip
    network = dino_parts.CropNetwork(model, nn.Identity())
    features, _ = network([tensors['x'], tensors['crop'], tensors['x']])
    for part, name in zip(features.chunk(3), ('y', 'y_crop', 'y_again')):
        close(part, tensors[name], 1e-5, name)
