"""The flags: precedence, types, and the refusal of whatever is not one."""

import ast
import inspect

import pytest
import yaml

from violin_timm.engine import config
from violin_timm.engine.config import ConfigError, parse, settings
from violin_timm.engine.flags import FLAGS, REFUSED


@pytest.fixture
def write(tmp_path):
    """Write a YAML file and return the arguments that name it."""

    def _write(text):
        path = tmp_path / 'config.yaml'
        path.write_text(text)
        return ['--config', str(path)]

    return _write


def test_defaults_are_timms():
    args = parse([])
    assert (args.opt, args.momentum, args.weight_decay, args.lr_base, args.epochs) == ('sgd', 0.9, 2e-5, 0.1, 300)
    assert (args.batch_size, args.color_jitter, args.hflip, args.smoothing, args.seed) == (128, 0.4, 0.5, 0.1, 42)
    assert args.scale == [0.08, 1.0] and args.mean is None and args.model_kwargs == {} and args.amp is False


def test_command_line_beats_yaml_even_with_the_default(write):
    file = write('epochs: 7\nsmoothing: 0.3\namp: true\nopt: adamw\n')
    assert parse(file).epochs == 7
    args = parse([*file, '--epochs', '300', '--smoothing', '0.1', '--amp', 'off'])
    assert (args.epochs, args.smoothing, args.amp, args.opt) == (300, 0.1, False, 'adamw')


@pytest.mark.parametrize(
    ('text', 'name', 'value'),
    [
        ('lr: 1e-3', 'lr', 1e-3),  # YAML 1.1 reads text here
        ('lr: 1', 'lr', 1.0),
        ('amp: off', 'amp', False),
        ('amp: "on"', 'amp', True),
        ('batch-size: 64', 'batch_size', 64),
        ('batch_size: "64"', 'batch_size', 64),
        ('color_jitter: null', 'color_jitter', None),
        ('mean: [0.5, 1e-1]', 'mean', [0.5, 0.1]),
        ('device_modules: [violin_timm]', 'device_modules', ['violin_timm']),
        (
            'model_kwargs: {img_size: 8, rate: 1e-2, name: x}',
            'model_kwargs',
            {'img_size': 8, 'rate': 0.01, 'name': 'x'},
        ),
        ('torchcompile: true', 'torchcompile', 'inductor'),
        ('opt_kwargs: [a=1, b=x]', 'opt_kwargs', {'a': 1, 'b': 'x'}),
    ],
)
def test_yaml_values(write, text, name, value):
    got = getattr(parse(write(text)), name)
    assert got == value and type(got) is type(value)


def test_command_line_values():
    args = parse(['--model-kwargs', 'a=1', 'b=[1, 2]', 'c=None', 'd=snake', '--scale', '.5', '1', '-b', '4', '--amp'])
    assert args.model_kwargs == {'a': 1, 'b': [1, 2], 'c': None, 'd': 'snake'}
    assert (args.scale, args.batch_size, args.amp) == ([0.5, 1.0], 4, True)
    assert parse(['--color-jitter', '-0.1']).color_jitter == -0.1
    assert parse(['--torchcompile']).torchcompile == 'inductor'
    assert parse(['--torchcompile', 'eager']).torchcompile == 'eager'


def test_model_kwargs_come_as_one_text_too():
    args = parse(['--model-kwargs', "mask=none alpha=none  curves=('snake', 'peano')"])
    assert args.model_kwargs == {'mask': 'none', 'alpha': 'none', 'curves': ('snake', 'peano')}


def test_model_kwargs_of_the_command_line_replace_those_of_yaml(write):
    file = write('model_kwargs: {a: 1, b: 2}')
    assert parse([*file, '--model-kwargs', 'a=3']).model_kwargs == {'a': 3}


@pytest.mark.parametrize(
    ('text', 'parts'),
    [
        ('bath_size: 3', ["unknown key 'bath_size' in", 'config.yaml', 'did you mean batch_size?']),
        ('torchscript: false', ['torchscript in', 'is a timm flag that violin train does not support']),
        ('aug-splits: 3', ['aug-splits in', 'is a timm flag that violin train does not support']),
        ('config: x.yaml', ["unknown key 'config'"]),
        ('epochs: many', ["epochs: got 'many' in", 'expected a whole number, at least 1']),
        ('epochs: 1.5', ['epochs: got 1.5 in', 'a whole number']),
        ('epochs: true', ['epochs: got True in', 'a whole number']),
        ('epochs: 0', ['epochs: got 0 in', 'at least 1']),
        ('epochs: null', ['epochs: got None in']),
        ('lr: .nan', ['lr: got nan']),
        ('amp: 3', ['amp: got 3 in', 'true or false']),
        ('amp: maybe', ["amp: got 'maybe' in", 'true or false']),
        ('experiment: 12', ['experiment: got 12 in', 'quote it']),
        ('sched: cosin', ["sched: got 'cosin' in", 'one of cosine, tanh']),
        ('mean: 0.5', ['mean: got 0.5 in', 'a list of one or more, each a number']),
        ('scale: [1.0]', ['scale: got [1.0] in', 'a list of 2']),
        ('mean: []', ['mean: got [] in']),
        ('model_kwargs: 3', ['model_kwargs: got 3 in', 'key=value pairs']),
        ('batch-size: 2\nbatch_size: 4', ['batch_size: given twice in']),
        ('lr: 1.0\nlr: 2.0', ['lr: given twice', 'line 2']),
        ('- lr', ['holds list; expected a mapping']),
        ('lr: [', ['is not YAML']),
    ],
)
def test_yaml_refusals(write, text, parts):
    with pytest.raises(ConfigError) as caught:
        parse(write(text))
    for part in parts:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ('argv', 'part'),
    [
        (['--bath-size', '3'], "unknown flag '--bath-size'; did you mean --batch-size?"),
        (['--bath-size=3'], "unknown flag '--bath-size'; did you mean --batch-size?"),
        (['--torchscript'], '--torchscript is a timm flag that violin train does not support'),
        (['--aug-splits', '3'], '--aug-splits is a timm flag that violin train does not support'),
        (['--batch', '3'], "unknown flag '--batch'"),  # no abbreviations: they change meaning as flags are added
        (['--lr', 'fast'], "lr: got 'fast'; expected a number"),
        (['--lr'], '--lr: expected one argument'),
        (['--clip-mode', 'nrom'], "clip_mode: got 'nrom'; expected one of norm, value, agc"),
        (['--model-kwargs', 'depth'], "model_kwargs: got ['depth']"),
        (['/data'], '--data-dir'),
        (['--config', 'quick/digit.yaml'], 'did you mean configs/quick/digits.yaml?'),
    ],
)
def test_command_line_refusals(argv, part):
    with pytest.raises(ConfigError) as caught:
        parse(argv)
    assert part in str(caught.value)


@pytest.mark.parametrize('name', sorted(REFUSED))
def test_every_refused_name_is_refused(write, name):
    with pytest.raises(ConfigError, match='does not support'):
        parse(write(f'{name}: 1'))


def test_tables_do_not_overlap_and_defaults_fit():
    assert not REFUSED & set(FLAGS)
    for flag in FLAGS.values():
        assert config.coerce(flag, flag.default) == flag.default, flag.name


def test_every_flag_is_read_somewhere():
    """A flag that no code reads would be ignored in silence, which is what `REFUSED` is for."""
    import timm.data
    import timm.optim
    import timm.scheduler

    from violin_timm.engine import distillation

    places = ('data/*.py', 'engine/*.py', 'recipes/supervised*.py')
    read = {'input_size', 'img_size', 'in_chans', 'crop_pct', 'mean', 'std', 'interpolation'}  # timm's data config
    functions = (timm.scheduler.scheduler_kwargs, timm.optim.optimizer_kwargs)
    texts = [inspect.getsource(f) for f in functions]
    texts += [path.read_text() for place in places for path in config.PACKAGE.glob(place)]
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Attribute) and getattr(node.value, 'id', '') in ('args', 'cfg'):
                read.add(node.attr)
            if isinstance(node, ast.Attribute) and getattr(node.value, 'attr', '') == 'args':
                read.add(node.attr)
            if isinstance(node, ast.Call) and getattr(node.func, 'id', '') == 'getattr':
                read.add(getattr(node.args[1], 'value', None))
    read.update(*(flags.values() for _, flags in distillation.KINDS.values()))
    assert set(FLAGS) - read == set()


def test_args_yaml_comes_back_the_same(tmp_path):
    args = settings(lr='1e-3', model_kwargs={'depth': 2, 'rate': 1e-7}, mean=[0.5], experiment='12', aa='3a')
    path = tmp_path / 'args.yaml'
    path.write_text(config.as_yaml(args))
    assert vars(parse(['--config', str(path)])) == vars(args)


def test_args_yaml_of_a_continued_run_starts_anew(tmp_path):
    text = config.as_yaml(settings(resume='auto', experiment='x'))
    assert yaml.safe_load(text)['resume'] == ''


def test_settings_share_nothing():
    one, other = settings(), settings()
    one.scale.append(3)
    one.model_kwargs['a'] = 1
    assert other.scale == [0.08, 1.0] and other.model_kwargs == {}
    with pytest.raises(ConfigError, match='did you mean'):
        settings(epoch=3)


def test_config_is_found_from_anywhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ('configs/quick/digits.yaml', 'quick/digits.yaml'):
        assert config.find_config(name).name == 'digits.yaml'
    (tmp_path / 'quick').mkdir()
    (tmp_path / 'quick' / 'digits.yaml').write_text('epochs: 3')
    assert parse(['--config', 'quick/digits.yaml']).epochs == 3  # a file of that name comes first


def test_help_lists_every_flag(capsys):
    with pytest.raises(SystemExit) as caught:
        parse(['--help'])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert all(flag.option in text for flag in FLAGS.values())
