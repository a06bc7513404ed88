"""Linear classifiers on frozen features."""

from types import SimpleNamespace

import pytest
import timm
import torch
from torch import nn

from violin_timm.cli import main
from violin_timm.data.digits import Digits, arrays
from violin_timm.engine.config import ConfigError, settings
from violin_timm.evals import linear, report
from violin_timm.evals.features import Features
from violin_timm.evals.logistic import fit_logistic, logistic_accuracy
from violin_timm.recipes.tables import LINEAR

TINY = {'patch_size': 2, 'embed_dim': 16, 'depth': 3, 'num_heads': 2}


def make(**values):
    base = {'dataset': 'digits', 'device': 'cpu', 'workers': 0, 'in_chans': 1, 'img_size': 8, 'crop_pct': 1.0,
            'mean': [0.3], 'std': [0.4], 'model_kwargs': TINY, 'model': 'violin_dino_small', 'blocks': 2, 'epochs': 3,
            'hflip': 0.0, 'scale': [0.7, 1.0], 'batch_size': 50}  # fmt: skip
    return settings(LINEAR, **{**base, **values})


def pixels(split):
    images, labels = arrays(split)
    return torch.from_numpy(images.reshape(len(images), -1) / 255).float(), torch.from_numpy(labels)


@pytest.mark.parametrize('cost', [0.1, 1.0])
def test_logistic_regression_is_scikit_learns(cost):
    from sklearn.linear_model import LogisticRegression

    features, labels = pixels('train')
    features, labels = features[:300, 20:40], labels[:300]
    weight, bias = fit_logistic(features, labels, 10, cost)
    other = LogisticRegression(C=cost, max_iter=5000, tol=1e-8).fit(features.numpy(), labels.numpy())
    ours = (features @ weight.T + bias).softmax(-1)
    assert torch.allclose(ours, torch.from_numpy(other.predict_proba(features.numpy())).float(), atol=2e-3)


def test_logistic_accuracy_counts():
    top1, top5 = logistic_accuracy(pixels('train'), pixels('test'))
    assert 90 < top1 < 99 and top1 < top5 <= 100
    features = torch.cat([torch.randn(20, 3), torch.ones(20, 1)], dim=1)  # a constant feature divides by no zero
    labels = (features[:, 0] > 0).long()
    assert logistic_accuracy((features, labels), (features, labels), cost=1000.0) == (100.0, 100.0)


@pytest.mark.parametrize('kwargs', [{}, {'class_token': False}])
def test_features_are_those_of_the_last_blocks(kwargs):
    model = timm.create_model('violin_dino_small', num_classes=0, img_size=8, in_chans=1, **TINY, **kwargs).eval()
    images = torch.randn(2, 1, 8, 8)
    x, positions, masks = model._embed(images)
    taken = []
    for block, mask in zip(model.blocks, masks):
        x = block(x, positions=positions, mask=mask)
        taken.append(model.norm(x))
    tokens = [y.mean(1) if kwargs else y[:, 0] for y in taken[-2:]]
    assert torch.allclose(Features(model, 2)(images), torch.cat(tokens, 1), atol=1e-5)
    assert torch.allclose(Features(model)(images), tokens[-1], atol=1e-5)
    if not kwargs:
        tokens.append(taken[-1][:, 1:].mean(1))
    assert torch.allclose(Features(model, 2, True)(images), torch.cat(tokens, 1), atol=1e-5)
    with pytest.raises(ConfigError, match='blocks: got 4; ViolinVisionTransformer has 3'):
        Features(model, 4)


def test_head_starts_small():
    head = linear.create_head(400, 100)
    assert head.weight.std().item() == pytest.approx(0.01, rel=0.05) and not head.bias.any()


class Flat(nn.Module):
    """A backbone whose features are the pixels."""

    def __init__(self):
        super().__init__()
        self.pretrained_cfg = {'input_size': (1, 8, 8), 'mean': (0.3,), 'std': (0.4,)}

    def forward(self, images):
        return images.flatten(1)


def test_sgd_learns(monkeypatch):
    monkeypatch.setattr(linear, 'load_backbone', lambda *args: Flat())
    first = linear.run(make(lr=0.1, blocks=1))
    assert first[0] > 75 and first[1] > first[0]
    assert linear.run(make(lr=0.1, blocks=1)) == first
    assert linear.run(make(lr=1e-9, blocks=1, epochs=1))[0] < 40


def test_the_backbone_stays_as_it_is(monkeypatch):
    seen, real = [], linear.load_backbone

    def load(*args):
        model = real(*args)
        seen.append((model, {k: v.clone() for k, v in model.state_dict().items()}))
        return model

    monkeypatch.setattr(linear, 'load_backbone', load)
    linear.run(make(epochs=1))
    ((model, before),) = seen
    assert not model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_command(tmp_path, capsys):
    table = str(tmp_path / 'table.json')
    kwargs = [f'{key}={value}' for key, value in TINY.items()]
    argv = ['linear', '--model', 'vit_small_patch16_224', '--model-kwargs', *kwargs, '--dataset', 'digits',
            '--img-size', '8', '--in-chans', '1', '--mean', '0.3', '--std', '0.4', '--crop-pct', '1', '--device', 'cpu',
            '--workers', '0', '--closed', '--blocks', '1', '--patch-mean', '--val-split', 'test',
            '--results', table]  # fmt: skip
    assert main([*argv, '--table', '--title', 'untrained']) == 0
    ((name, of, where, top1, top5),) = report.read(table)
    assert (name, of, where) == ('logistic, 1 block(s) + patches', 'untrained', 'train -> test')
    assert 25 < top1 < top5 <= 100
    assert capsys.readouterr().out.splitlines()[-2].split() == ['evaluation', 'of', 'on', 'top-1', '%', 'top-5', '%']
    assert main([*argv, '--blocks', '9']) == 2


def test_classes_are_counted():
    assert linear.count_classes(Digits('test')) == 10

    folder = SimpleNamespace(reader=SimpleNamespace(class_to_idx={'a': 0, 'b': 1}))
    assert linear.count_classes(folder) == 2
    with pytest.raises(ConfigError, match='num_classes: this data set does not tell'):
        linear.count_classes(object())
