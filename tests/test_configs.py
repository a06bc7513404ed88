"""Every config that ships: read by the parser of its command, its model and optimizer built, one step made."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from violin_timm.cli import COMMANDS
from violin_timm.data.tensors import Tensors
from violin_timm.engine import build
from violin_timm.engine.config import ConfigError, parse, read_yaml
from violin_timm.engine.distributed import World
from violin_timm.engine.flags import FLAGS, TRAIN
from violin_timm.engine.logging import Progress
from violin_timm.engine.optim import create_optimizer, learning_rate
from violin_timm.recipes import dino, protocol_flags, supervised, tables
from violin_timm.recipes.finetune import Job, finetune
from violin_timm.recipes.sweep_points import read_sweep

ROOT = Path(__file__).resolve().parent.parent / 'configs'
PATHS = {str(path.relative_to(ROOT)): path for path in sorted(ROOT.rglob('*.y*ml'))}
COMMAND = {'imagenet': 'train', 'cifar': 'train', 'dino': 'dino', 'vtab': 'vtab', 'sweeps': 'sweep'}  # by folder
TABLES = (TRAIN, tables.DINO, protocol_flags.VTAB)
HERE = World(torch.device('cpu'))
GAP_PARAMETERS = {'tiny': 5717356, 'small': 22050544, 'base': 86567416}  # as the paper's logs have them


def command_of(name):
    """The command that reads a config; in `quick`, that before the first underscore of its name, or `train`."""
    folder, _, file = name.partition('/')
    if folder == 'quick':
        first = file.split('_')[0]
        return first if first in COMMANDS else 'train'
    return COMMAND[folder]


def table_of(name):
    command = command_of(name)
    return next(table for table in TABLES if table.command == f'violin {command}')


def of(*commands):
    return [name for name in PATHS if command_of(name) in commands]


RUNS = [name for name in PATHS if command_of(name) != 'sweep']
FULL = [name for name in PATHS if name.startswith(('imagenet/', 'cifar/'))]
PLAIN = [name for name in FULL if '/plain_' in name]


def header(name):
    lines = PATHS[name].read_text().splitlines()
    return lines[: next(i for i, line in enumerate(lines) if not line.startswith('#'))]


def typed(name):
    """The commands in a config's header: `(number of processes, command, arguments)`."""
    text = '\n'.join(line[1:] for line in header(name) if line.startswith('#   ')).replace('\\\n', ' ')
    for line in text.splitlines():
        found = re.search(r'(?:\bviolin|-m violin_timm) (\w+) (.*)', line)
        if found:
            processes = [int(n) for n in re.findall(r'--nn?odes (\d+)|--nproc-per-node (\d+)', line) for n in n if n]
            yield int(np.prod(processes)), found[1], shlex.split(found[2], comments=True)


def test_there_are_configs_and_each_has_one_command():
    assert len(PATHS) > 20 and len(FULL) == 17
    assert all(path.suffix == '.yaml' for path in PATHS.values())
    assert {command_of(name) for name in PATHS} <= set(COMMANDS)
    assert set(of('sweep')) | set(RUNS) == set(PATHS)


@pytest.mark.parametrize('name', PATHS)
def test_opens_with_its_command(name):
    """The first command of the header is the config's own, on it, and is one that the command line takes."""
    first = next(typed(name), None)
    assert first, f'{name} does not open with a command'
    _, command, arguments = first
    assert command == command_of(name)
    assert f'configs/{name}' in arguments
    if command != 'sweep':
        parse(arguments, table_of(name))


@pytest.mark.parametrize('name', RUNS)
def test_reads_and_refuses_what_is_not_a_key(name, tmp_path):
    values = read_yaml(PATHS[name], table_of(name))
    assert values['device_modules'] == ['violin_timm']
    assert all('-' not in key for key in yaml.safe_load(PATHS[name].read_text()))  # timm's script ignores such keys
    wrong = tmp_path / 'wrong.yaml'
    wrong.write_text(PATHS[name].read_text() + '\nepoch: 3\n')
    with pytest.raises(ConfigError, match='epoch'):
        read_yaml(wrong, table_of(name))


@pytest.mark.parametrize('name', of('sweep'))
def test_sweeps_read_and_refuse_what_is_not_a_key(name, tmp_path):
    assert read_sweep(PATHS[name]).points
    wrong = tmp_path / 'wrong.yaml'
    wrong.write_text(PATHS[name].read_text() + '\nparameter: {}\n')
    with pytest.raises(ConfigError, match='parameter'):
        read_sweep(wrong)


# One step --------------------------------------------------------------------


@pytest.fixture(scope='module')
def images(tmp_path_factory):
    """A folder of two classes, with two images to train on and two to validate on."""
    root, draw = tmp_path_factory.mktemp('images'), np.random.default_rng(0)
    for split in ('train', 'validation'):
        for label in ('a', 'b'):
            (root / split / label).mkdir(parents=True)
            pixels = draw.integers(0, 256, (40, 48, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / split / label / '0.png')
    return root


def settings_of(name, **values):
    """A config's settings without the weights that it starts from; `depth` goes to the model."""
    args = parse(['--config', str(PATHS[name])], table_of(name))
    args.model_kwargs.pop('pretrained_cfg_overlay', None)
    values['pretrained'] = False
    if 'depth' in values:
        args.model_kwargs['depth'] = values.pop('depth')
    vars(args).update(values)
    build.import_modules(args)
    return args


def small(images):
    """Settings of a step on the CPU; the configs have half precision, workers and data of their own."""
    made = {'dataset': '', 'data_dir': str(images), 'train_split': 'train', 'batch_size': 2, 'depth': 1}
    return {**made, 'device': 'cpu', 'amp': False, 'workers': 0, 'pin_mem': False}


def step_train(name, images):
    args = settings_of(name, **small(images), test_split='', warmup_epochs=0)
    if name.startswith('quick/'):  # the head starts at zero, so that only a second step moves what is below it
        args.batch_size, args.mixup = 1, 0.0  # mixing needs two images
    build.check(args)
    parts = supervised.prepare(args, HERE)
    loss, before = one_epoch(supervised, parts, parts.task.get_trainable_module(), parts.schedule.updates_per_epoch)
    after = parts.task.get_trainable_module().state_dict()
    moved = {key for key in before if not torch.equal(before[key], after[key])}
    assert 'head.weight' in moved
    masked = args.model_kwargs.get('mask') != 'none'
    assert masked == ('blocks.0.attn.decay.alpha' in moved) == any('.decay.' in key for key in before)
    return loss


def step_dino(name, images):
    args = settings_of(name, **small(images), val_split='', out_dim=32, head_hidden_dim=16, local_number=[1])
    parts = dino.prepare(args, HERE)
    return one_epoch(dino, parts, parts.task.trainable_module, len(parts.train))[0]


def step_vtab(name, images):
    args = settings_of(name, device='cpu', amp=False, epochs=3, batch_size=2, pretrained_path=None)
    args.model = args.model or 'violin_deit_tiny'  # else the checkpoint's
    args.model_kwargs.update(depth=1, class_token=True)
    side = args.img_size or 224
    split = Tensors(torch.randint(0, 256, (2, 3, side, side), dtype=torch.uint8), torch.tensor([0, 1]))
    jobs = [Job('two', arm, 'final', args.lrs[0], 0) for arm in args.arms]
    results = [finetune(args, job, 2, lambda *size: (split, split), HERE.device)[0] for job in jobs]
    for job, result in zip(jobs, results):
        assert (result['parameters']['mask'] > 0) == (args.arms[job.arm] != protocol_flags.ARMS['plain'])
        assert (result['parameters']['adapter'] > 0) == bool(args.peft)
    assert len({result['updates'] for result in results}) == 1
    return results[0]['train_loss']


def one_epoch(recipe, parts, module, updates):
    """The loss of an epoch, and the weights before it."""
    before = {key: value.clone() for key, value in module.state_dict().items()}
    return recipe.train_one_epoch(parts, Progress(HERE, parts.args.epochs, updates, 50, 0)), before


STEPS = {'train': step_train, 'dino': step_dino, 'vtab': step_vtab}


@pytest.mark.parametrize('name', RUNS)
def test_makes_a_step(name, images):
    assert np.isfinite(STEPS[command_of(name)](name, images))


# What the full-size configs say ----------------------------------------------


@pytest.mark.parametrize('name', FULL)
def test_builds_in_full_and_decays_the_right_weights(name):
    args = settings_of(name)
    with torch.device('meta'):
        model = build.build_model(args)
    parameters = sum(p.numel() for p in model.parameters())
    size = name.removesuffix('.yaml').split('_')[-1]
    if name.startswith('imagenet/violin_deit_'):
        assert parameters == GAP_PARAMETERS[size]
    groups = create_optimizer(args, model, 1e-3).param_groups
    free = {id(p) for group in groups if not group['weight_decay'] for p in group['params']}
    for key, p in model.named_parameters():
        free_one = p.ndim < 2 or '.decay.' in key or key in ('pos_embed', 'cls_token')
        assert (id(p) in free) == free_one, key


@pytest.mark.parametrize('name', PLAIN)
def test_a_baseline_differs_from_its_violin_in_the_model_alone(name):
    ours, plain = (
        yaml.safe_load(PATHS[n].read_text()) for n in (name.replace('plain_', 'violin_').replace('_token', ''), name)
    )
    kwargs = plain.pop('model_kwargs')
    assert (kwargs.pop('mask'), kwargs.pop('alpha')) == ('none', 'none')
    assert kwargs.pop('class_token', False) == ('_token' in name)
    if 'pretrained_cfg_overlay' in kwargs:
        kwargs['pretrained_cfg_overlay']['file'] = kwargs['pretrained_cfg_overlay']['file'].replace('plain_', 'violin_')
    assert kwargs == ours.pop('model_kwargs', {})
    assert plain == ours


@pytest.mark.parametrize('name', FULL)
def test_batch_and_rate_are_those_of_the_recipe(name):
    processes, _, arguments = next(typed(name))
    args = parse(arguments)
    rates = {'deit3_small': (2048, 4e-3), 'base_192': (2048, 3e-3), 'base_224': (512, 1e-5)}
    batch, rate = next((found for part, found in rates.items() if part in name), (1024, 1e-3))
    assert processes * args.batch_size * args.grad_accum_steps == batch
    assert learning_rate(args, World(torch.device('cpu'), size=processes)) == pytest.approx(rate)
    text = ' '.join(line.removeprefix('#').strip() for line in header(name))
    assert f'a global batch of {batch}' in text and 'The paper reports' in text and 'Not run in full by us' in text


@pytest.mark.parametrize('name', [name for name in FULL if 'deit3' not in name])
def test_settings_of_deit(name):
    values = yaml.safe_load(PATHS[name].read_text())
    expected = {
        'epochs': 300, 'opt': 'adamw', 'opt_eps': 1e-8, 'weight_decay': 0.05, 'sched': 'cosine', 'warmup_epochs': 5,
        'warmup_lr': 1e-6, 'min_lr': 1e-5, 'cooldown_epochs': 0, 'drop_path': 0.1, 'smoothing': 0.1, 'mixup': 0.8,
        'cutmix': 1.0, 'mixup_prob': 1.0, 'mixup_switch_prob': 0.5, 'mixup_mode': 'batch', 'reprob': 0.25,
        'aa': 'rand-m9-mstd0.5-inc1', 'color_jitter': 0.3, 'train_interpolation': 'bicubic', 'remode': 'pixel',
        'recount': 1, 'aug_repeats': 3, 'amp': True, 'seed': 0, 'interpolation': 'bicubic',
    }  # fmt: skip
    assert {key: values.get(key) for key in expected} == expected and 'clip_grad' not in values
    imagenet = name.startswith('imagenet/')
    assert values.get('model_ema_decay') == (0.99996 if imagenet else None)
    assert values['crop_pct'] == (0.875 if imagenet else 1.0)


@pytest.mark.parametrize('name', FULL)
def test_has_no_key_that_timms_script_does_not_know(name):
    assert not [key for key in yaml.safe_load(PATHS[name].read_text()) if FLAGS[key].ours]


@pytest.mark.parametrize('kind', ['violin', 'plain'])
def test_the_second_stage_of_deit3_takes_everything_of_the_first(kind, tmp_path):
    tiny = {'depth': 1, 'embed_dim': 48, 'num_heads': 2}
    first = settings_of(f'imagenet/{kind}_deit3_base_192.yaml')
    first.model_kwargs.update(tiny)
    trained = build.build_model(first)
    file = tmp_path / 'last.pth.tar'
    torch.save({'state_dict': trained.state_dict(), 'epoch': 799}, file)

    second = parse(['--config', str(ROOT / f'imagenet/{kind}_deit3_base_224.yaml')])
    overlay = second.model_kwargs['pretrained_cfg_overlay']
    experiment = next(typed(f'imagenet/{kind}_deit3_base_192.yaml'))[2]
    assert Path(overlay['file']).parent.name == experiment[experiment.index('--experiment') + 1]
    overlay['file'] = str(file)
    second.model_kwargs.update(tiny)
    model = build.build_model(second)
    assert model.pos_embed.shape[1] == 14 * 14 and trained.pos_embed.shape[1] == 12 * 12
    for key, value in trained.state_dict().items():
        assert key == 'pos_embed' or torch.equal(value, model.state_dict()[key]), key


# VTAB ------------------------------------------------------------------------

VTAB = [name for name in PATHS if name.startswith('vtab/')]


@pytest.mark.parametrize('name', VTAB)
def test_vtab_configs_are_the_protocol(name):
    args = parse(['--config', str(PATHS[name])], protocol_flags.VTAB)
    adapted = bool(args.peft)
    # of the LoRA pipeline, whose rates are doubled at batch 32
    rates = [5e-3, 2e-3, 1.5e-3, 1e-3, 5e-4] if adapted else [1e-3, 7.5e-4, 5e-4, 2.5e-4, 1e-4]
    assert args.lrs == rates and args.final_seeds == [0, 1, 2, 3, 4]
    assert (args.epochs, args.batch_size, args.layer_decay) == ((30, 32, 1.0) if adapted else (50, 64, 0.65))
    assert args.arms == protocol_flags.ARMS and args.weight_decay == 0.05 and args.amp_dtype == 'bfloat16'
    text = ' '.join(line.removeprefix('#').strip() for line in header(name))
    assert 'Not run in full by us' in text and 'The paper' in text


def test_vtab_configs_are_those_of_the_paper():
    sizes = {'deit': ('tiny', 'small', 'base'), 'deit3': ('small', 'base', 'large', 'huge'), 'dino': ('small', 'base')}
    expected = {f'vtab/{kind}_{size}.yaml' for kind, names in sizes.items() for size in names}
    assert {*expected, 'vtab/deit_base_lora.yaml', 'vtab/deit_base_dora.yaml'} == set(VTAB)
