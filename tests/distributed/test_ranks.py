"""One process or many: the same gradients, weights and metrics, every image counted once, files made once.

The processes are torchrun's, on the CPU. What each of them does is below, in `worker`; what it finds is left in a file.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from violin_timm.data import datasets
from violin_timm.engine import distributed
from violin_timm.engine.config import ConfigError, settings
from violin_timm.engine.distributed import World
from violin_timm.recipes import supervised

ROOT = Path(__file__).parents[2]
LONG = 500  # seconds that a process may take on a busy machine
CONFIG = {'input_size': (1, 8, 8), 'mean': (0.5,), 'std': (0.5,), 'interpolation': 'bicubic', 'crop_pct': 1.0,
          'crop_mode': 'center'}  # fmt: skip


def make(output, experiment, **values):
    base = {
        'model': 'violin_pixel_nano', 'model_kwargs': {'depth': 1, 'embed_dim': 16, 'num_heads': 2}, 'device': 'cpu',
        'dataset': 'digits', 'batch_size': 100, 'workers': 0, 'epochs': 1, 'warmup_epochs': 0, 'opt': 'momentum',
        'lr': 0.05, 'weight_decay': 0.0, 'no_aug': True, 'output': str(output), 'experiment': experiment,
    }  # fmt: skip
    return settings(**{**base, **values})


class Few:
    """The first images of a data set, in the order of `order`."""

    def __init__(self, data, order):
        self.data, self.order, self.transform = data, order, None

    def __len__(self):
        return len(self.order)

    def __getitem__(self, index):
        image, label = self.data[self.order[index]]
        return self.transform(image), label


def step(output, world, indices, experiment):
    """Gradients and weights after one update on the images of `indices`."""
    args = make(output, experiment, batch_size=len(indices), clip_grad=1.0)
    parts = supervised.prepare(args, world)
    data = datasets.create_dataset(args, 'train', 1, True)
    images = torch.stack([CONVERT(data[i][0]) for i in indices])
    targets = torch.tensor([data[i][1] for i in indices])
    found, real = {}, parts.stepper.optimizer.step

    def spy():
        found.update({f'grad {k}': p.grad.clone() for k, p in parts.model.named_parameters()})
        real()

    parts.stepper.optimizer.step = spy
    head = parts.model.head.weight  # zero to begin with, so that nothing below would have a gradient
    torch.nn.init.normal_(head, generator=torch.Generator().manual_seed(1))
    parts.task.get_trainable_module().train()
    parts.stepper.backward(parts.task(images, targets)['loss'], True)
    return {**found, **{k: v.clone() for k, v in parts.model.state_dict().items()}}


def CONVERT(image):
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, 8, 8) / 127.5 - 1


def accuracy(output, world, counts):
    """Metrics of the fresh model on 13 images."""
    args = make(output, 'thirteen')
    parts = supervised.prepare(args, world)
    data = Few(datasets.create_dataset(args, 'validation', 1), list(range(13)))
    parts.validation = datasets.evaluation_batches(make(output, '', batch_size=4), data, CONFIG, world)
    create = parts.task.create_evaluator

    def spy(**kwargs):
        counts.append(evaluator := create(**kwargs))
        return evaluator

    parts.task.create_evaluator = spy
    return parts.evaluate(parts.model, parts.validation)


def repeated(world, size, repeats, seed=0):
    """Images of two epochs, as this process sees them."""
    args = make('', '', batch_size=1, aug_repeats=repeats, seed=seed)
    data = Few(datasets.create_dataset(args, 'train', 1, True), list(range(size)))
    batches = datasets.training_batches(args, data, CONFIG, 10, world)
    epochs = []
    for epoch in range(2):
        batches.set_epoch(epoch)
        epochs.append([int(i) for i in batches.loader.sampler])
    return epochs


def worker(output):
    """What each of the two processes does, and then only one of them fails to get a finite loss."""
    world = distributed.start('cpu')  # once, for all runs: torchrun's store knows one group per start
    stop, distributed.start, distributed.stop = distributed.stop, lambda device: world, lambda world: None
    mine, counts = list(range(20))[world.rank :: 2], []
    found = {'step': step(output, world, mine, 'step'), 'metrics': accuracy(output, world, counts)}
    found['counted'] = int(counts[0].counts[0])
    found['repeats'] = {str(key): repeated(world, *key) for key in ((300, 3), (300, 1.5), (5, 3), (300, 3, 1))}

    def download():
        made = output / 'downloaded'
        if made.exists():
            return 'found'
        time.sleep(0.3)  # long enough for the other to come here, were it let
        made.write_text('data')
        return 'made'

    found['turn'] = distributed.in_turn(download, world)
    found['any'] = distributed.any_of([world.rank == 1, False], world)
    found['gathered'] = distributed.gather(world.rank, world)
    torch.save(found, output / f'rank{world.rank}.pt')

    result = supervised.run(make(output, 'whole', epochs=2, batch_size=50))
    forward = supervised.build.ClassificationTask.forward

    def broken(self, images, targets):
        result = forward(self, images, targets)
        return {'loss': result['loss'] * (float('nan') if world.rank == 1 else 1)}

    supervised.build.ClassificationTask.forward = broken
    try:
        supervised.run(make(output, 'whole', epochs=3, batch_size=50, resume='auto'))
    except supervised.TrainingError as err:
        (output / f'error{world.rank}').write_text(str(err))
    (output / f'result{world.rank}').write_text(json.dumps({**result, 'folder': str(result['folder'])}))
    stop(world)


def environment():
    return {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': str(ROOT), 'CUDA_VISIBLE_DEVICES': ''}


def torchrun(*arguments):
    command = [sys.executable, '-m', 'torch.distributed.run', *map(str, arguments)]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def tell_and_end(node, nodes, output):
    """What an agent printed. Both workers done, one can wait five minutes for one that has left its exit barrier."""
    for _ in range(LONG):
        try:
            return node.communicate(timeout=1)[0]
        except subprocess.TimeoutExpired:
            done = all((output / f'result{rank}').exists() for rank in range(2))
            if done and any(other.poll() is not None for other in nodes):
                node.kill()  # within the barrier it does not look at signals
    node.kill()
    return node.communicate()[0]


@pytest.fixture(scope='module')
def two(tmp_path_factory):
    """What two processes found, started by two torchruns as on two machines; and their folder."""
    output = tmp_path_factory.mktemp('two')
    with socket.socket() as free:
        free.bind(('localhost', 0))
        port = free.getsockname()[1]
    each = ['--nnodes', 2, '--nproc-per-node', 1, '--rdzv-backend', 'c10d', '--rdzv-endpoint', f'localhost:{port}']
    nodes = [torchrun(*each, '--rdzv-id', 'test', '--local-addr', 'localhost', __file__, output) for _ in range(2)]
    said = [tell_and_end(node, nodes, output) for node in nodes]
    assert all((output / f'result{rank}').exists() for rank in range(2)), '\n'.join(said)
    return [torch.load(output / f'rank{rank}.pt') for rank in range(2)], output


CPU = World(torch.device('cpu'))


def test_gradients_and_weights_are_those_of_one_process(two, tmp_path):
    """The same 20 images, 10 on each of two processes."""
    alone = step(tmp_path, CPU, list(range(20)), 'step')
    for found in two[0]:
        assert found['step'].keys() == alone.keys()
        for key, value in alone.items():
            assert torch.allclose(found['step'][key], value, atol=1e-5, rtol=1e-5), key
    masks = [value for key, value in alone.items() if key.startswith('grad ') and '.decay.' in key]
    assert masks and all(value.abs().max() > 1e-6 for value in masks)
    # the halves differ from the whole, so the agreement is not that of a model that never learns
    half = step(tmp_path, CPU, list(range(0, 20, 2)), 'half')
    assert not torch.allclose(half['grad head.weight'], alone['grad head.weight'], atol=1e-4)


def test_validation_counts_each_image_once(two, tmp_path):
    alone = accuracy(tmp_path, CPU, counts := [])
    assert int(counts[0].counts[0]) == 13 and 0 < alone['top5'] < 100
    assert [found['counted'] for found in two[0]] == [7, 6]
    for found in two[0]:
        assert found['metrics']['top1'] == alone['top1'] and found['metrics']['top5'] == alone['top5']
        assert found['metrics']['loss'] == pytest.approx(alone['loss'], abs=1e-5)


@pytest.mark.parametrize('key', [(300, 3), (300, 1.5), (5, 3)])
def test_repeated_augmentation_has_an_epoch_of_the_usual_length(two, key):
    """As many views as images, the same ones `repeats` times, whatever the size of the set."""
    size, repeats = key
    ranks = [found['repeats'][str(key)] for found in two[0]]
    for epoch in range(2):
        shares = [rank[epoch] for rank in ranks]
        assert [len(share) for share in shares] == [-(-size // 2)] * 2
        views = [image for pair in zip(*shares) for image in pair]
        times = {image: views.count(image) for image in views}
        assert max(times.values()) == -(-repeats // 1) and len(times) == -(-len(views) // repeats)
    assert ranks[0][0] != ranks[0][1]  # another third in the next epoch


def test_repeated_augmentation_follows_the_seed(two):
    assert two[0][0]['repeats'][str((300, 3))][0] != two[0][0]['repeats'][str((300, 3, 1))][0]


def test_repeated_augmentation_refuses_a_part():
    with pytest.raises(ConfigError, match=r'aug_repeats: got 0.5; expected 0 for none, or at least 1'):
        repeated(CPU, 10, 0.5)


def test_one_process_makes_the_files(two):
    assert [found['turn'] for found in two[0]] == ['made', 'found']
    assert distributed.in_turn(lambda: 'made', CPU) == 'made'


def test_processes_agree(two):
    assert [found['any'] for found in two[0]] == [[True, False]] * 2
    assert [found['gathered'] for found in two[0]] == [[0, 1]] * 2
    assert distributed.any_of([True, False], CPU) == [True, False] and distributed.gather(5, CPU) == [5]


def test_two_processes_train_as_one(two, tmp_path):
    """Other batches, so other numbers; but one folder, one row an epoch, and learning."""
    output = two[1]
    results = [json.loads((output / f'result{rank}').read_text()) for rank in range(2)]
    assert results[0]['folder'] == str(output / 'whole') and results[1]['folder'] == 'None'
    assert results[0]['validation'] == results[1]['validation']
    assert [path.name for path in output.iterdir() if path.is_dir()] == ['whole']
    assert len((output / 'whole' / 'summary.csv').read_text().split()) == 3


def test_a_loss_that_is_no_number_on_one_process_stops_all(two):
    output = two[1]
    said = [(output / f'error{rank}').read_text() for rank in range(2)]
    assert said[0].endswith(f'Last good checkpoint: {output / "whole" / "last.pth.tar"}')
    assert all('in epoch 3, update 21, batch 1' in message for message in said) and 'loss is nan' in said[1]


if __name__ == '__main__':
    worker(Path(sys.argv[1]))
