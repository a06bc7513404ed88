"""timm's own train.py on our configs. Its script is in no wheel, so its path comes from an environment variable:

VIOLIN_TIMM_TRAIN_SCRIPT=pytorch-image-models/train.py pytest tests/test_stock_script.py
"""

import csv
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = os.environ.get('VIOLIN_TIMM_TRAIN_SCRIPT', '')
FULL = sorted(path for folder in ('imagenet', 'cifar') for path in (ROOT / 'configs' / folder).glob('*.yaml'))

pytestmark = pytest.mark.skipif(not SCRIPT, reason="VIOLIN_TIMM_TRAIN_SCRIPT does not name timm's train.py")

# Prints what the script makes of each config: names that it does not know, and the settings that it ends up with.
READ = """
import importlib.util, json, sys
script, *configs = sys.argv[1:]
for config in configs:
    spec = importlib.util.spec_from_file_location('train', script)
    train = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(train)
    known = {action.dest for action in train.parser._actions}
    sys.argv = ['train.py', '--config', config]
    args = vars(train._parse_args()[0])
    print(json.dumps([sorted(set(args) - known), args]))
"""


def run(*command, **environment):
    """Output of a process that finds the package, and succeeds."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        text=True,
        capture_output=True,
        env={**os.environ, 'PYTHONPATH': paths, 'OMP_NUM_THREADS': '1', **environment},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


def test_reads_every_config_in_full():
    lines = run('-c', READ, SCRIPT, *FULL).splitlines()
    assert len(lines) == len(FULL) > 0
    for path, line in zip(FULL, lines):
        unknown, args = json.loads(line)
        assert not unknown, path
        given = yaml.safe_load(path.read_text())
        assert {key: args[key] for key in given} == given, path


def test_trains_one_of_them(tmp_path):
    draw = np.random.default_rng(0)
    for split in ('train', 'validation'):
        for label in ('a', 'b'):
            (tmp_path / split / label).mkdir(parents=True)
            for index in range(2):
                pixels = draw.integers(0, 256, (40, 48, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / split / label / f'{index}.png')
    config = ROOT / 'configs/cifar/violin_pixel_tiny.yaml'
    small = ['--batch-size', '4', '--epochs', '1', '--warmup-epochs', '0', '--workers', '0', '--device', 'cpu']
    model = ['--model-kwargs', 'depth=1', 'img_size=8', '--img-size', '8', '--aug-repeats', '0']
    place = ['--dataset', '', '--data-dir', tmp_path, '--output', tmp_path / 'output', '--experiment', 'run']
    run(SCRIPT, '--config', config, *small, *model, *place)

    folder = tmp_path / 'output' / 'run'
    with open(folder / 'summary.csv', newline='') as file:
        (row,) = csv.DictReader(file)
    assert np.isfinite(float(row['train_loss'])) and np.isfinite(float(row['eval_loss']))
    from violin_timm.engine.checkpoints import load_checkpoint

    weights = load_checkpoint(folder / 'last.pth.tar')['state_dict']
    assert weights['blocks.0.attn.decay.beta'].shape == (3, 8) and torch.isfinite(weights['head.weight']).all()
