"""Exported Violins compute what eager ones do: torch.export, ONNX, TorchScript."""

import pytest
import timm
import torch

import violin_timm  # noqa: F401

TINY = dict(patch_size=8, embed_dim=48, num_heads=3, depth=2, num_classes=10, img_size=32)
KINDS = [
    pytest.param(dict(), id='gap'),
    pytest.param(dict(class_token=True, reg_tokens=2), id='prefix'),
    pytest.param(dict(mask='fixed', strategy='mul_after_sm'), id='fixed'),
    pytest.param(dict(mask='none'), id='alpha only'),
]


def tiny(**kwargs):
    torch.manual_seed(0)
    model = timm.create_model('violin_deit_tiny', **TINY | kwargs).eval()
    with torch.no_grad():
        for block in model.blocks:  # masks far from one, so that a wrong one shows
            if model.curve_names:
                block.attn.decay.beta.sub_(5.0)
            block.attn.decay.alpha.mul_(4.0)
    return model


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('kwargs', KINDS)
def test_export_with_dynamic_batch(kwargs):
    model = tiny(**kwargs)
    program = torch.export.export(
        model, (torch.randn(2, 3, 32, 32),), dynamic_shapes={'x': {0: torch.export.Dim('batch', max=64)}}
    )
    for batch in (2, 5):
        x = torch.randn(batch, 3, 32, 32)
        close(program.module()(x), model(x))


def test_export_with_dynamic_size():
    model = tiny(dynamic_img_size=True, class_token=True)
    rows, columns = (torch.export.Dim(name, min=2, max=9) for name in ('rows', 'columns'))
    program = torch.export.export(
        model,
        (torch.randn(2, 3, 32, 48),),
        dynamic_shapes={'x': {0: torch.export.Dim('batch', max=64), 2: 8 * rows, 3: 8 * columns}},
    )
    for size in ((3, 3, 32, 48), (2, 3, 16, 64), (2, 3, 64, 16), (4, 3, 40, 40)):
        x = torch.randn(size)
        close(program.module()(x), model(x))


@pytest.mark.parametrize('kwargs', KINDS)
def test_onnx_with_dynamic_batch(kwargs, tmp_path):
    onnxruntime = pytest.importorskip('onnxruntime')
    pytest.importorskip('onnxscript')
    model, path = tiny(**kwargs), str(tmp_path / 'violin.onnx')
    torch.onnx.export(
        model,
        (torch.randn(2, 3, 32, 32),),
        path,
        dynamo=True,
        dynamic_shapes={'x': {0: torch.export.Dim('batch', max=64)}},
        verbose=False,
    )
    session = onnxruntime.InferenceSession(path, providers=['CPUExecutionProvider'])
    for batch in (2, 5):
        x = torch.randn(batch, 3, 32, 32)
        out = session.run(None, {session.get_inputs()[0].name: x.numpy()})[0]
        close(torch.from_numpy(out), model(x).detach())


@pytest.mark.parametrize('kwargs', KINDS)
@pytest.mark.filterwarnings('ignore::FutureWarning', 'ignore::torch.jit.TracerWarning')
def test_torchscript(kwargs, tmp_path):
    model = tiny(**kwargs)
    traced = torch.jit.trace(model, torch.randn(2, 3, 32, 32))
    scripted = torch.jit.script(model)
    scripted.save(str(tmp_path / 'violin.pt'))
    for graph in (traced, scripted, torch.jit.load(str(tmp_path / 'violin.pt'))):
        for batch in (2, 5):
            x = torch.randn(batch, 3, 32, 32)
            close(graph(x), model(x))


@pytest.mark.filterwarnings('ignore::FutureWarning')
def test_scripted_models_take_any_size():
    model = tiny(dynamic_img_size=True)
    scripted = torch.jit.script(model)
    for size in ((2, 3, 32, 32), (1, 3, 16, 64), (1, 3, 64, 16)):
        x = torch.randn(size)
        close(scripted(x), model(x))
