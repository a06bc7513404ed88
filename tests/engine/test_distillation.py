"""Distillation: timm's tasks with their flags, a teacher from a folder, end to end on the digits."""

import pytest
import timm
import torch

from violin_timm.engine import build, distillation
from violin_timm.engine.config import ConfigError, settings
from violin_timm.engine.distributed import World
from violin_timm.recipes import supervised

SHAPE = {'patch_size': 4, 'depth': 1, 'num_heads': 2}
HERE = World(torch.device('cpu'))


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
    """`local-dir:` name of a saved plain ViT of another width than the student, for grey 8x8 images."""
    folder = tmp_path_factory.mktemp('teacher')
    torch.manual_seed(1)
    cfg = {'input_size': (1, 8, 8), 'mean': (0.25,), 'std': (0.5,), 'num_classes': 10}
    model = timm.create_model(
        'vit_tiny_patch16_224', img_size=8, in_chans=1, num_classes=10, embed_dim=24, pretrained_cfg=cfg, **SHAPE
    )
    timm.models.save_for_hf(model, folder, model_args={'img_size': 8, 'embed_dim': 24, **SHAPE})
    return f'local-dir:{folder}'


@pytest.fixture
def make(tmp_path, teacher):
    def _make(**values):
        base = {
            'model': 'violin_pixel_nano', 'model_kwargs': {'embed_dim': 16, **SHAPE}, 'img_size': 8, 'in_chans': 1,
            'num_classes': 10, 'dataset': 'digits', 'device': 'cpu', 'workers': 0, 'batch_size': 250, 'crop_pct': 1.0,
            'opt': 'adamw', 'lr': 3e-3, 'epochs': 1, 'warmup_epochs': 0, 'no_aug': True, 'output': str(tmp_path),
            'experiment': 'run', 'kd_model_name': teacher, 'mean': [0.5], 'std': [0.25],
        }  # fmt: skip
        return settings(**{**base, **values})

    return _make


def task_of(args):
    """The task of a run, and images with labels."""
    distillation.check(args)
    torch.manual_seed(0)
    model = build.build_model(args)
    task = build.create_task(args, HERE, model, False, build.data_config(args, model))
    return task.eval(), torch.randn(6, 1, 8, 8), torch.arange(6)


def test_logits_by_the_formula(make):
    args = make(kd_temperature=2.0, distill_loss_weight=0.25, task_loss_weight=0.5, smoothing=0.0)
    task, images, labels = task_of(args)
    # the teacher sees the pixels in its own normalisation, whatever --mean and --std are
    theirs = task.teacher.model((images * 0.25 + 0.5 - 0.25) / 0.5)
    ours = task.get_eval_model()(images)
    log_p, q = (ours / 2).log_softmax(-1), (theirs / 2).softmax(-1)
    divergence = (q * (q.log() - log_p)).sum(-1).mean() * 4
    expected = 0.5 * torch.nn.functional.cross_entropy(ours, labels) + 0.25 * divergence
    assert torch.allclose(task(images, labels)['loss'], expected, atol=1e-6)


def test_a_teacher_for_colour_sees_grey_images_in_its_mean_normalisation(make, monkeypatch):
    monkeypatch.setattr(timm.task.distillation, 'create_model', lambda model_name, num_classes, in_chans, **_: (
        timm.create_model('vit_tiny_patch16_224', img_size=8, in_chans=in_chans, num_classes=num_classes, **SHAPE)
    ))  # fmt: skip
    task, images, labels = task_of(make(kd_model_name='vit_tiny_patch16_224'))
    assert task.teacher.mean_kd.shape == (1, 1, 1, 1) and task.teacher.mean_kd.item() == pytest.approx(0.5)
    assert task(images, labels)['loss'].isfinite()


def test_features_train_their_projection_too(make):
    args = make(kd_distill_type='feature', model_ema=True, weight_decay=0.1)
    result = supervised.run(args)
    checkpoint = torch.load(result['folder'] / 'last.pth.tar', weights_only=True)
    projection = checkpoint['task_state']['projection']['weight']
    assert projection.shape == (24, 16) and 'task_state_ema' in checkpoint
    task = task_of(args)[0]
    assert not torch.equal(task.get_trainable_module().projection.weight, projection)
    assert not any(key.startswith(('student', 'teacher', 'projection')) for key in checkpoint['state_dict'])
    assert len(checkpoint['optimizer']['state']) == len(list(task.get_trainable_module().parameters()))


def test_features_leave_the_masks_undecayed(make):
    from violin_timm.engine.optim import create_optimizer

    module = task_of(make(kd_distill_type='feature'))[0].get_trainable_module()
    groups = create_optimizer(make(weight_decay=0.1), module, 1e-3).param_groups
    decayed = {id(p) for group in groups if group['weight_decay'] for p in group['params']}
    names = {name for name, p in module.named_parameters() if id(p) in decayed}
    assert 'projection.weight' in names and not any('.decay.' in name for name in names)


def test_a_distillation_token(make):
    kwargs = {'embed_dim': 16, **SHAPE}
    args = make(model='deit_tiny_distilled_patch16_224', model_kwargs=kwargs, kd_distill_type='token')
    task, images, labels = task_of(args)
    assert task.train()(images, labels)['loss'].isfinite()
    assert not task.teacher.training
    with pytest.raises(ConfigError, match=r'token teacher.*set_distilled_training'):
        task_of(make(kd_distill_type='token'))


def test_the_teacher_stays_as_it_is_and_resuming_changes_nothing(make):
    whole = supervised.run(make(epochs=2, experiment='whole'))['folder']
    supervised.run(make(epochs=2, experiment='parts', stop_epoch=1))
    parts = supervised.run(make(epochs=2, experiment='parts', resume='auto'))['folder']
    states = [torch.load(f / 'last.pth.tar', weights_only=True)['state_dict'] for f in (whole, parts)]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


@pytest.mark.parametrize(
    ('values', 'part'),
    [
        ({'kd_model_name': None, 'kd_temperature': 2.0}, 'kd_temperature: got 2.0; it needs a teacher'),
        ({'kd_model_name': None, 'kd_distill_type': 'token'}, "kd_distill_type: got 'token'; it needs a teacher"),
        ({'kd_distill_type': 'feature', 'kd_temperature': 2.0}, "kd_distill_type 'feature' does not use it"),
        ({'kd_student_feature_dim': 3}, "kd_distill_type 'logit' does not use it"),
        ({'kd_model_name': 'vit_tinny'}, 'kd_model_name: vit_tinny as a logit teacher'),
        ({'in_chans': 3, 'mean': [0.5] * 3, 'std': [0.5] * 3}, 'as a logit teacher: Error(s) in loading'),
    ],
)
def test_refusals(make, values, part):
    with pytest.raises(ConfigError) as caught:
        task_of(make(**values))
    assert part in str(caught.value)
