"""Generated tasks on disk: what is written is what is read, whoever else writes or is killed."""

import json
import multiprocessing
import os
import threading

import numpy as np
import pytest
from PIL import Image

from violin_timm.data import generated
from violin_timm.data.digits import arrays
from violin_timm.data.generated import GENERATED, ensure, find_task
from violin_timm.data.shapes import draw
from violin_timm.data.vtab import GROUPS, LENGTHS, SPLITS, TASKS, Split
from violin_timm.engine.config import ConfigError


@pytest.fixture
def few(monkeypatch):
    """Splits of a few images, since drawing thousands takes a while."""
    monkeypatch.setattr(generated, 'LENGTHS', {'train800': 8, 'val200': 4, 'train800val200': 12})


def contents(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob('*') if path.is_file()}


@pytest.mark.parametrize('name', [name for name in GENERATED if name != 'digits'])
def test_a_drawn_task_is_read_as_it_was_drawn(tmp_path, few, name):
    ensure(tmp_path / 'new', name, 16, seed=3, test=5)
    for split, length in (('train800', 8), ('val200', 4), ('test', 5)):
        data = Split(tmp_path / 'new', GENERATED[name], split)
        assert len(data) == length
        for index in range(length):
            expected, label = draw(name, 3, index, 16, split)
            assert np.array_equal(data[index][0], expected) and data[index][1] == label
    joined, parts = (
        [Split(tmp_path / 'new', GENERATED[name], split).paths for split in some]
        for some in (['train800val200'], ['train800', 'val200'])
    )
    assert joined[0] == parts[0] + parts[1]
    spec = json.loads((tmp_path / 'new' / name / 'task.json').read_text())
    assert spec == {'name': name, 'size': 16, 'seed': 3, 'test': 5, 'format': generated.FORMAT}
    assert os.listdir(tmp_path / 'new') == [name]


def test_the_digits_are_all_there_once(tmp_path):
    ensure(tmp_path, 'digits', 8, seed=1, test=5)
    splits = {split: Split(tmp_path, GENERATED['digits'], split, 'L') for split in SPLITS}
    assert [len(data) for data in splits.values()] == [800, 200, 1000, 797]
    images, labels = (np.concatenate(some) for some in zip(*(arrays(s, 1) for s in ('train', 'validation', 'test'))))
    read = [item for split in ('train800', 'val200', 'test') for item in splits[split]]  # eight pixels stay eight
    assert np.array_equal(np.stack([np.asarray(image) for image, _ in read]), images)
    assert [label for _, label in read] == labels.tolist()
    assert splits['train800val200'].labels == labels[:1000].tolist()
    assert json.loads((tmp_path / 'digits' / 'task.json').read_text())['test'] == 797
    ensure(tmp_path, 'digits', 8, seed=1, test=6)


def test_digits_of_another_size(tmp_path, few):
    ensure(tmp_path, 'digits', 20)
    with Image.open(tmp_path / 'digits/images/test/00000.png') as image:
        source = Image.fromarray(arrays('validation', 0)[0][0])  # the first of the test split is number 1000
        assert image.mode == 'RGB'
        assert np.array_equal(image.convert('L'), source.resize((20, 20), Image.Resampling.BICUBIC))


def test_what_is_there_is_left_alone(tmp_path, few, monkeypatch):
    ensure(tmp_path, 'shapes_count', 16, test=3)
    before = contents(tmp_path)
    (tmp_path / 'shapes_count/images/test/00000.png').write_bytes(b'mine')
    monkeypatch.setattr(generated, 'draw', None)  # nor drawn in vain
    ensure(tmp_path, 'shapes_count', 16, test=3)
    after = contents(tmp_path)
    assert after.pop('shapes_count/images/test/00000.png') == b'mine'
    assert after.items() < before.items()


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        ({'size': 20}, 'size 16, not 20; take another folder'),
        ({'seed': 1}, 'seed 0, not 1; take another folder'),
        ({'test': 4, 'seed': 2}, 'seed 0, not 2, test 3, not 4; take'),
    ],
)
def test_another_task_of_that_name_is_there(tmp_path, few, values, message):
    ensure(tmp_path, 'shapes_count', 16, test=3)
    with pytest.raises(ConfigError, match=f'data_dir: .*shapes_count has {message}'):
        ensure(tmp_path, 'shapes_count', **{'size': 16, 'test': 3, **values})


def test_another_format_or_a_folder_of_someone_else(tmp_path, few, monkeypatch):
    ensure(tmp_path, 'shapes_count', 16, test=3)
    monkeypatch.setattr(generated, 'FORMAT', 99)
    with pytest.raises(ConfigError, match=r'shapes_count has format \d+, not 99; take another folder'):
        ensure(tmp_path, 'shapes_count', 16, test=3)
    for text in (None, '', '[]', '{}'):
        file = tmp_path / 'shapes_count' / 'task.json'
        file.unlink() if text is None else file.write_text(text)
        with pytest.raises(ConfigError, match=r'shapes_count is there, but task\.json does not say what it holds'):
            ensure(tmp_path, 'shapes_count', 16, test=3)


def test_a_failure_leaves_nothing(tmp_path, few, monkeypatch):
    def stop(*args):
        if args[2] == 3:
            raise KeyboardInterrupt
        return draw(*args)

    monkeypatch.setattr(generated, 'draw', stop)
    with pytest.raises(KeyboardInterrupt):
        ensure(tmp_path, 'shapes_count', 16, test=3)
    assert not os.listdir(tmp_path)


def test_a_kill_leaves_no_task(tmp_path, few, monkeypatch):
    """And the next process writes it as if nothing had been."""

    def die(*args):
        return draw(*args) if args[4] != 'test' else os._exit(9)

    with monkeypatch.context() as patch:
        patch.setattr(generated, 'draw', die)
        process = multiprocessing.get_context('fork').Process(target=ensure, args=(tmp_path, 'shapes_count', 16, 0, 3))
        process.start()
        process.join(60)
    assert process.exitcode == 9 and len(os.listdir(tmp_path)) == 1
    with pytest.raises(ConfigError, match=r"task: got 'shapes_count', but .* only none"):
        Split(tmp_path, GENERATED['shapes_count'], 'test')
    ensure(tmp_path, 'shapes_count', 16, test=3)
    assert len(Split(tmp_path, GENERATED['shapes_count'], 'test')) == 3


def test_several_at_once(tmp_path, few):
    """Each has drawn all before the first one is in place."""
    together, failures = threading.Barrier(3), []
    rename = os.rename

    def wait(*args):
        together.wait(60)
        rename(*args)

    def run():
        try:
            ensure(tmp_path, 'shapes_location', 16, test=3)
        except BaseException as err:
            failures.append(err)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(generated.os, 'rename', wait)
        threads = [threading.Thread(target=run) for _ in range(3)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
    assert not failures and os.listdir(tmp_path) == ['shapes_location']
    assert len(Split(tmp_path, GENERATED['shapes_location'], 'train800')) == 8


@pytest.mark.parametrize(
    ('values', 'message'),
    [
        (('digit', 28), "task: got 'digit'; did you mean digits?"),
        (('cifar', 28), "task: got 'cifar'; choose from digits, shapes_count"),
        (('digits', 7), 'size: got 7; expected at least 8'),
        (('digits', 28, -1), 'seed: got -1; expected at least 0'),
        (('shapes_count', 28, 0, 0), 'test: got 0; expected at least 1'),
    ],
)
def test_tasks_that_cannot_be(tmp_path, values, message):
    with pytest.raises(ConfigError, match=message):
        ensure(tmp_path, *values)
    assert not os.listdir(tmp_path)


def test_a_root_that_cannot_be(tmp_path):
    (tmp_path / 'file').write_text('')
    with pytest.raises(ConfigError, match=r'data_dir: .*file/digits cannot be written'):
        ensure(tmp_path / 'file', 'digits', 8)


def test_tasks_by_name():
    assert find_task('dtd') is TASKS['dtd'] and find_task('digits') is GENERATED['digits']
    assert not set(TASKS) & set(GENERATED) and all(task.group in GROUPS for task in GENERATED.values())
    assert all(name == task.name for name, task in GENERATED.items())
    with pytest.raises(ConfigError, match=r"task: got 'clevr_dits'; did you mean clevr_dist"):
        find_task('clevr_dits')
    with pytest.raises(ConfigError, match=r"task: got 'xyz'; choose from caltech101, cifar, .*, digits"):
        find_task('xyz')
    assert LENGTHS.keys() < set(SPLITS)
