"""LoRA and DoRA: what is trained, what comes back, the counts, and what is refused."""

import sys

import pytest
import safetensors.torch
import timm
import torch
from timm.optim import create_optimizer_v2
from torch import nn

from violin_timm import add_violin, peft
from violin_timm.engine.config import ConfigError
from violin_timm.peft import Adapter, add_adapters, count_parameters, load_adapters, merge, save_adapters

pytest.importorskip('peft')

SMALL = dict(img_size=32, patch_size=8, embed_dim=48, num_heads=3, depth=2, num_classes=5)
LINEARS = {'attn.qkv': (48, 144), 'attn.proj': (48, 48), 'mlp.fc1': (48, 192), 'mlp.fc2': (192, 48)}


def added(name, **kwargs):
    """With masks that matter after two steps: those of the fine-tuning initialisation are nearly 1."""
    return add_violin(timm.create_model(name, **SMALL, **kwargs), beta_range=(0, 3))


MODELS = {
    'learned': lambda: timm.create_model('violin_deit_tiny', class_token=True, **SMALL),
    'fixed': lambda: timm.create_model('violin_deit_tiny', mask='fixed', alpha='none', **SMALL),
    'off': lambda: timm.create_model('violin_deit_tiny', class_token=True, mask='none', alpha='none', **SMALL),
    'added': lambda: added('vit_tiny_patch16_224'),
    'distilled': lambda: added('deit_tiny_distilled_patch16_224'),
    'registers': lambda: added('vit_small_patch14_reg4_dinov2', init_values=1.0),
    'headless': lambda: timm.create_model('violin_dino_small', **{**SMALL, 'num_classes': 0}),
}
ADAPTERS = {
    'lora': Adapter('lora', rank=3),
    'dora': Adapter('dora', rank=2, alpha=4.0),
    'no biases': Adapter('lora', rank=2, biases=False),
}
CASES = [(kind, method) for kind in ('learned', 'off') for method in ADAPTERS]
CASES += [('fixed', 'lora'), ('added', 'dora'), ('distilled', 'lora'), ('registers', 'dora'), ('headless', 'lora')]
cases = pytest.mark.parametrize('kind, method', CASES)


def create(kind, seed=1):
    torch.manual_seed(seed)
    return MODELS[kind]()


def images():
    return torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(4))


def trained(kind, method):
    """Two steps of AdamW: after the first, B is not zero; at the second, A has a gradient."""
    model = add_adapters(create(kind), ADAPTERS[method]).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, weight_decay=0.0)
    for _ in range(2):
        optimizer.zero_grad()
        model(images()).square().sum().backward()
        optimizer.step()
    return model.eval()


def output(model):
    with torch.no_grad():
        return model.eval()(images())


@cases
def test_training_moves_what_it_should_and_nothing_else(kind, method):
    before = create(kind).state_dict()
    model = trained(kind, method)
    after = merge_free(model)
    biases = ADAPTERS[method].biases
    for key, value in before.items():
        is_free = key.startswith('head') or ('.attn.decay.' in key and kind != 'fixed')
        moved = not torch.equal(after[key], value)
        if not (is_free or key.endswith('.bias')):
            assert not moved, key
        # the last layer's beta has no gradient where the class token is pooled, nor a key's bias any
        if key.startswith('head') or key.endswith('.alpha') or key == 'blocks.0.attn.decay.beta':
            assert moved == is_free, key
        if key.endswith(('proj.bias', 'norm.bias', 'norm1.bias')):
            assert moved == biases, key
    initial = dict(add_adapters(create(kind), ADAPTERS[method]).named_parameters())
    for name, parameter in model.named_parameters():
        if '.lora_' in name:
            assert not torch.equal(parameter, initial[name]), name
            assert 'lora_B' not in name or parameter.any()


def merge_free(model):
    """Weights of the model below the adapters, by the names of an unadapted one."""
    state = {k: v for k, v in model.state_dict().items() if '.lora_' not in k and '.original_module.' not in k}
    for wrapper in ('base_model.model.', '.base_layer', '.modules_to_save.default'):
        state = {k.replace(wrapper, ''): v for k, v in state.items()}
    return state


@cases
def test_at_first_the_outputs_are_those_of_the_model(kind, method):
    expected = output(create(kind))
    model = add_adapters(create(kind), ADAPTERS[method])
    torch.testing.assert_close(output(model), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('method', ['lora', 'dora'])
def test_merged_weights_by_the_papers_formulas(method, close):
    adapter = Adapter(method, rank=3, alpha=6.0)
    model = add_adapters(create('learned'), adapter)
    layer = model.get_base_model().blocks[1].mlp.fc1
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    weight, a, b = (x.weight.detach() for x in (layer.base_layer, layer.lora_A['default'], layer.lora_B['default']))
    expected = weight + 6.0 / 3 * b @ a
    if method == 'dora':  # the magnitude times the direction, both by output
        magnitude = layer.lora_magnitude_vector['default'].weight.detach()
        expected = magnitude[:, None] * expected / expected.norm(dim=1, keepdim=True)
    close(merge(model).blocks[1].mlp.fc1.weight, expected, 1e-5)


def test_dropout_is_on_the_adapters_in_training_alone():
    model = add_adapters(create('off'), Adapter('lora', rank=3, dropout=0.5))
    for name, parameter in model.named_parameters():
        if 'lora_B' in name:
            nn.init.normal_(parameter)
    assert torch.equal(output(model), output(model))
    with torch.no_grad():
        assert not torch.equal(model.train()(images()), model(images()))


@cases
def test_saved_and_loaded(kind, method, tmp_path, close):
    model = trained(kind, method)
    save_adapters(model, tmp_path / 'adapters')
    assert sorted(path.name for path in tmp_path.iterdir()) == ['adapters']
    saved = safetensors.torch.load_file(tmp_path / 'adapters' / peft.WEIGHTS)
    frozen = {'blocks.0.attn.qkv.base_layer.weight', 'patch_embed.proj.weight', 'pos_embed', 'norm.weight'}
    assert not frozen & {key.removeprefix('base_model.model.') for key in saved}
    decays = {key for key in create(kind).state_dict() if '.decay.' in key}
    assert {f'base_model.model.{key}' for key in decays} <= saved.keys()
    again = load_adapters(create(kind), tmp_path / 'adapters')
    assert not again.training and not any(p.requires_grad for p in again.parameters())
    assert torch.equal(output(again), output(model))
    fresh = output(add_adapters(create(kind), ADAPTERS[method]))
    assert (output(model) - fresh).abs().max() > 1e-2 * fresh.abs().max()
    again = load_adapters(create(kind), tmp_path / 'adapters', trainable=True)
    trainable = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n for n, p in again.named_parameters() if p.requires_grad} == trainable


@cases
def test_merged_is_a_plain_violin(kind, method, tmp_path, close):
    model = trained(kind, method)
    expected, plain = output(model), create(kind)
    merged = merge(model)
    close(output(merged), expected, 1e-5)
    assert list(merged.state_dict()) == list(plain.state_dict()) and type(merged) is type(plain)
    assert all(p.requires_grad for p in merged.parameters())
    plain.load_state_dict(merged.state_dict())
    assert torch.equal(output(plain), output(merged))
    assert add_adapters(merged, ADAPTERS[method])  # peft has left nothing behind


@pytest.mark.parametrize('method', ['lora', 'dora'])
def test_merged_file_loads_strictly_through_timm(method, tmp_path):
    merged = merge(trained('learned', method))
    safetensors.torch.save_file(merged.state_dict(), tmp_path / 'merged.safetensors')
    path = str(tmp_path / 'merged.safetensors')
    loaded = timm.create_model('violin_deit_tiny', class_token=True, checkpoint_path=path, **SMALL)
    assert torch.equal(output(loaded), output(merged))


@cases
def test_counts(kind, method):
    adapter = ADAPTERS[method]
    plain, model = create(kind), add_adapters(create(kind), adapter)
    sizes = {name: p.numel() for name, p in plain.named_parameters()}
    extra = SMALL['depth'] * sum(
        adapter.rank * (i + o) + (o if adapter.method == 'dora' else 0) for i, o in LINEARS.values()
    )
    mask = sum(n for name, n in sizes.items() if '.decay.' in name)
    head = sum(n for name, n in sizes.items() if name.startswith('head'))
    biases = sum(n for name, n in sizes.items() if name.endswith('.bias') and not name.startswith('head'))
    total = sum(sizes.values())
    counts = count_parameters(model)
    assert counts.pop('total') == total + extra
    assert counts.pop('trainable') == extra + mask + head + adapter.biases * biases
    assert counts == dict(adapter=extra, mask=mask, head=head, other=adapter.biases * biases)
    assert (mask > 0) == (kind not in ('off', 'fixed')) and (head > 0) == (kind != 'headless')
    counts = dict(total=total, trainable=total, adapter=0, mask=mask, head=head, other=total - mask - head)
    assert count_parameters(plain) == count_parameters(merge(model)) == counts
    plain.requires_grad_(False)
    assert count_parameters(plain) == dict.fromkeys(counts, 0) | {'total': total}


def test_gated_blocks_are_adapted_whole():
    kwargs = {**SMALL, 'mlp_layer': timm.layers.SwiGLU}
    model = add_violin(timm.create_model('vit_tiny_patch16_224', **kwargs))
    linears = [n for n, m in model.blocks.named_modules() if isinstance(m, nn.Linear)]
    names = [n for n, _ in add_adapters(model, ADAPTERS['lora']).named_parameters() if 'lora_A' in n]
    assert len(names) == len(linears) == 2 * 5
    assert not any('head' in name or 'patch_embed' in name or 'decay' in name for name in names)


def test_no_weight_decay_is_reachable_through_the_wrapper():
    model = add_adapters(create('learned'), ADAPTERS['lora'])
    assert model.no_weight_decay() == create('learned').no_weight_decay()
    groups = create_optimizer_v2(model, 'adamw', lr=1e-3, weight_decay=0.05).param_groups
    decayed = {id(p) for group in groups if group['weight_decay'] for p in group['params']}
    names = {n for n, p in model.named_parameters() if id(p) in decayed}
    assert names and all('.lora_' in name or name.endswith('head.modules_to_save.default.weight') for name in names)


# --- refusals


@pytest.mark.parametrize(
    'settings, message',
    [
        (dict(method='lora', rang=8), "adapter: unknown key 'rang'; did you mean rank"),
        (dict(method='lora'), 'adapter: rank is missing; got method'),
        (dict(rank=8), 'adapter: method is missing; got rank'),
        ({}, 'adapter: method is missing; got nothing'),
        (dict(method='qlora', rank=8), "method: got 'qlora'; choose from lora, dora"),
        (dict(method='lora', rank=0), 'rank: got 0; expected a whole number, at least 1'),
        (dict(method='lora', rank=2.0), 'rank: got 2.0'),
        (dict(method='lora', rank=True), 'rank: got True'),
        (dict(method='lora', rank=8, alpha=0), 'alpha: got 0; expected a number above 0'),
        (dict(method='lora', rank=8, alpha=float('nan')), 'alpha: got nan'),
        (dict(method='lora', rank=8, dropout=1), 'dropout: got 1; expected a number, at least 0 and below 1'),
        (dict(method='lora', rank=8, dropout='0.1'), "dropout: got '0.1'"),
        (dict(method='lora', rank=8, biases='all'), "biases: got 'all'; expected true or false"),
    ],
    ids=str,
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ConfigError, match=message):
        Adapter.of(settings)


def test_settings_that_can_be():
    assert Adapter.of(dict(rank=8, method='dora')) == Adapter('dora', 8, 1.0, 0.0, True)
    assert Adapter.of(dict(rank=1, method='lora', alpha=2, dropout=0.5, biases=False)).alpha == 2


def test_adapters_are_not_stacked():
    model = add_adapters(create('learned'), ADAPTERS['lora'])
    for adapted in (model, model.get_base_model()):
        with pytest.raises(ValueError, match=r'which has (adapters already|no linear layers)'):
            add_adapters(adapted, ADAPTERS['lora'])


def test_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r'got Sequential, which has no linear layers in blocks\.<i>'):
        add_adapters(nn.Sequential(nn.Linear(2, 2)), ADAPTERS['lora'])


def test_what_peft_skips_is_seen(monkeypatch):
    config = peft._config

    def partly(model, adapter):
        found = config(model, adapter)
        found.target_modules = r'blocks\.\d+\.attn\.qkv'
        return found

    monkeypatch.setattr(peft, '_config', partly)
    with pytest.raises(RuntimeError, match=r'left out, blocks\.0\.attn\.proj'):
        add_adapters(create('learned'), ADAPTERS['lora'])


@pytest.mark.parametrize('skipped', ['decay', 'head'])
def test_what_peft_does_not_train_is_seen(skipped, monkeypatch):
    names = peft._trained_in_full
    monkeypatch.setattr(peft, '_trained_in_full', lambda model: [n for n in names(model) if n != skipped])
    with pytest.raises(RuntimeError, match=rf'{skipped}\.\w+ is frozen'):
        add_adapters(create('learned'), ADAPTERS['no biases'])


def test_without_peft_the_message_has_the_command(monkeypatch):
    monkeypatch.setitem(sys.modules, 'peft', None)
    with pytest.raises(ImportError, match=r"pip install 'violin-timm\[peft\]'"):
        add_adapters(create('learned'), ADAPTERS['lora'])
