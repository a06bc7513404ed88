"""VTAB-1K's tasks and folders: what is read, and that whatever is wrong with them is named."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from violin_timm.data.vtab import GROUPS, LENGTHS, SPLITS, TASKS, Split, Task
from violin_timm.engine.config import ConfigError
from violin_timm.engine.stopping import TrainingError

TINY = Task('tiny', 'natural', 3, None)
LISTED = [('images/test/b c.png', 2), ('images/test/a.png', 0), ('images/test/d.png', 1), ('images/more/a.png', 0)]


@pytest.fixture
def folder(tmp_path):
    """A task of four images, of different colours and modes, in two folders."""
    for number, (path, _) in enumerate(LISTED):
        file = tmp_path / 'tiny' / path
        file.parent.mkdir(parents=True, exist_ok=True)
        image = Image.fromarray(np.full((5, 7, 3), 50 * number, np.uint8))
        (image.convert('L') if number == 2 else image).save(file)
    write(tmp_path, [f'{path} {label}' for path, label in LISTED])
    return tmp_path


def write(folder, lines, split='test'):
    (folder / 'tiny' / f'{split}.txt').write_text('\n'.join(lines) + '\n')


def refused(folder, message, task=TINY, split='test'):
    with pytest.raises(ConfigError, match=message.format(file=re.escape(str(folder / task.name / f'{split}.txt')))):
        Split(folder, task, split)


def test_the_tasks_are_the_benchmarks():
    assert len(TASKS) == 19 and all(name == task.name for name, task in TASKS.items())
    groups = [task.group for task in TASKS.values()]
    assert [groups.count(group) for group in GROUPS] == [7, 4, 8] and groups == sorted(groups, key=GROUPS.index)
    assert sum(task.classes for task in TASKS.values()) == 940 and sum(task.test for task in TASKS.values()) == 387905
    assert TASKS['sun397'].classes == 397 and TASKS['smallnorb_azi'] == Task('smallnorb_azi', 'structured', 18, 12150)
    assert SPLITS == ('train800', 'val200', 'train800val200', 'test')
    assert LENGTHS == {'train800': 800, 'val200': 200, 'train800val200': 1000}


def test_items_are_in_the_order_of_the_list(folder):
    data = Split(str(folder), TINY, 'test')
    assert len(data) == 4 and data.labels == [2, 0, 1, 0] and all(type(label) is int for label in data.labels)
    for number in range(4):
        image, label = data[number]
        assert image.mode == 'RGB' and image.size == (7, 5) and label == LISTED[number][1]
        assert np.asarray(image).flatten().tolist() == [50 * number] * 105
    data.transform = np.asarray
    assert data[1][0].shape == (5, 7, 3) and data[1][1] == 0
    assert Split(folder, TINY, 'test', 'L')[0][0].mode == 'L'
    with pytest.raises(IndexError):
        data[4]


def test_lines_as_other_tools_write_them(folder):
    (folder / 'tiny' / 'test.txt').write_bytes(b'images/test/b c.png\t2\r\n\r\nimages/test/a.png  0 \r\n')
    data = Split(folder, TINY, 'test')
    assert data.labels == [2, 0] and data.paths[0].endswith('tiny/images/test/b c.png')


def test_names_in_no_encoding(folder):
    name = b'images/test/\xe9t\xe9.png'
    (folder / 'tiny/images/test/a.png').rename(str(folder / 'tiny') + '/' + name.decode(errors='surrogateescape'))
    (folder / 'tiny' / 'test.txt').write_bytes(name + b' 1\n')
    assert np.asarray(Split(folder, TINY, 'test')[0][0]).max() == 50


def test_links_are_files(folder):
    (folder / 'tiny/images/test/link.png').symlink_to('d.png')
    (folder / 'tiny/images/test/lost.png').symlink_to('none.png')
    write(folder, ['images/test/link.png 1'])
    assert Split(folder, TINY, 'test')[0][1] == 1
    write(folder, ['images/test/link.png 1', 'images/test/lost.png 1'])
    refused(folder, '{file}, line 2: .*lost.png is not there')


@pytest.mark.parametrize(
    ('line', 'message'),
    [
        ('images/test/a.png', r"{file}, line 2: got 'images/test/a.png'; expected a path, a blank and a label"),
        ('images/test/a.png x', r"{file}, line 2: label: got 'x'; expected a number in 0\.\.2"),
        ('images/test/a.png 3', r"{file}, line 2: label: got '3'; expected a number in 0\.\.2"),
        ('images/test/a.png -1', r"{file}, line 2: label: got '-1'; expected"),
        ('images/test/a.png 1.0', r"{file}, line 2: label: got '1\.0'; expected"),
        ('images/test/a.png \N{SUPERSCRIPT TWO}', r"{file}, line 2: label: got '.'; expected"),
        ('images/test/e.png 1', r'{file}, line 2: .*/tiny/images/test/e\.png is not there$'),
        ('images/none/a.png 1', r'{file}, line 2: .*/tiny/images/none/a\.png is not there$'),
        ('images/test 1', r'{file}, line 2: .*/tiny/images/test is not there$'),
    ],
)
def test_lines_that_cannot_be(folder, line, message):
    write(folder, ['images/test/a.png 1', line, 'images/test/d.png 1'])
    refused(folder, message)


def test_the_first_of_several_missing_images_is_named(folder):
    write(folder, ['images/test/z.png 1', 'images/test/a.png 1', 'images/more/z.png 1', 'images/test/e.png 1'])
    refused(folder, r'{file}, line 1: .*/images/test/z\.png is not there \(nor are 2 others\)')


def test_empty_lists(folder):
    write(folder, ['', ' '])
    refused(folder, '{file} is empty')


def test_folders_and_lists_that_are_not_there(folder):
    refused(folder / 'none', "data_dir: got '.*none'; expected the folder that holds the tasks")
    (folder / '.hidden').mkdir()
    refused(folder, "task: got 'dtd', but .* has no such folder, only tiny$", TASKS['dtd'])
    refused(folder, r'split: {file} cannot be read; .*/tiny has the lists test\.txt', split='val200')
    refused(folder, "split: got 'train'; choose from train800, val200, train800val200, test", split='train')


@pytest.mark.parametrize('split', SPLITS)
def test_lists_of_another_length(folder, split):
    task = Task('tiny', 'natural', 3, 30)
    expected = {'train800': 800, 'val200': 200, 'train800val200': 1000, 'test': 30}[split]
    write(folder, ['images/test/a.png 0'] * (expected - 1), split)
    refused(folder, f'{{file}}: got {expected - 1} images; {split} of tiny has {expected}', task, split)
    assert len(Split(folder, TINY, split)) == expected - 1
    write(folder, ['images/test/a.png 0'] * expected, split)
    assert len(Split(folder, task, split)) == expected


@pytest.mark.parametrize('workers', [0, 1])
def test_an_unreadable_image_is_named(folder, workers):
    file = folder / 'tiny/images/test/a.png'
    file.write_bytes(file.read_bytes()[:45])
    data = Split(folder, TINY, 'test')
    data.transform = lambda image: 0
    with pytest.raises(TrainingError, match=rf'{re.escape(str(file))} cannot be read as an image \('):
        list(torch.utils.data.DataLoader(data, num_workers=workers))
