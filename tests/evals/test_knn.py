"""k-NN on frozen features, and how checkpoints become backbones."""

import json
import subprocess
import sys

import pytest
import timm
import torch
from safetensors.torch import load_file

from violin_timm.cli import main
from violin_timm.engine.config import PACKAGE, ConfigError, settings
from violin_timm.engine.distributed import World
from violin_timm.evals import features, knn, report
from violin_timm.recipes.tables import KNN

TINY = {'patch_size': 2, 'embed_dim': 16, 'depth': 2, 'num_heads': 2}
CPU = World(torch.device('cpu'))


def make(**values):
    base = {'dataset': 'digits', 'device': 'cpu', 'workers': 0, 'in_chans': 1, 'img_size': 8, 'crop_pct': 1.0,
            'mean': [0.3], 'std': [0.4], 'k': [5], 'model_kwargs': TINY}  # fmt: skip
    return settings(KNN, **{**base, **values})


def test_recorded_accuracies(golden):
    tensors = load_file(golden('dino_training_authors.safetensors'))
    about = json.loads(golden('dino_training_authors.json').read_text())['knn']
    sets = [(tensors[f'knn/{name}'], tensors[f'knn/{name}_labels']) for name in ('train', 'test')]
    found = knn.knn_accuracy(*sets, [int(k) for k in about['top1_top5']], about['temperature'])
    assert {str(k): pytest.approx(list(v), abs=1e-5) for k, v in found.items()} == about['top1_top5']


def by_hand(gallery, queries, k, temperature):
    """One query after the other."""
    right = []
    for feature, label in zip(*queries):
        similarity = torch.cosine_similarity(feature[None], gallery[0])
        order = similarity.argsort(descending=True)[:k]
        counted = {}
        for index in order.tolist():
            own = gallery[1][index].item()
            counted[own] = counted.get(own, 0) + torch.exp(similarity[index] / temperature).item()
        right.append(max(counted, key=counted.get) == label.item())
    return 100 * sum(right) / len(right)


@pytest.mark.parametrize('k', [1, 7, 30, 50])
def test_blocks_change_nothing(monkeypatch, k):
    gallery, queries = (torch.randn(30, 4) * 3, torch.arange(30) % 3), (torch.randn(25, 4), torch.arange(25) % 3)
    whole = knn.knn_accuracy(gallery, queries, [k], 0.5)[k]
    monkeypatch.setattr(knn, 'QUERY_BLOCK', 4)
    monkeypatch.setattr(knn, 'GALLERY_BLOCK', 7)
    assert knn.knn_accuracy(gallery, queries, [k], 0.5)[k] == whole
    assert whole == (pytest.approx(by_hand(gallery, queries, min(k, 30), 0.5)), 100)  # top-5 of three classes


def test_nearest_images_across_blocks(monkeypatch):
    monkeypatch.setattr(knn, 'GALLERY_BLOCK', 3)
    monkeypatch.setattr(knn, 'QUERY_BLOCK', 2)
    gallery, queries = torch.randn(10, 4), torch.randn(5, 4)
    similarity, index = knn.nearest_images(queries, gallery, 6)
    expected = (queries @ gallery.T).topk(6)
    assert torch.equal(index, expected.indices) and torch.allclose(similarity, expected.values)


def test_low_temperature_does_not_overflow():
    similarity, labels = torch.tensor([[1.0, 0.9, 0.9]]), torch.tensor([[0, 1, 1]])
    counted = knn.votes(similarity, labels, 4, 1e-3)
    assert counted.isfinite().all() and counted.argmax() == 0
    assert knn.votes(similarity, labels, 4, 10.0).argmax() == 1


def test_rows_of_processes_are_put_in_order(monkeypatch):
    """Three processes, seven images: the sampler fills up with repeats."""
    rows = torch.arange(7.0)[:, None]
    parts = [torch.cat([rows[r::3], rows[:1]])[:3] for r in range(3)]

    def gather(into, mine):
        for own, part in zip(into, parts):
            own.copy_(part)

    monkeypatch.setattr(features.dist, 'all_gather', gather)
    for rank in range(3):
        found = features._in_order(parts[rank], 7, World(torch.device('cpu'), rank, 3))
        assert torch.equal(found, rows)


def test_pixels_are_the_pixels():
    pixels = torch.rand(2, 3, 4, 4)
    config = {'mean': (0.2, 0.3, 0.4), 'std': (0.5, 0.6, 0.7)}
    mean, std = (torch.tensor(config[key]).view(-1, 1, 1) for key in ('mean', 'std'))
    assert torch.allclose(features.Pixels(config)((pixels - mean) / std), pixels.flatten(1), atol=1e-6)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory):
    """Of the recipe's layout: an untrained student, and another one as its teacher."""
    states = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = timm.create_model('violin_dino_small', num_classes=0, img_size=8, in_chans=1, **TINY)
        states.append(model.state_dict())
    path = tmp_path_factory.mktemp('dino') / 'last.pth.tar'
    args = {'model': 'violin_dino_small', 'model_kwargs': TINY, 'img_size': 8, 'in_chans': 1, 'dataset': 'digits',
            'mean': [0.3], 'std': [0.4], 'crop_pct': 1.0}  # fmt: skip
    state = {'arch': 'violin_dino_small', 'args': args, 'state_dict': states[0], 'state_dict_ema': states[1]}
    torch.save({**state, 'task_state': {'head': {}}}, path)
    return path, states


def backbone_of(**values):
    args = settings(KNN, **{'device': 'cpu', **values})
    loaded = features.inherit(args)
    return features.load_backbone(args, loaded, CPU), args


def test_untrained_is_what_its_training_began_with(tmp_path):
    from violin_timm.recipes import dino
    from violin_timm.recipes.tables import DINO

    values = {'model': 'violin_dino_small', 'model_kwargs': {**TINY, 'dynamic_img_size': True}, 'img_size': 8,
              'in_chans': 1, 'dataset': 'digits', 'device': 'cpu', 'workers': 0, 'batch_size': 500, 'epochs': 1,
              'out_dim': 8, 'warmup_epochs': 0, 'local_size': [4], 'local_number': [1], 'lr': 1e-12, 'seed': 5,
              'weight_decay': 0.0,
              'weight_decay_end': 0.0, 'min_lr': 0.0, 'head_hidden_dim': 8, 'output': str(tmp_path)}  # fmt: skip
    folder = dino.run(settings(DINO, **values))['folder']
    trained, _ = backbone_of(checkpoint=str(folder / 'last.pth.tar'), weights='student')
    fresh, _ = backbone_of(checkpoint=str(folder / 'last.pth.tar'), weights='untrained')
    for a, b in zip(trained.parameters(), fresh.parameters()):
        assert torch.allclose(a, b, atol=1e-9)


def test_checkpoint_says_everything(checkpoint):
    path, states = checkpoint
    for weights, state in (('student', states[0]), ('teacher', states[1])):
        model, args = backbone_of(checkpoint=str(path), weights=weights)
        assert not model.training and not any(p.requires_grad for p in model.parameters())
        for key, value in model.state_dict().items():
            assert torch.equal(value, state[key])
    assert (args.dataset, args.mean, args.crop_pct, args.img_size) == ('digits', [0.3], 1.0, 8)
    model, _ = backbone_of(checkpoint=str(path), img_size=12)  # positions resampled
    assert model.patch_embed.grid_size == (6, 6)


@pytest.mark.parametrize(
    'wrap',
    [
        lambda state: state,
        lambda state: {'model': state},
        lambda state: {'teacher': {f'module.backbone.{k}': v for k, v in state.items()} | {'head.x': torch.ones(1)}},
        lambda state: {'state_dict': {f'module.{k}': v for k, v in state.items()}},
    ],
    ids=['bare', 'model', 'DINO', 'DDP'],
)
@pytest.mark.parametrize('name', ['violin_dino_small', 'vit_small_patch16_224'])
def test_layouts(tmp_path, wrap, name):
    source = timm.create_model(name, num_classes=10, img_size=8, in_chans=1, **TINY)
    torch.save(wrap(source.state_dict()), tmp_path / 'x.pth')
    given = {'checkpoint': str(tmp_path / 'x.pth'), 'model': name, 'img_size': 8, 'in_chans': 1, 'model_kwargs': TINY}
    model, _ = backbone_of(**given)
    assert len(model.state_dict()) == len(source.state_dict()) - 2
    for key, value in model.state_dict().items():
        assert torch.equal(value, source.state_dict()[key]), key


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path, checkpoint):
    plain = timm.create_model('vit_small_patch16_224', num_classes=0, img_size=8, in_chans=1, **TINY)
    state = plain.state_dict()
    state.pop('norm.weight')
    torch.save(state, tmp_path / 'short.pth')
    torch.save({**plain.state_dict(), 'more': torch.ones(1)}, tmp_path / 'long.pth')
    given = {'img_size': 8, 'in_chans': 1, 'model_kwargs': TINY}
    for name, part in (('short', 'norm.weight'), ('long', 'more')):
        for model in ('vit_small_patch16_224', 'violin_dino_small'):
            with pytest.raises(ConfigError, match=part):
                backbone_of(checkpoint=str(tmp_path / f'{name}.pth'), model=model, **given)
    with pytest.raises(ConfigError, match='decay'):  # a Violin's masks do not fit a plain model
        backbone_of(checkpoint=str(checkpoint[0]), model='vit_small_patch16_224', **given)
    with pytest.raises(ConfigError, match='no such file'):
        backbone_of(checkpoint=str(tmp_path / 'none.pth'))
    with pytest.raises(ConfigError, match='names none; give --model'):
        backbone_of(checkpoint=str(tmp_path / 'short.pth'))
    with pytest.raises(ConfigError, match='model: none is given'):
        backbone_of()


def test_command(checkpoint, tmp_path, capsys):
    path, table = str(checkpoint[0]), tmp_path / 'deep' / 'table.json'
    argv = ['knn', '--checkpoint', path, '--device', 'cpu', '--workers', '0', '--k', '5', '2000', '--pixels',
            '--results', str(table), '--title', 'ours']  # fmt: skip
    assert main(argv) == 0
    rows = {row[:2]: row for row in report.read(table)}
    assert set(rows) == {(k, of) for k in ('5-NN', '2000-NN') for of in ('ours', 'raw pixels')}
    assert rows['5-NN', 'raw pixels'][3] > 95 > rows['5-NN', 'ours'][3] > 20
    assert main([*argv, '--table', '--weights', 'student']) == 0
    printed = capsys.readouterr().out
    assert len(report.read(table)) == 4 and 'evaluation  of' in printed.splitlines()[-5]
    assert {row[:2]: row for row in report.read(table)}['5-NN', 'ours'] != rows['5-NN', 'ours']
    assert main(['knn', '--checkpoint', str(tmp_path / 'none')]) == 2
    assert main(['knn', '--kk', '5']) == 2


def test_untrained_models_are_measured_too():
    found = knn.run(make(model='vit_small_patch16_224', query_split='test'))
    assert 20 < found['features'][5][0] < 100


def test_two_processes_find_the_same(checkpoint, tmp_path):
    argv = ['knn', '--checkpoint', str(checkpoint[0]), '--device', 'cpu', '--workers', '0', '--k', '5', '--results']
    launch = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc-per-node', '2']
    done = subprocess.run(
        [*launch, '-m', 'violin_timm', *argv, str(tmp_path / '2.json')],
        cwd=PACKAGE.parent, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert main([*argv, str(tmp_path / '1.json')]) == 0
    assert report.read(tmp_path / '1.json') == report.read(tmp_path / '2.json')
