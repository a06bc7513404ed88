"""Masks kept at inference: built once for a grid, never stale, never part of a model's state."""

import copy
import pickle
import threading

import pytest
import timm
import torch

import violin_timm  # noqa: F401
from violin_timm.models import bank

TINY = dict(patch_size=8, embed_dim=48, num_heads=3, depth=2, num_classes=10, img_size=32, dynamic_img_size=True)


def tiny(**kwargs):
    torch.manual_seed(0)
    return timm.create_model('violin_deit_tiny', **TINY | kwargs).eval()


@pytest.fixture
def builds(monkeypatch):
    """Number of times that masks of a whole model were built."""
    counts = []
    build = bank._build
    monkeypatch.setattr(bank, '_build', lambda *args: counts.append(1) or build(*args))
    return counts


def test_built_once_per_grid_at_inference(builds):
    model, grids = tiny(), [torch.randn(2, 3, 32, 32), torch.randn(1, 3, 16, 64), torch.randn(2, 3, 48, 48)]
    with torch.inference_mode():
        first = [model(x) for x in grids]
        again = [model(x) for x in grids * 2]
    assert len(builds) == 3
    assert all(torch.equal(a, b) for a, b in zip(first * 2, again, strict=True))


def test_built_once_per_forward_in_training_also_with_checkpointing(builds):
    model = tiny().train()
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        builds.clear()
        crops = [model(torch.randn(2, 3, 32, 32)), model(torch.randn(2, 3, 16, 16))]
        sum(c.sum() for c in crops).backward()
        assert len(builds) == 2


def test_not_kept_while_a_parameter_needs_a_gradient(builds):
    model, x = tiny(), torch.randn(1, 3, 32, 32)
    model(x), model(x)
    assert len(builds) == 2 and not model.mask_bank._kept
    for block in model.blocks:
        block.attn.decay.requires_grad_(False)
    model(x), model(x)
    assert len(builds) == 3


def test_too_large_masks_are_built_by_each_layer(builds, monkeypatch):
    model, x = tiny(class_token=True), torch.randn(2, 3, 32, 32)
    wanted = model(x)
    wanted.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    builds.clear()
    model.zero_grad()
    monkeypatch.setattr(bank, 'MAX_BYTES', 0)
    out = model(x)
    out.sum().backward()
    assert not builds
    torch.testing.assert_close(out, wanted)
    for (name, p), grad in zip(model.named_parameters(), grads, strict=True):
        torch.testing.assert_close(p.grad, grad, msg=lambda text, name=name: f'{name}: {text}')


def test_is_no_part_of_the_state_and_is_not_copied():
    model, x = tiny(), torch.randn(1, 3, 32, 32)
    with torch.inference_mode():
        wanted = model(x)
    assert not any('bank' in key for key in model.state_dict())
    twins = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    with torch.inference_mode():
        for block in model.blocks:
            block.attn.decay.beta.sub_(5.0)
        for twin in twins:
            assert not twin.mask_bank._kept
            assert torch.equal(twin(x), wanted)
        assert not torch.equal(model(x), wanted)


def test_threads_on_several_grids():
    model = tiny()
    grids = [torch.randn(1, 3, h, w) for h, w in ((32, 32), (16, 64), (64, 16), (48, 48), (40, 40), (24, 8))]
    with torch.inference_mode():
        wanted = [model(x) for x in grids]
    found = []

    def work(shift):
        with torch.inference_mode():
            for i in range(3 * len(grids)):
                i = (i + shift) % len(grids)
                found.append(torch.equal(model(grids[i]), wanted[i]))

    threads = [threading.Thread(target=work, args=(shift,)) for shift in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9 * len(grids) and all(found)


def test_compiled_models_follow_their_parameters():
    model, x = tiny(dynamic_img_size=False), torch.randn(2, 3, 32, 32)
    compiled = torch.compile(model, fullgraph=True)
    for _ in range(2):
        with torch.no_grad():
            torch.testing.assert_close(compiled(x), model(x), rtol=1e-4, atol=1e-5)
            for block in model.blocks:
                block.attn.decay.beta.data.sub_(4.0)
                block.attn.decay.alpha.data.mul_(3.0)
    loss = compiled.train()(x).square().sum()
    grads = torch.autograd.grad(loss, list(model.parameters()))
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    for (name, _), a, b in zip(model.named_parameters(), grads, wanted, strict=True):
        assert (a - b).abs().max() <= 1e-3 * b.abs().max() + 1e-6, name
