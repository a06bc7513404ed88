"""The flags of `violin vtab` and `violin finetune`. A row of `violin train` means here what it means there.

Nothing here imports torch, so `--help` and typos answer at once.
"""

from __future__ import annotations

from ..engine.flags import REFUSED, Flag, Table, shared

# The arms of a comparison, each with what it sets among the fields of `violin_timm.settings.MaskSettings`.
ARMS = {
    'plain': {'mask': 'none', 'alpha': 'none'},
    'alpha only': {'mask': 'none'},
    'violin': {},
}
SEEDS = [0, 1, 2, 3, 4]


def _model(**defaults: object) -> tuple[Flag, ...]:
    """Rows of the model, with the defaults of the command."""
    return (
        *shared('pretrained_path', 'img_size', 'in_chans', 'mean', 'std', 'interpolation', 'model_kwargs'),
        *shared('grad_checkpointing', 'fast_norm', **defaults),
        Flag('masks', str, 'fresh', 'fresh: new masks, whatever the weights hold; carried: those of the weights',
             ('fresh', 'carried'), ours=True),
        Flag('head_std', float, 2e-5, "deviation of the classifier's initial weights; its biases are 0", least=0,
             ours=True),
    )  # fmt: skip


_ARMS = (
    Flag('arms', dict, ARMS, 'arms: name to mask settings; in YAML, a mapping of mappings', ours=True),
    Flag('only', str, [], 'run these arms alone', many=True, ours=True),
    Flag('beta_range', float, None, 'range of beta in fresh masks (default: 15 20), for arms that set none', many=True,
         length=2, ours=True),
    Flag('alpha_std', float, None, 'deviation of alpha from 1 in them (default: 0.01)', least=0, ours=True),
    Flag('mask_lr_scale', float, 1.0, 'factor on the learning rate of mask parameters', least=0, ours=True),
    Flag('peft', dict, {}, 'method=lora or dora, rank=N, perhaps alpha, dropout, biases; empty trains all weights',
         ours=True),
)  # fmt: skip

_TRAINING = (
    Flag('lrs', float, [1e-3, 7.5e-4, 5e-4, 2.5e-4, 1e-4], 'learning rates to choose from', many=True, least=0,
         ours=True),
    Flag('tune_seeds', int, SEEDS, 'seeds of each rate when tuning', many=True, least=0, ours=True),
    Flag('final_seeds', int, SEEDS, 'seeds of the final runs', many=True, least=0, ours=True),
    Flag('warmup_part', float, 0.1, 'part of the updates in which the rate rises; then a cosine to 0', least=0,
         ours=True),
    *shared('opt_eps', 'opt_betas', opt='adamw', weight_decay=0.05, layer_decay=0.65, epochs=50, batch_size=64),
    *shared('validation_batch_size'),
)  # fmt: skip

_DEVICE = shared('device', 'amp', 'device_modules', amp_dtype='bfloat16')

_RUN = (
    Flag('jobs', int, 0, 'runs at a time (default: one for each GPU, else 1); job i has GPU i', least=0, ours=True),
    Flag('threads', int, 0, 'CPU threads of each (default: cores / jobs)', least=0, ours=True),
    Flag('baselines', str, ['plain', 'alpha only'], 'arms from which the others are told apart, in pairs', many=True,
         ours=True),
    Flag('dry_run', bool, False, 'list the runs and their state, and stop', ours=True),
    Flag('table_only', bool, False, 'write the table of what has ended, and stop', ours=True),
    *shared('workers'),
)  # fmt: skip

VTAB = Table(
    'violin vtab',
    'Fine-tune on the tasks of VTAB-1K, or on generated ones, by its protocol: rates tuned on train800 and val200 for '
    'every arm alike, final runs on train800val200, the test split once. The same command again goes on.',
    {
        'data': (
            Flag('data_dir', str, None, 'folder of the tasks, each with its lists of images'),
            Flag('tasks', str, [], 'names of tasks (default: the 19 of VTAB-1K)', many=True, ours=True),
            Flag('task_size', int, 0, 'side in pixels of generated tasks (default: img_size)', least=0, ours=True),
            Flag('task_seed', int, 0, 'seed of generated tasks', least=0, ours=True),
            Flag('task_test', int, 2000, 'test images of generated tasks', least=1, ours=True),
        ),
        'model': _model(model='', pretrained=False),
        'arms': _ARMS,
        'training': _TRAINING,
        'device': _DEVICE,
        'run': (
            *_RUN,
            Flag('save_models', bool, False, 'keep the models of the final runs', ours=True),
            *shared(output='output/vtab', experiment='vtab'),
        ),
    },
    REFUSED,
)

FINETUNE = Table(
    'violin finetune',
    "Fine-tune on one's own images: a folder of class folders, or a timm data set. The protocol of violin vtab, "
    'splits drawn by a seed. The same command again goes on.',
    {
        'data': (
            *shared('data_dir', 'dataset', 'train_split', 'dataset_download', 'class_map', 'input_img_mode'),
            *shared('bad_images', 'input_key', 'target_key', 'dataset_trust_remote_code', 'split_seed'),
            *shared(test_split=''),
            Flag('shots', int, None, 'images of each class to learn from (default: all)', least=2, ours=True),
            Flag('train_images', int, None, 'images to learn from, classes in proportion (default: all)', least=2,
                 ours=True),
            Flag('val_part', float, 0.2, 'part of them that is held out when tuning', least=0, ours=True),
            Flag('draw_seed', int, 0, 'seed of the draw', least=0, ours=True),
            Flag('draw_per_seed', bool, False, "each run has a draw of its own, by draw_seed plus its seed", ours=True),
        ),
        'model': _model(model='violin_deit_small.fb_in1k', pretrained=True),
        'arms': _ARMS,
        'training': _TRAINING,
        'device': _DEVICE,
        'run': (
            *_RUN,
            Flag('save_models', bool, True, 'keep the models of the final runs', ours=True),
            *shared(output='output/finetune', experiment=''),
        ),
    },
    REFUSED,
)  # fmt: skip
