"""The flags of `violin train`: one row each, named and meant as in timm's `train.py`.

A flag is added with one row of `FLAGS`; the command line, the YAML reader, `--help` and `args.yaml` all follow from it.
A name of timm's that no code here honours belongs in `REFUSED`, so that it stops a run instead of being ignored.
Other commands have a `Table` of their own, and take the rows they share from here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Mapping

SCHEDULERS = ('cosine', 'tanh', 'step', 'multistep', 'poly', 'wsd', 'rsqrt', 'constant', 'plateau', 'none')
RESIZE_MODES = ('', 'nearest', 'bilinear', 'bicubic', 'box', 'hamming', 'lanczos')


@dataclass(frozen=True)
class Flag:
    """One setting.

    Attributes:
        name: Key in YAML and in the parsed namespace; the command line spells it with dashes.
        type: `bool`, `int`, `float`, `str`, or `dict` for `key=value` pairs.
        default: Value when neither the command line nor the YAML file names it.
        help: One line for `--help`.
        choices: Allowed values; None allows all of the type.
        many: The value is a list of `type`.
        length: Exact length of such a list; None allows any but zero.
        const: Value of the flag when it is given bare; only for `str` flags whose value is optional.
        alias: A second spelling on the command line.
        nullable: YAML `null` is a value of its own. Always so where the default is None.
        least: Smallest allowed number.
        ours: Not a flag of timm's `train.py`.
    """

    name: str
    type: type
    default: Any
    help: str
    choices: tuple | None = None
    many: bool = False
    length: int | None = None
    const: Any = None
    alias: str | None = None
    nullable: bool = False
    least: float | None = None
    ours: bool = False

    @property
    def option(self) -> str:
        """The spelling on the command line."""
        return '--' + self.name.replace('_', '-')


_DATA = (
    Flag('data_dir', str, None, 'root folder of the data set'),
    Flag('dataset', str, '', "data set: digits (embedded), or timm's <type>/<name>; empty means a folder of images"),
    Flag('train_split', str, 'train', 'split to train on'),
    Flag('val_split', str, 'validation', 'split to validate on; empty for none'),
    Flag('test_split', str, '', 'split on which the best checkpoint is measured once, at the end', ours=True),
    Flag('split_seed', int, 0, 'seed of the fixed split of an embedded data set', ours=True, least=0),
    Flag('train_num_samples', int, None, 'images in the training split, for iterable data sets', least=1),
    Flag('val_num_samples', int, None, 'images in the validation split, for iterable data sets', least=1),
    Flag('dataset_download', bool, False, 'let torch/ and tfds/ data sets download themselves'),
    Flag('class_map', str, '', 'file that maps class names to indices'),
    Flag('input_img_mode', str, None, 'PIL mode images are converted to (default: L for one channel, else RGB)'),
    Flag('bad_images', str, 'skip', 'at an image that cannot be read', ('skip', 'stop'), ours=True),
    Flag('input_key', str, None, 'key of the image in a sample, for hfds/, hfids/ and wds/'),
    Flag('target_key', str, None, 'key of the label in a sample, for hfds/, hfids/ and wds/'),
    Flag('dataset_trust_remote_code', bool, False, 'let a Hugging Face data set run code from its repository'),
)

_MODEL = (
    Flag('model', str, 'resnet50', 'name of the model, as registered with timm'),
    Flag('pretrained', bool, False, 'start from the pretrained weights of that name'),
    Flag('pretrained_path', str, None, 'load this file as if it were the pretrained weights, head adapted'),
    Flag('initial_checkpoint', str, '', 'load this checkpoint into the finished model, strictly'),
    Flag('resume', str, '', 'checkpoint to continue from; "auto" continues the experiment folder if it has one'),
    Flag('no_resume_opt', bool, False, 'continue with the model alone, not the optimizer and the loss scaler'),
    Flag('num_classes', int, None, "number of classes (default: the model's)", least=0),
    Flag('gp', str, None, "global pooling (default: the model's)"),
    Flag('img_size', int, None, "image side in pixels (default: the model's)", least=1),
    Flag('in_chans', int, None, 'image channels (default: 3)', least=1),
    Flag('input_size', int, None, 'channels, height, width', many=True, length=3, least=1),
    Flag('crop_pct', float, None, 'part of the side kept by the centre crop in evaluation', least=0),
    Flag('mean', float, None, 'pixel mean, per channel or one for all, of values in 0..1', many=True),
    Flag('std', float, None, 'pixel deviation, per channel or one for all', many=True, least=0),
    Flag('interpolation', str, '', "resizing in evaluation (default: the model's)", RESIZE_MODES),
    Flag('batch_size', int, 128, 'images per process and forward pass', alias='-b', least=1),
    Flag('validation_batch_size', int, None, 'the same in evaluation (default: batch_size)', alias='-vb', least=1),
    Flag('channels_last', bool, False, 'channels_last memory layout'),
    Flag('grad_accum_steps', int, 1, 'batches per update', least=1),
    Flag('grad_checkpointing', bool, False, 'recompute blocks in the backward pass to save memory'),
    Flag('fast_norm', bool, False, "timm's fast norm layers"),
    Flag('model_kwargs', dict, {}, 'key=value pairs for the model; on the command line they replace those of the YAML'),
    Flag('head_init_scale', float, None, 'factor on the fresh classifier'),
    Flag('head_init_bias', float, None, 'constant bias of the fresh classifier'),
    Flag('torchcompile', str, None, 'torch.compile with this backend (bare: inductor)', const='inductor'),
    Flag('torchcompile_mode', str, None, 'mode of torch.compile'),
)

_DEVICE = (
    Flag('device', str, 'cuda', 'device to train on'),
    Flag('amp', bool, False, 'mixed precision'),
    Flag('amp_dtype', str, 'float16', 'its lower precision', ('float16', 'bfloat16')),
    Flag('no_ddp_bb', bool, False, 'do not broadcast buffers in DDP'),
    Flag('device_modules', str, None, 'Python modules to import first', many=True),
)

_OPTIMIZER = (
    Flag('opt', str, 'sgd', 'optimizer'),
    Flag('opt_eps', float, None, 'its epsilon (default: its own)'),
    Flag('opt_betas', float, None, 'its betas (default: its own)', many=True),
    Flag('momentum', float, 0.9, 'its momentum'),
    Flag('weight_decay', float, 2e-5, 'weight decay; not on biases, 1-D and what the model excludes', least=0),
    Flag('clip_grad', float, None, 'gradient clipping (default: none)', least=0),
    Flag('clip_mode', str, 'norm', 'how to clip', ('norm', 'value', 'agc')),
    Flag('layer_decay', float, None, 'factor on the learning rate from each layer to the one below', least=0),
    Flag('layer_decay_min_scale', float, 0.0, 'lower bound of that factor'),
    Flag('layer_decay_no_opt_scale', float, None, 'layers whose factor is below this are frozen'),
    Flag('opt_kwargs', dict, {}, 'key=value pairs for the optimizer'),
)

_SCHEDULE = (
    Flag('sched', str, 'cosine', 'learning rate schedule', SCHEDULERS),
    Flag('sched_on_updates', bool, False, 'step it on updates instead of epochs'),
    Flag('lr', float, None, 'learning rate; overrides lr_base', least=0),
    Flag('lr_base', float, 0.1, 'lr = lr_base * scale(global batch / lr_base_size)', least=0),
    Flag('lr_base_size', int, 256, 'batch that lr_base belongs to', least=1),
    Flag('lr_base_scale', str, '', 'scale (default: sqrt for ada* and lamb, else linear)', ('', 'linear', 'sqrt')),
    Flag('lr_noise', float, None, 'noise on/off, as parts of the schedule', many=True),
    Flag('lr_noise_pct', float, 0.67, 'limit of the noise'),
    Flag('lr_noise_std', float, 1.0, 'deviation of the noise'),
    Flag('lr_cycle_mul', float, 1.0, 'factor on the cycle length'),
    Flag('lr_cycle_decay', float, 0.5, 'factor on the rate, per cycle'),
    Flag('lr_cycle_limit', int, 1, 'number of cycles', least=1),
    Flag('lr_k_decay', float, 1.0, 'k-decay of cosine and poly'),
    Flag('lr_decay_fn', str, None, "decay of wsd and rsqrt (default: the schedule's)"),
    Flag('lr_stable_timescale', float, None, 'time scale of rsqrt, in epochs (default: the warmup)'),
    Flag('warmup_lr', float, 1e-5, 'learning rate at the start of warmup', least=0),
    Flag('min_lr', float, 0.0, 'lower bound of the learning rate', least=0),
    Flag('epochs', int, 300, 'epochs of the schedule', least=1),
    Flag('stop_epoch', int, None, 'stop after this many epochs, the schedule unchanged', least=1),
    Flag('epoch_repeats', float, 0.0, 'repeats of the data per epoch, for iterable data sets', least=0),
    Flag('start_epoch', int, None, 'first epoch; overrides that of a checkpoint', least=0),
    Flag('decay_milestones', int, [90, 180, 270], 'epochs of the decays of multistep', many=True),
    Flag('decay_epochs', float, None, 'interval of step (default: 90), or length of the decay of wsd and rsqrt'),
    Flag('warmup_epochs', int, 5, 'epochs of warmup', least=0),
    Flag('warmup_prefix', bool, False, 'warmup comes before the schedule instead of within it'),
    Flag('cooldown_epochs', int, 0, 'epochs at min_lr after the schedule', least=0),
    Flag('patience_epochs', int, 10, 'patience of plateau', least=0),
    Flag('decay_rate', float, 0.1, 'factor per decay', alias='--dr'),
)

_AUGMENTATION = (
    Flag('no_aug', bool, False, 'no training augmentation at all'),
    Flag(
        'train_crop_mode',
        str,
        None,
        'rrc: random resized crop; rkrc, rkrr: keep the ratio, crop or pad at the centre, at random',
        ('rrc', 'rkrc', 'rkrr'),
    ),
    Flag('scale', float, [0.08, 1.0], 'range of the area of the random crop', many=True, length=2, nullable=True),
    Flag('ratio', float, [3 / 4, 4 / 3], 'range of its aspect ratio', many=True, length=2, nullable=True),
    Flag('hflip', float, 0.5, 'probability of a horizontal flip', least=0),
    Flag('vflip', float, 0.0, 'probability of a vertical flip', least=0),
    Flag('color_jitter', float, 0.4, 'colour jitter; replaced by aa where that is on', nullable=True),
    Flag('color_jitter_prob', float, None, 'probability of colour jitter (default: always)'),
    Flag('grayscale_prob', float, None, 'probability of dropping the colour'),
    Flag('gaussian_blur_prob', float, None, 'probability of a blur'),
    Flag('aa', str, None, 'AutoAugment, RandAugment, 3a, ... policy'),
    Flag('aug_repeats', float, 0.0, 'repeated augmentation; one-process runs say so and go without', least=0),
    Flag('bce_loss', bool, False, 'binary cross entropy'),
    Flag('bce_sum', bool, False, 'sum it over the classes'),
    Flag('bce_target_thresh', float, None, 'threshold that makes its soft targets binary'),
    Flag('bce_pos_weight', float, None, 'weight of its positives'),
    Flag('reprob', float, 0.0, 'probability of random erasing', least=0),
    Flag('remode', str, 'pixel', 'what random erasing fills in', ('const', 'rand', 'pixel')),
    Flag('recount', int, 1, 'number of erased rectangles', least=1),
    Flag('mixup', float, 0.0, 'alpha of mixup', least=0),
    Flag('cutmix', float, 0.0, 'alpha of cutmix', least=0),
    Flag('cutmix_minmax', float, None, 'range of the cut side; overrides the alpha', many=True, length=2),
    Flag('mixup_prob', float, 1.0, 'probability of mixing at all', least=0),
    Flag('mixup_switch_prob', float, 0.5, 'probability of cutmix where both are on', least=0),
    Flag('mixup_mode', str, 'batch', 'one mix per what', ('batch', 'pair', 'elem')),
    Flag('mixup_off_epoch', int, 0, 'no mixing from this epoch on; 0 for never', least=0),
    Flag('smoothing', float, 0.1, 'label smoothing', least=0),
    Flag('train_interpolation', str, 'random', 'resizing in training', ('random', *RESIZE_MODES)),
    Flag('drop', float, 0.0, 'dropout', least=0),
    Flag('drop_path', float, None, 'stochastic depth', least=0),
)

_EMA = (
    Flag('model_ema', bool, False, 'keep an exponential moving average of the weights'),
    Flag('model_ema_force_cpu', bool, False, 'keep it on the CPU; it is then not evaluated'),
    Flag('model_ema_decay', float, 0.9998, 'its decay per update', least=0),
    Flag('model_ema_warmup', bool, False, 'let the decay grow to that value'),
    Flag('best_by', str, 'model', 'whose metric chooses the best checkpoint', ('model', 'ema'), ours=True),
)

DISTILLATION = (
    Flag('kd_model_name', str, None, 'teacher, with its pretrained weights; local-dir:FOLDER for one of your own'),
    Flag('kd_distill_type', str, 'logit', 'what is distilled', ('logit', 'feature', 'token')),
    Flag('kd_loss_type', str, 'kl', 'loss between logits', ('kl',)),
    Flag('distill_loss_weight', float, None, 'weight of the distillation loss (default: 1, or 1 - task_loss_weight)'),
    Flag('task_loss_weight', float, None, 'weight of the loss on the labels (default: 1)'),
    Flag('kd_temperature', float, 4.0, 'temperature of both softmaxes, for logit and token', least=1e-6),
    Flag('kd_student_feature_dim', int, None, "width of the student's features (default: its own)", least=1),
    Flag('kd_teacher_feature_dim', int, None, "width of the teacher's features (default: its own)", least=1),
    Flag('kd_token_distill_type', str, 'soft', "the teacher's distribution, or its best class", ('soft', 'hard')),
)

_RUN = (
    Flag('seed', int, 42, 'random seed', least=0),
    Flag('worker_seeding', str, 'all', 'which generators of a loader worker are seeded', ('all', 'part')),
    Flag('log_interval', int, 50, 'updates between progress lines', least=1),
    Flag('val_interval', int, 1, 'epochs between validations and checkpoints', least=1),
    Flag('checkpoint_hist', int, 10, 'checkpoints to keep', least=1),
    Flag('save_epochs', int, None, 'completed epochs whose checkpoints are kept for good', many=True, least=1),
    Flag('workers', int, 4, 'loader processes', alias='-j', least=0),
    Flag('pin_mem', bool, False, 'pin host memory in the loader'),
    Flag('no_prefetcher', bool, False, 'normalise in the loader processes instead of on the device'),
    Flag('output', str, '', 'folder of experiments (default: output/train)'),
    Flag('experiment', str, '', 'name of the folder of this run (default: time, model, image side)'),
    Flag('eval_metric', str, 'top1', 'metric that chooses the best checkpoint', ('top1', 'top5', 'loss')),
    Flag('eval_only', bool, False, 'evaluate and stop', ours=True),
    Flag('figure', bool, False, "draw the masks of the trained model into the run's folder", ours=True),
    Flag('log_wandb', bool, False, 'log to wandb'),
    Flag('wandb_project', str, None, 'its project'),
    Flag('wandb_tags', str, [], 'its tags', many=True),
    Flag('wandb_resume_id', str, '', 'id of the wandb run to continue'),
)

GROUPS = {
    'data': _DATA,
    'model': _MODEL,
    'device': _DEVICE,
    'optimizer': _OPTIMIZER,
    'learning rate schedule': _SCHEDULE,
    'augmentation and regularisation': _AUGMENTATION,
    'moving average of the weights': _EMA,
    'distillation': DISTILLATION,
    'run': _RUN,
}

FLAGS = {flag.name: flag for group in GROUPS.values() for flag in group}

# Names of timm's train.py (1.0.31) that nothing here honours.
REFUSED = frozenset(
    """
    data local_rank model_dtype synchronize_step fuser torchscript pretrained_cfg_overlay
    aug_splits jsd_loss resplit split_bn sync_bn dist_bn bn_momentum bn_eps drop_connect drop_block
    recovery_interval save_images tta use_multi_epochs_loader sweep_locks sweep_attempt
    task target_format multilabel_threshold loss loss_class_weight loss_pos_weight loss_weight_power class_stats
    poly_epsilon poly_gamma
    train_img_sizes train_batch_sizes train_size_probs train_size_schedule train_size_schedule_spread
    train_size_random_mix train_batches_per_epoch train_steps_per_epoch variable_batch_loss_scale
    naflex_loader naflex_train_seq_lens naflex_max_seq_len naflex_patch_sizes naflex_patch_size_probs
    naflex_loss_scale naflex_patchify_channels_first
    """.split()  # noqa: SIM905, two hundred quotes and commas are harder to read
)


@dataclass(frozen=True)
class Table:
    """All flags of one command.

    Attributes:
        command: The command as it is typed.
        description: One line for `--help`.
        groups: Rows by the heading they have in `--help`.
        refused: Names of timm's flags that the command knows and does not honour.
    """

    command: str
    description: str
    groups: Mapping[str, tuple[Flag, ...]]
    refused: frozenset = frozenset()

    @cached_property
    def flags(self) -> dict[str, Flag]:
        """Rows by name."""
        return {flag.name: flag for group in self.groups.values() for flag in group}


TRAIN = Table(
    'violin train', "Train an image classifier. Flags and YAML keys are those of timm's train.py.", GROUPS, REFUSED
)


def shared(*names: str, **defaults: Any) -> tuple[Flag, ...]:
    """Rows of `violin train` for another command's table.

    Args:
        names: Which, with the defaults they have there.
        defaults: Which, with another default; None, where that was the default, stays allowed.
    """
    rows = [FLAGS[name] for name in names]
    for name, default in defaults.items():
        flag = FLAGS[name]
        rows.append(replace(flag, default=default, nullable=flag.nullable or flag.default is None))
    return tuple(rows)
