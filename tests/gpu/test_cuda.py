"""What only a GPU can show; run by `make gpu-check`. All is compared with the same on CPU, in float32 or better."""

import copy

import pytest
import timm
import torch

import violin_timm  # noqa: F401  registers the models
from violin_timm import backends
from violin_timm.backends import eager_attention, flex, flex_attention
from violin_timm.backends.sliced import OPERATIONS

if not torch.cuda.is_available():
    pytest.skip('needs a CUDA device', allow_module_level=True)


@pytest.fixture(autouse=True)
def exact():
    """Matrix products in full float32, and no graphs left from another test."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.compiler.reset()
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def build(img_size=48, **kwargs):
    """Two layers, 3 heads of 64: 9 tokens at 48 pixels, 576 at 384."""
    torch.manual_seed(0)
    return timm.create_model('violin_deit_tiny', depth=2, num_classes=10, img_size=img_size, **kwargs)


def gradients(model, x):
    """Logits, and gradients by name after a loss that every one of them matters to."""
    model.zero_grad()
    y = model(x)
    y.float().square().sum().backward()
    return y, {name: p.grad for name, p in model.named_parameters()}


def agree(close, cuda, cpu, tolerance, idle=()):
    """Outputs and gradients of two runs, decay parameters included and none zero but those of `idle`."""
    close(cuda[0].cpu(), cpu[0], tolerance, 'output')
    assert any('.decay.beta' in name for name in cpu[1]) and set(cuda[1]) == set(cpu[1])
    for name, expected in cpu[1].items():
        assert (expected.abs().max() > 0) == (name not in idle), name
        if name in idle:
            assert not cuda[1][name].any()
            continue
        close(cuda[1][name].cpu(), expected, tolerance, name)


@pytest.mark.parametrize('class_token', [False, True])
@pytest.mark.parametrize('strategy', ['mul_v1', 'mul_v2', 'add_v1', 'mul_after_sm', 'add_after_sm'])
def test_model_agrees_with_cpu(strategy, class_token, close):
    model = build(strategy=strategy, class_token=class_token)
    x = torch.randn(3, 3, 48, 48)
    expected = gradients(model, x)
    # a class token attends without decay, and of the last layer nothing else is read
    idle = ['blocks.1.attn.decay.beta'] if class_token else []
    agree(close, gradients(copy.deepcopy(model).cuda(), x.cuda()), expected, 1e-3, idle)


def attention_inputs(length, dtype=torch.float32, batch=2):
    q, k, v = (torch.randn(batch, 3, length, 64).cuda().to(dtype).requires_grad_() for _ in range(3))
    return q, k, v, torch.rand(3, length, length).cuda().requires_grad_()


def in_double(tensors, operation, grad):
    """Output and gradients of the oracle in float64 on the CPU."""
    doubles = [t.detach().cpu().double().requires_grad_() for t in tensors]
    out = eager_attention(*doubles, 0.125, operation, False)
    return out, torch.autograd.grad(out, doubles, grad.cpu().double())


@pytest.mark.parametrize('operation', OPERATIONS)
@pytest.mark.parametrize('length', [64, 197, 640])
@pytest.mark.parametrize('dtype, tolerance', [(torch.float32, 1e-3), (torch.bfloat16, 3e-2), (torch.float16, 5e-3)])
def test_flex_agrees_with_the_oracle(dtype, tolerance, length, operation, close):
    """Outputs, and gradients of q, k, v and of the captured mask."""
    torch.backends.cuda.matmul.allow_tf32 = False
    tensors = attention_inputs(length, dtype)
    out = flex_attention(*tensors, 0.125, operation)
    grad = torch.randn_like(out)
    expected, expected_grads = in_double(tensors, operation, grad)
    assert out.dtype == dtype and out.shape == expected.shape
    close(out.cpu(), expected, tolerance, 'output')
    for name, actual, wanted in zip(('q', 'k', 'v', 'mask'), torch.autograd.grad(out, tensors, grad), expected_grads):
        assert wanted.abs().max() > 0
        close(actual.cpu(), wanted, tolerance, name)


def test_flex_is_chosen_for_long_sequences(monkeypatch):
    calls = []
    monkeypatch.setattr(backends, 'flex_attention', lambda *args: calls.append(args[0].shape[2]) or args[2])
    for length in (flex.CUDA_MIN_TOKENS - 1, flex.CUDA_MIN_TOKENS):
        backends.masked_attention(*attention_inputs(length), 0.125, 'mul', False)
    assert flex.HAS_TRITON and calls == [flex.CUDA_MIN_TOKENS]


def test_long_model_agrees_with_cpu(close):
    """576 tokens, through flex in training and inference."""
    model = build(384)
    x = torch.randn(2, 3, 384, 384)
    agree(close, gradients(copy.deepcopy(model).cuda(), x.cuda()), gradients(model, x), 2e-3)
    with torch.inference_mode():
        close(model.cuda()(x.cuda()).cpu(), copy.deepcopy(model).cpu()(x), 1e-3)


@pytest.mark.parametrize('img_size', [48, 384])
@pytest.mark.parametrize('dtype, tolerance', [(torch.bfloat16, 5e-2), (torch.float16, 1e-2)])
def test_autocast(dtype, tolerance, img_size, close):
    model = build(img_size)
    x = torch.randn(2, 3, img_size, img_size)
    expected = gradients(model, x)
    model = copy.deepcopy(model).cuda()
    model.zero_grad()
    with torch.autocast('cuda', dtype):
        y = model(x.cuda())
    scale = 2.0**12  # as a GradScaler would: float16 gradients vanish otherwise
    (scale * y.float().square().sum()).backward()
    assert y.dtype == dtype
    close(y.cpu(), expected[0], tolerance)
    for name in ('blocks.0.attn.decay.beta', 'blocks.1.attn.decay.alpha', 'blocks.0.attn.qkv.weight'):
        grad = model.get_parameter(name).grad
        assert grad.dtype == torch.float32 and grad.isfinite().all() and grad.abs().max() > 0
        close(grad.cpu() / scale, expected[1][name], 0.1, name)


@pytest.mark.parametrize('img_size', [48, 384])
def test_compiled_in_one_graph(img_size, close):
    model = build(img_size).cuda()
    x = torch.randn(2, 3, img_size, img_size).cuda()
    expected = gradients(model, x)
    expected = expected[0].cpu(), {name: grad.cpu() for name, grad in expected[1].items()}
    compiled = torch.compile(model, fullgraph=True)
    model.zero_grad()
    y = compiled(x)
    y.square().sum().backward()
    agree(close, (y, {name: p.grad for name, p in model.named_parameters()}), expected, 2e-3)
    with torch.inference_mode():
        close(compiled(x).cpu(), expected[0], 1e-3)


def test_channels_last(close):
    model = build().cuda()
    x = torch.randn(3, 3, 48, 48).cuda()
    expected = gradients(model, x)
    expected = expected[0].cpu(), {name: grad.cpu() for name, grad in expected[1].items()}
    model = model.to(memory_format=torch.channels_last)
    agree(close, gradients(model, x.to(memory_format=torch.channels_last)), expected, 1e-3)


@pytest.mark.parametrize(
    'edit',
    [
        lambda p: p.data.mul_(0.5),
        lambda p: torch.no_grad()(p.mul_)(0.5),
        lambda p: p.data.copy_(p.data * 0.5),
        lambda p: setattr(p, 'data', p.data * 0.5),
    ],
    ids=['data.mul_', 'mul_', 'data.copy_', 'data='],
)
def test_kept_mask_follows_the_values(edit, close):
    model = build().cuda().eval()
    x = torch.randn(2, 3, 48, 48).cuda()
    with torch.inference_mode():
        before = model(x)
        assert len(model.mask_bank._kept) == 1
        kept = next(iter(model.mask_bank._kept.values()))[1]
        assert torch.equal(model(x), before)
        assert next(iter(model.mask_bank._kept.values()))[1] is kept
    edit(model.blocks[0].attn.decay.beta)
    with torch.inference_mode():
        after = model(x)
    assert not torch.equal(before, after)
    close(after.cpu(), copy.deepcopy(model).cpu()(x.cpu()), 1e-3)


def test_training_after_inference_mode():
    model = build().cuda()
    x = torch.randn(2, 3, 48, 48).cuda()
    with torch.inference_mode():
        model(x)
    _, grads = gradients(model, x)
    assert all(grad.isfinite().all() and grad.abs().max() > 0 for grad in grads.values())


def test_deepcopy_and_moves_between_devices(close):
    model = build().eval()
    x = torch.randn(2, 3, 48, 48)
    with torch.inference_mode():
        expected = model(x)
        model.cuda()
        close(model(x.cuda()).cpu(), expected, 1e-3)
        twin = copy.deepcopy(model)
        twin.blocks[0].attn.decay.beta.data.zero_()
        assert not torch.equal(twin(x.cuda()), model(x.cuda()))
        close(model.cpu()(x), expected, 1e-5)


def test_one_process_of_distributed_training(close, tmp_path):
    if not torch.distributed.is_nccl_available():
        pytest.skip('this torch has no NCCL')
    torch.distributed.init_process_group('nccl', init_method=f'file://{tmp_path / "meet"}', rank=0, world_size=1)
    try:
        model = build().cuda()
        x = torch.randn(3, 3, 48, 48).cuda()
        expected = gradients(model, x)
        expected = expected[0].cpu(), {name: grad.cpu() for name, grad in expected[1].items()}
        wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
        model.zero_grad()
        y = wrapped(x)
        y.square().sum().backward()
        agree(close, (y, {name: p.grad for name, p in model.named_parameters()}), expected, 1e-5)
    finally:
        torch.distributed.destroy_process_group()
