"""The pieces of DINO, one at a time: loss, schedules, crops, teacher, weight decay, masks, frozen weights, collapse."""

import numpy as np
import pytest
import timm
import torch
from torch import nn

from violin_timm.engine.distributed import World
from violin_timm.models import bank
from violin_timm.recipes import dino, dino_loss, dino_parts

TINY = {
    'patch_size': 2, 'embed_dim': 16, 'depth': 2, 'num_heads': 2, 'dynamic_img_size': True,
    'pos_embed_resample': 'dino',
}  # fmt: skip


def test_loss_is_the_mean_over_pairs():
    """Against the double loop of its definition, with one, two and three views of the teacher."""
    student, teacher = torch.randn(4 * 3, 5), torch.randn(3 * 3, 5)
    loss = dino_loss.DinoLoss(5)
    for views in (1, 2, 3):
        q = loss.targets(teacher[: views * 3], 0.05)
        log_p = (student / 0.1).log_softmax(-1).chunk(4)
        pairs = [-(a * b).sum(-1).mean() for i, a in enumerate(q.chunk(views)) for j, b in enumerate(log_p) if i != j]
        assert loss(student, q, 4, views).item() == pytest.approx((sum(pairs) / len(pairs)).item(), rel=1e-5)
    with pytest.raises(ValueError, match='got 1 with 1'):
        loss(student, q, 1, 1)


def test_temperature_warmup_longer_than_the_run_keeps_its_slope():
    long = dino_loss.temperature_schedule(0.04, 0.07, 30, 40)
    np.testing.assert_array_equal(dino_loss.temperature_schedule(0.04, 0.07, 30, 10), long[:10])
    with pytest.raises(ValueError, match='warmup_epochs: got 3, more than the 2'):
        dino_loss.cosine_schedule(1, 0, 2, 5, 3)


def test_each_size_is_one_batch():
    seen = []

    class Backbone(nn.Module):
        def forward(self, x):
            seen.append(tuple(x.shape))
            return x.mean((2, 3))

    views = [torch.full((2, 1, *size), float(i)) for i, size in enumerate([(8, 8), (8, 8), (4, 4), (4, 6), (4, 6)])]
    features, _ = dino_parts.CropNetwork(Backbone(), nn.Identity())(views)
    assert seen == [(4, 1, 8, 8), (2, 1, 4, 4), (4, 1, 4, 6)]
    assert features[:, 0].tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]


def test_teacher_follows_parameters_and_buffers():
    student, teacher = (nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)) for _ in range(2))
    student(torch.randn(8, 2))
    before = [p.clone() for p in teacher.parameters()]
    dino_loss.follow(teacher, student, 0.9)
    for old, new, goal in zip(before, teacher.parameters(), student.parameters()):
        assert torch.allclose(new, 0.9 * old + 0.1 * goal)
    for new, goal in zip(teacher.buffers(), student.buffers()):
        assert torch.equal(new, goal)
    assert teacher[1].num_batches_tracked == 1


def test_collapse_is_told():
    uniform = torch.full((6, 50), 1 / 50)
    same = torch.zeros(6, 50).index_fill(1, torch.tensor([3]), 1.0)
    varied = torch.eye(50)
    features = torch.randn(6, 16)
    for targets, found, part in ((uniform, features, 'uniform'), (same, features, 'all but one')):
        warnings = dino_loss.collapse_warnings(*dino_loss.entropies(targets).tolist(), dino_loss.spread(found), 50)
        assert len(warnings) == 1 and part in warnings[0]
    warnings = dino_loss.collapse_warnings(
        *dino_loss.entropies(varied).tolist(), dino_loss.spread(features * 0 + 1), 50
    )
    assert len(warnings) == 1 and 'nearly the same' in warnings[0]
    assert dino_loss.collapse_warnings(*dino_loss.entropies(varied).tolist(), dino_loss.spread(features), 50) == []


# --- in a run that is prepared


def prepared(args):
    return dino.prepare(args, World(torch.device('cpu')))


def views_of(parts):
    parts.train.set_epoch(0)
    return next(iter(parts.train))


def test_teacher_moves_with_its_masks(dino_args):
    """And its outputs change with them: no mask of before is kept."""
    task = prepared(dino_args()).task
    image = torch.randn(2, 1, 8, 8)
    for network in (task.student, task.teacher):  # of weights that make masks felt
        for block in network.backbone.blocks:
            block.attn.qkv.weight.data.mul_(30)
    before = task.teacher.backbone(image)
    with torch.no_grad():
        for name, parameter in task.student.backbone.named_parameters():
            if name.endswith('beta'):
                parameter.sub_(8)
    task.follow(0.5)
    after = task.teacher.backbone(image)
    assert not torch.allclose(before, after, atol=1e-3)
    fresh = timm.create_model('violin_dino_small', num_classes=0, img_size=8, in_chans=1, **TINY).eval()
    fresh.load_state_dict(task.teacher.backbone.state_dict())
    assert torch.equal(after, fresh(image))


def test_weight_decay_is_for_its_group_alone(dino_args):
    args = dino_args(weight_decay=0.04, weight_decay_end=0.4, norm_last_layer=False)
    parts = prepared(args)
    names = {id(p): name for name, p in parts.task.student.named_parameters()}
    parts.schedules.apply(len(parts.schedules.lr) - 1)
    decayed, free = set(), set()
    for group in parts.stepper.optimizer.param_groups:
        found = {names[id(p)] for p in group['params']}
        (decayed if group['weight_decay'] else free).update(found)
        assert group['weight_decay'] in (0.0, pytest.approx(0.4, abs=0.02))
    assert decayed | free == set(names.values()) and not decayed & free
    tokens = {'backbone.pos_embed', 'backbone.cls_token'}
    masks = {name for name in names.values() if '.decay.' in name}
    assert len(masks) == 4 and masks | tokens <= free
    assert {'backbone.patch_embed.proj.weight', 'head.mlp.0.weight', 'head.last_layer.weight_v'} <= decayed
    assert {name for name in free if not name.endswith('bias') and 'norm' not in name} == masks | tokens


def test_zero_weight_decay_at_the_start_still_grows(dino_args):
    parts = prepared(dino_args(weight_decay=0.0))
    parts.schedules.apply(len(parts.schedules.lr) - 1)
    assert {bool(group['weight_decay']) for group in parts.stepper.optimizer.param_groups} == {True, False}


def test_masks_are_built_once_for_each_size(dino_args, monkeypatch):
    parts = prepared(dino_args(local_number=[2, 1], local_size=[4, 6], global_number=2))
    built, real = [], bank._build
    monkeypatch.setattr(bank, '_build', lambda *args: built.append(args[1].shape[1]) or real(*args))
    parts.task.trainable_module.train()
    parts.task(views_of(parts), 0.04)
    assert sorted(built) == [4, 9, 16, 16]  # the student's three grids, the teacher's one
    parts.task(views_of(parts), 0.04)
    assert sorted(built[4:]) == [4, 9, 16]  # the teacher has not moved


def test_activation_checkpointing_leaves_the_gradients(dino_args):
    gradients = []
    for checkpointing in (False, True):
        parts = prepared(
            dino_args(grad_checkpointing=checkpointing, drop_path=0.0, local_size=[4, 6], local_number=[1, 1])
        )
        parts.task.trainable_module.train()
        parts.task(views_of(parts), 0.04)['loss'].backward()
        gradients.append([p.grad for p in parts.task.student.parameters() if p.requires_grad])
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*gradients))
    assert all(gradient.abs().max() > 0 for gradient in gradients[0][:4])


def test_frozen_parameters_stay(dino_args):
    parts = prepared(dino_args(norm_last_layer=False))
    parts.schedules.apply(5)
    last = parts.task.student.head.last_layer
    before = [p.clone() for p in last.parameters()]
    parts.stepper.step(parts.task(views_of(parts), 0.04)['loss'], list(last.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(before, last.parameters()))
    parts.stepper.step(parts.task(views_of(parts), 0.04)['loss'])
    assert not any(torch.equal(a, b) for a, b in zip(before, last.parameters()))
