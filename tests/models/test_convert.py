"""`violin convert`: layouts in, one native file out, the same logits."""

import argparse

import pytest
import safetensors.torch
import timm
import torch

import violin_timm  # noqa: F401
from violin_timm.models import convert, files

TINY = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2)
FLAGS = ['--model', 'violin_deit_tiny', '--model-kwargs', *(f'{k}={v}' for k, v in TINY.items())]


@pytest.fixture
def record(golden):
    """The authors' tensors of one recorded model, by case, without the prefix."""

    def read(case, name='deit_model_authors.safetensors'):
        tensors = safetensors.torch.load_file(golden(name))
        return {k.removeprefix(case): v for k, v in tensors.items() if k.startswith(case)}

    return read


def parameters(record):
    return {k.removeprefix('param/'): v for k, v in record.items() if k.startswith('param/')}


def run(*argv):
    return convert.main([str(arg) for arg in argv])


def converted(path, **kwargs):
    return timm.create_model('violin_deit_tiny', checkpoint_path=str(path), **TINY, **kwargs).eval()


@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
@pytest.mark.parametrize('case', ['cls=0|pos=1', 'cls=1|pos=1', 'cls=0|pos=0'])
def test_authors_logits_survive(record, case, suffix, tmp_path, capsys):
    data = record(f'{case}/')
    source, target = tmp_path / f'in{suffix}', tmp_path / f'out{suffix}'
    if suffix == '.pth':
        torch.save({'model': parameters(data), 'args': argparse.Namespace(lr=1.0)}, source)
    else:
        safetensors.torch.save_file(parameters(data), source)
    assert run(source, target, *FLAGS) == 0

    said = capsys.readouterr().out
    assert "the authors', " + ('bare' if suffix == '.safetensors' else "under 'model'") in said
    assert 'beta, alpha from the file' in said and 'zigzag_T and zigzag' in said
    assert f"checkpoint_path='{target}', num_classes=10, class_token={case[4] == '1'}" in said
    kwargs = {'pos_embed': 'none'} if case.endswith('pos=0') else {}
    model = converted(target, num_classes=10, class_token=case[4] == '1', **kwargs)
    assert (model(data['x']) - data['logits']).abs().max() < 1e-4
    assert [path.name for path in tmp_path.glob('.*')] == []


def test_dino_teacher_with_prefixes(record, tmp_path, capsys):
    data = record('', 'dino_model_authors.safetensors')
    teacher = {f'module.backbone.{k}': v for k, v in parameters(data).items()}
    student = {k: torch.zeros_like(v) for k, v in teacher.items()}
    head = {'module.head.mlp.0.weight': torch.zeros(2, 2)}
    torch.save({'student': student, 'teacher': {**teacher, **head}, 'epoch': 3}, tmp_path / 'in.pth')
    assert run(tmp_path / 'in.pth', tmp_path / 'out.pth', *FLAGS) == 0
    assert "the authors', under 'teacher'" in capsys.readouterr().out
    model = converted(tmp_path / 'out.pth', num_classes=0, class_token=True)
    assert (model(data['x']) - data['y']).abs().max() < 1e-4


def test_fixed_and_unscaled_masks_are_read_off_the_file(record, tmp_path):
    state = parameters(record('cls=0|pos=1/'))
    for layer in range(2):
        state.pop(f'blocks.{layer}.attn.normalize')
        for curve in range(8):
            state.pop(f'blocks.{layer}.attn.ai_list.{curve}')
        state[f'blocks.{layer}.attn.ai_list'] = torch.full((8, 3), 0.996)
    torch.save(state, tmp_path / 'in.pth')
    assert run(tmp_path / 'in.pth', tmp_path / 'out.pth', *FLAGS) == 0
    model = converted(tmp_path / 'out.pth', num_classes=10, mask='fixed', alpha='none')
    assert torch.allclose(model.blocks[1].attn.decay.beta.sigmoid(), torch.tensor(0.996))


@pytest.mark.parametrize('class_token', [True, False])
def test_plain_weights_get_fresh_masks(class_token, tmp_path, capsys):
    plain = timm.create_model('deit_tiny_patch16_224', num_classes=5, **TINY).eval()
    torch.save(plain.state_dict(), tmp_path / 'in.pth')
    flags = [*FLAGS, 'alpha_std=0', f'class_token={class_token}']
    assert run(tmp_path / 'in.pth', tmp_path / 'out.pth', *flags) == 0
    said = capsys.readouterr().out
    assert "timm's, without masks, bare" in said
    assert "beta, alpha fresh, from the 'finetune' initialisation with seed 0" in said
    assert ('dropped: the model pools' in said) == (not class_token)
    model = converted(tmp_path / 'out.pth', num_classes=5, class_token=class_token)
    assert model.blocks[0].attn.decay.beta.min() >= 15
    if class_token:
        x = torch.randn(2, 3, 32, 32)
        assert (model(x) - plain(x)).abs().max() < 1e-3

    again = tmp_path / 'again.pth'
    torch.manual_seed(7)  # the masks depend on --seed alone
    assert run(tmp_path / 'in.pth', again, *flags) == 0
    first, second = (files.read_checkpoint(path)['state_dict'] for path in (tmp_path / 'out.pth', again))
    assert all(torch.equal(first[k], second[k]) for k in first)


def test_native_file_comes_back_the_same(tmp_path):
    model = timm.create_model('violin_deit_tiny', num_classes=7, mask_init='pretrain', **TINY)
    torch.save({'state_dict': {f'module.{k}': v for k, v in model.state_dict().items()}}, tmp_path / 'in.pth')
    assert run(tmp_path / 'in.pth', tmp_path / 'out.safetensors', *FLAGS) == 0
    state = safetensors.torch.load_file(tmp_path / 'out.safetensors')
    assert state.keys() == model.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_resampled_positions_are_reported(record, tmp_path, capsys):
    torch.save(parameters(record('cls=0|pos=1/')), tmp_path / 'in.pth')
    flags = [flag.replace('img_size=32', 'img_size=48') for flag in FLAGS]
    assert run(tmp_path / 'in.pth', tmp_path / 'out.pth', *flags) == 0
    assert '16 tokens, resampled to 36 (6x6 patches)' in capsys.readouterr().out


def test_input_is_never_overwritten(record, tmp_path, capsys):
    source = tmp_path / 'in.pth'
    torch.save(parameters(record('cls=0|pos=1/')), source)
    link = tmp_path / 'link.pth'
    link.symlink_to(source)
    before = source.read_bytes()
    for target in (source, link):
        assert run(source, target, '--overwrite', *FLAGS) == 2
        assert 'which is IN' in capsys.readouterr().err
    assert source.read_bytes() == before


def test_other_files_are_overwritten_when_told(record, tmp_path, capsys):
    torch.save(parameters(record('cls=0|pos=1/')), tmp_path / 'in.pth')
    target = tmp_path / 'out.pth'
    target.write_text('precious')
    assert run(tmp_path / 'in.pth', target, *FLAGS) == 2
    assert '--overwrite' in capsys.readouterr().err and target.read_text() == 'precious'
    assert run(tmp_path / 'in.pth', target, '--overwrite', *FLAGS) == 0
    assert 'state_dict' in files.read_checkpoint(target)


def test_interrupted_write_leaves_nothing(record, tmp_path, monkeypatch, capsys):
    torch.save(parameters(record('cls=0|pos=1/')), tmp_path / 'in.pth')

    def full(*_):
        raise OSError('no space left')

    monkeypatch.setattr(convert.os, 'fsync', full)
    assert run(tmp_path / 'in.pth', tmp_path / 'out.pth', *FLAGS) == 1
    assert 'no space left' in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ['in.pth']


@pytest.mark.parametrize(
    'flags, message',
    [
        (['--model', 'violin_deit_tyny'], "model: got 'violin_deit_tyny'; choose from violin_deit3_base"),
        (['--model', 'resnet18'], 'Violins are violin_deit3_base'),
        (['--model', 'deit_tiny_patch16_224', *FLAGS[2:]], 'Violins are'),
        (['--model', 'deit_tiny_patch16_224', *FLAGS[2:], 'global_pool=avg'], 'which is no Violin'),
        ([*FLAGS, 'num_classes=9'], 'num_classes: got 9; with the classifier of this file, allowed is 10, or 0'),
        ([*FLAGS, 'class_token=True'], 'class_token: got True'),
        ([*FLAGS, 'embed_dim=96'], 'size mismatch'),
        ([*FLAGS, 'depth=3'], 'missing: blocks.2'),
        ([*FLAGS, 'curves=snake'], 'curves: got snake'),
        ([*FLAGS, 'curvs=snake'], 'curvs'),
        ([*FLAGS, 'snake'], "got 'snake'; a pair is needed"),
    ],
)
def test_misfits_are_named(record, flags, message, tmp_path, capsys):
    torch.save(parameters(record('cls=0|pos=1/')), tmp_path / 'in.pth')
    assert run(tmp_path / 'in.pth', tmp_path / 'out.pth', *flags) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / 'out.pth').exists()


@pytest.mark.parametrize(
    'content, message',
    [
        (None, 'no such file'),
        (b'junk', 'allowed are safetensors, and torch.save'),
        ({'a': torch.zeros(1)}, 'a Vision Transformer with patch_embed.proj.weight is needed'),
        ([1], 'holds a list'),
    ],
)
@pytest.mark.parametrize('suffix', ['.pth', '.safetensors'])
def test_junk_is_refused(content, message, suffix, tmp_path, capsys):
    source = tmp_path / f'in{suffix}'
    if isinstance(content, bytes):
        source.write_bytes(content)
    elif isinstance(content, dict) and suffix == '.safetensors':
        safetensors.torch.save_file(content, source)
    elif content is not None and suffix == '.pth':
        torch.save(content, source)
    elif content is not None:
        pytest.skip('safetensors holds tensors alone')
    assert run(source, tmp_path / 'out.pth', *FLAGS) == 2
    assert message in capsys.readouterr().err


def test_code_in_a_file_is_not_run(tmp_path, capsys):
    torch.save({'model': pytest.raises}, tmp_path / 'in.pth')
    assert run(tmp_path / 'in.pth', tmp_path / 'out.pth', *FLAGS) == 2
    assert 'allowed are safetensors' in capsys.readouterr().err
