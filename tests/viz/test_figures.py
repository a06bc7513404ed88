"""Figures: what is on them, for every kind of mask, and the command that writes them."""

import itertools
import subprocess
import sys

import numpy as np
import pytest
import timm
import torch

import violin_timm  # noqa: F401
from violin_timm.models import convert, files
from violin_timm.viz import command, curves, draw_curve, draw_figure, draw_mask, masks, training_figure

Figure = pytest.importorskip('matplotlib.figure').Figure
image, text_class = pytest.importorskip('matplotlib.image'), pytest.importorskip('matplotlib.text').Text

TINY = dict(img_size=8, patch_size=2, embed_dim=16, depth=2, num_heads=2)


def model(**kwargs):
    return timm.create_model('violin_pixel_nano', **{**TINY, **kwargs})


def texts(figure):
    """Every text that is drawn, in sections too."""
    return [text.get_text() for text in figure.findobj(match=lambda artist: hasattr(artist, 'get_text'))]


def size(path):
    """Width and height of a PNG, from its header."""
    data = path.read_bytes()
    assert data[:8] == b'\x89PNG\r\n\x1a\n'
    return int.from_bytes(data[16:20], 'big'), int.from_bytes(data[20:24], 'big')


# panels and colour bars: curves, masks, alpha, half-lives, weights
@pytest.mark.parametrize(
    'kwargs, axes',
    [
        ({}, (8 + 1) + (2 + 1) + (1 + 1) + (2 + 1)),
        ({'alpha': 'none'}, (8 + 1) + (2 + 1) + (2 + 1)),
        ({'curves': 'hilbert'}, (1 + 1) + (2 + 1) + (1 + 1) + (1 + 1)),
        ({'curves': 'hilbert,manhattan'}, (2 + 1) + (2 + 1) + (1 + 1) + (2 + 1)),
        ({'geometry': 'manhattan'}, (1 + 1) + (2 + 1) + (1 + 1) + (1 + 1)),
        ({'geometry': 'random', 'num_random': 10}, (10 + 1) + (2 + 1) + (1 + 1) + (2 + 1)),
        ({'mask': 'fixed'}, (8 + 1) + (2 + 1) + (1 + 1)),
        ({'mask': 'none'}, 1 + 1),
        ({'mask': 'none', 'alpha': 'none'}, 0),
        ({'curve_weights': 'learned'}, (8 + 1) + (2 + 1) + (1 + 1) + (2 + 1) + (2 + 1)),
        ({'mask_init': 'finetune'}, (8 + 1) + (2 + 1) + (1 + 1) + (2 + 1)),
        ({'class_token': True, 'strategy': 'add_v1'}, (8 + 1) + (2 + 1) + (1 + 1) + (2 + 1)),
    ],
)
def test_every_kind_of_mask_has_its_panels(kwargs, axes):
    net = model(**kwargs)
    figure = draw_figure(net)
    assert sum(ax.axison for ax in figure.axes) == axes
    said = texts(figure)
    for name in net.curve_names.split(','):
        assert name in said
    assert any("mask='none'" in text for text in said) == (kwargs.get('mask') == 'none')
    assert any('The mask is fixed: gamma = 0.9996' in text for text in said) == (kwargs.get('mask') == 'fixed')
    assert ('alpha' in said) == (kwargs.get('alpha') != 'none')


@pytest.mark.parametrize('kwargs, most', [({}, 1100), ({'curves': 'hilbert'}, 800), ({'mask': 'none'}, 400)])
def test_file_is_a_picture_of_the_right_size(kwargs, most, tmp_path):
    path = training_figure(model(**kwargs), tmp_path / 'figure.png')
    width, height = size(path)
    assert path == tmp_path / 'figure.png' and width == 1600 and 100 < height < most
    assert float(image.imread(path).std()) > 0.05  # not blank


def test_no_text_overlaps_another():
    figure = draw_figure(model(num_heads=4, depth=4))
    figure.draw_without_rendering()
    boxes = [
        (text.get_text(), text.get_window_extent())
        for text in figure.findobj(match=text_class)
        if text.get_visible() and text.get_text().strip()
    ]
    assert len(boxes) > 100
    for (first, a), (second, b) in itertools.combinations(boxes, 2):
        assert not a.overlaps(b), (first, second)
        assert a.x0 >= 0 and a.x1 <= figure.bbox.x1 and a.y0 >= 0 and a.y1 <= figure.bbox.y1, first


@pytest.mark.parametrize('height, width', [(3, 9), (9, 3), (1, 5), (1, 1)])
def test_any_grid(height, width):
    net = model(dynamic_img_size=True)
    figure = draw_figure(net, height, width)
    assert any(f'{height} \N{MULTIPLICATION SIGN} {width} patches' in text for text in texts(figure))
    figure.draw_without_rendering()


def test_values_are_those_of_the_model():
    net = model()
    with torch.no_grad():
        net.blocks[1].attn.decay.beta.fill_(0.0)  # gamma 1/2: one step
        net.blocks[1].attn.decay.beta[1, 3] = 800.0  # gamma 1, as near as float64 can say
    lives = masks.half_lives(net)
    assert lives.shape == (2, 2, 8) and np.isclose(lives[1, 0], 1).all() and 1e299 < lives[1, 1, 3] < np.inf
    seen = masks.mean_masks(net, 4, 4)
    positions = net.blocks[0].attn.grid(4, 4)
    expected = net.blocks[0].attn.decay(positions)[:, 2 * 4 + 2].mean(0).view(4, 4)
    assert np.allclose(seen[0], expected.detach()) and seen[0, 2, 2] == 1
    draw_figure(net)


def test_wrapped_models_are_found_and_left_as_they_are():
    net = model().train()
    before = {key: value.clone() for key, value in net.state_dict().items()}
    draw_figure(torch.nn.Sequential(torch.nn.Identity(), net))
    assert net.training and all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    with pytest.raises(TypeError, match='got Linear, which has no masks'):
        draw_figure(torch.nn.Linear(1, 1))


def test_curve_is_drawn_as_its_path():
    ax = Figure().subplots()
    path = draw_curve(ax, 'zigzag', 2, 3)
    order = [0, 1, 3, 4, 2, 5]
    points = [(i % 3, i // 3) for i in order]
    assert [tuple(map(tuple, segment)) for segment in path.get_segments()] == list(itertools.pairwise(points))
    assert list(path.get_array()) == [0, 1, 2, 3, 4]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # row 0 on top
    with pytest.raises(ValueError, match='hilbrt'):
        draw_curve(ax, 'hilbrt', 2, 3)


def test_manhattan_is_drawn_as_distance():
    drawn = draw_curve(Figure().subplots(), 'manhattan', 3, 5)
    row, column = curves.centre_patch(3, 5)
    assert [row, column] == [1, 2]
    assert drawn.get_array().tolist() == [[3, 2, 1, 2, 3], [2, 1, 0, 1, 2], [3, 2, 1, 2, 3]]


def test_mask_is_drawn_with_its_patch():
    ax = Figure().subplots()
    drawn = draw_mask(ax, np.eye(3, 4), centre=(1, 2), vmin=0.0)
    assert drawn.get_array().shape == (3, 4) and drawn.get_clim()[0] == 0.0
    assert ax.patches[0].get_xy() == (1.5, 0.5)


@pytest.mark.parametrize(
    'value, text',
    [
        (1.04, '1'),
        (7.14, '7.1'),
        (142.3, '142'),
        (999.0, '999'),
        (3140.0, '3.1k'),
        (45e6, '45M'),
        (3.2e8, '320M'),
        (5e9, '5G'),
        (6.9e299, '7e299'),
    ],
)
def test_half_lives_are_short(value, text):
    assert masks._short(value) == text


def test_no_global_state_and_nothing_imported_early(tmp_path):
    code = """
import sys, timm, violin_timm.viz, violin_timm.viz.command
assert 'matplotlib' not in sys.modules
model = timm.create_model('violin_pixel_nano', img_size=4, embed_dim=16, depth=1)
violin_timm.viz.training_figure(model, sys.argv[1])
assert 'matplotlib.pyplot' not in sys.modules
sys.modules['matplotlib'] = None
del sys.modules['matplotlib.figure']
try:
    violin_timm.viz.training_figure(model, sys.argv[1])
except ImportError as error:
    assert 'violin-timm[viz]' in str(error)
else:
    raise SystemExit('no error')
"""
    subprocess.run([sys.executable, '-c', code, str(tmp_path / 'figure.png')], check=True)


def run(*argv):
    return command.main([str(arg) for arg in argv])


def test_command_draws_initial_values(tmp_path, capsys):
    target = tmp_path / 'figure.png'
    pairs = [f'{key}={value}' for key, value in TINY.items()]
    assert run('--model', 'violin_pixel_nano', '--model-kwargs', *pairs, '--width', 6, '--output', target) == 0
    assert capsys.readouterr().out.strip() == str(target)
    assert size(target)[0] == 1600


@pytest.mark.parametrize('kind', ['train', 'convert'])
def test_command_rebuilds_the_model_of_a_checkpoint(kind, tmp_path, monkeypatch):
    net = model(curves='hilbert,peano', num_classes=3)
    args = {
        'model': 'violin_pixel_nano',
        'img_size': 8,
        'in_chans': None,
        'input_size': None,
        'gp': None,
        'model_kwargs': {**{k: v for k, v in TINY.items() if k != 'img_size'}, 'curves': 'hilbert,peano'},
    }
    path = tmp_path / 'last.pth.tar'
    torch.save({'arch': 'violin_pixel_nano', 'args': args, 'state_dict': net.state_dict()}, path)
    if kind == 'convert':
        target = tmp_path / 'native.pth'
        assert convert.main([str(path), str(target), '--model', 'violin_pixel_nano']) == 0
        path = target
    seen = []
    monkeypatch.setattr('violin_timm.viz.figure.training_figure', lambda *args: seen.append(args) or args[1])
    assert run('--checkpoint', path, '--output', tmp_path / 'figure.png') == 0
    loaded = seen[0][0]
    assert loaded.curve_names == 'hilbert,peano'
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in net.state_dict().items())


@pytest.mark.parametrize(
    'flags, message',
    [
        ([], 'model: got none'),
        (['--model', 'violin_pixel_nan'], "model: got 'violin_pixel_nan'; choose from"),
        (['--model', 'violin_pixel_nano', '--height', 0], 'height: got 0'),
        (['--model', 'violin_pixel_nano', '--model-kwargs', 'curves=hilbrt'], 'hilbrt'),
        (['--checkpoint', 'nowhere.pth'], "checkpoint: got 'nowhere.pth'; no such file"),
    ],
)
def test_bad_arguments(flags, message, tmp_path, capsys):
    assert run(*flags, '--output', tmp_path / 'figure.png') == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_unknown_format_and_unwritable_place(tmp_path, capsys):
    flags = ['--model', 'violin_pixel_nano', '--model-kwargs', *(f'{key}={value}' for key, value in TINY.items())]
    assert run(*flags, '--output', tmp_path / 'figure.docx') == 2
    assert 'docx' in capsys.readouterr().err
    assert run(*flags, '--output', tmp_path / 'nowhere' / 'figure.png') == 1


def test_checkpoint_without_a_name_needs_the_model(tmp_path, capsys):
    torch.save(model().state_dict(), tmp_path / 'bare.pth')
    assert run('--checkpoint', tmp_path / 'bare.pth', '--output', tmp_path / 'figure.png') == 2
    assert 'give --model' in capsys.readouterr().err
    assert files.saved_model({}) == (None, {})
