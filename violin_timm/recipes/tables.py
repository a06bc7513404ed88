"""The flags of `violin dino`, `violin knn` and `violin linear`. A row of `violin train` means here what it means there.

Nothing here imports torch, so `--help` and typos answer at once.
"""

from __future__ import annotations

from ..engine.flags import REFUSED, RESIZE_MODES, Flag, Table, shared

_DATA = shared(
    'data_dir', 'dataset', 'split_seed', 'dataset_download', 'class_map', 'input_img_mode', 'input_key', 'target_key',
    'dataset_trust_remote_code',
)  # fmt: skip
_DEVICE = shared('device', 'amp', 'amp_dtype', 'device_modules')
_EVALUATORS = ('knn', 'logistic')

DINO = Table(
    'violin dino',
    'Pretrain a backbone with DINO. Flags and YAML keys are those of violin train where both have them.',
    {
        'data': (*_DATA, *shared('train_split')),
        'model': (
            *shared('pretrained', 'pretrained_path', 'initial_checkpoint', 'resume', 'no_resume_opt', 'img_size'),
            *shared('in_chans', 'mean', 'std', 'interpolation', 'channels_last', 'grad_checkpointing', 'fast_norm'),
            *shared('model_kwargs', model='violin_dino_small', batch_size=64),
        ),
        'projection head': (
            Flag('out_dim', int, 65536, 'outputs of the head', least=2, ours=True),
            Flag('head_hidden_dim', int, 2048, 'width of its MLP', least=1, ours=True),
            Flag('head_bottleneck_dim', int, 256, 'outputs of its MLP', least=1, ours=True),
            Flag('head_layers', int, 3, 'linear layers of its MLP', least=1, ours=True),
            Flag('norm_last_layer', bool, True, 'keep the row norms of its last layer at 1', ours=True),
            Flag('freeze_last_layer', int, 1, 'epochs in which its last layer stays as it is', least=0, ours=True),
        ),
        'loss': (
            Flag('student_temp', float, 0.1, "the student's temperature", least=1e-6, ours=True),
            Flag('teacher_temp', float, 0.04, "the teacher's temperature after its warmup", least=1e-6, ours=True),
            Flag('warmup_teacher_temp', float, 0.04, 'and at the start', least=1e-6, ours=True),
            Flag('warmup_teacher_temp_epochs', int, 0, 'epochs of that warmup', least=0, ours=True),
            Flag('center_momentum', float, 0.9, 'part of the old centre in the new one', least=0, ours=True),
            Flag(
                'momentum_teacher',
                float,
                0.996,
                'part of the teacher that an update leaves, rising to 1',
                least=0,
                ours=True,
            ),
        ),
        'device': _DEVICE,
        'optimizer': (
            *shared('opt_eps', 'opt_betas', 'momentum', 'opt_kwargs', opt='adamw', weight_decay=0.04, clip_grad=3.0),
            Flag('weight_decay_end', float, 0.4, 'weight decay at the end, along a cosine', least=0, ours=True),
            Flag(
                'clip_mode',
                str,
                'each',
                'clip the norm of each gradient by itself, or as violin train does',
                ('each', 'norm', 'value'),
            ),
        ),
        'learning rate schedule': (
            *shared('lr', 'lr_base_size', 'stop_epoch', 'start_epoch', lr_base=5e-4, lr_base_scale='linear'),
            *shared(epochs=100, warmup_epochs=10, warmup_lr=0.0, min_lr=1e-6),
        ),
        'crops': (
            Flag(
                'global_size',
                int,
                None,
                "side of the teacher's views, in pixels (default: the model's)",
                least=1,
                ours=True,
            ),
            Flag('global_number', int, 2, 'how many of them', least=1, ours=True),
            Flag('global_scale', float, [0.4, 1.0], 'range of their part of the area', many=True, length=2, ours=True),
            Flag('local_size', int, [96], 'sides of the further views', many=True, least=1, ours=True),
            Flag('local_number', int, [8], 'how many of each side', many=True, least=0, ours=True),
            Flag('local_scale', float, [0.05, 0.4], 'range of their part of the area', many=True, length=2, ours=True),
            *shared('hflip', 'color_jitter_prob', 'grayscale_prob'),
            Flag(
                'jitter',
                float,
                [0.4, 0.4, 0.2, 0.1],
                'brightness, contrast, saturation, hue',
                many=True,
                length=4,
                least=0,
                ours=True,
            ),
            Flag(
                'blur_prob',
                float,
                [1.0, 0.1, 0.5],
                'blur: first view, further global ones, local ones',
                many=True,
                length=3,
                least=0,
                ours=True,
            ),
            Flag(
                'blur_radius',
                float,
                [0.1, 2.0],
                'range of its radius in pixels',
                many=True,
                length=2,
                least=0,
                ours=True,
            ),
            Flag('solarize_prob', float, 0.2, 'solarize, on the second view alone', least=0, ours=True),
            Flag('train_interpolation', str, 'bicubic', 'resizing of the views', RESIZE_MODES[1:]),
            *shared('drop', drop_path=0.1),
        ),
        'evaluation': (
            Flag('val_split', str, '', 'held-out split that is classified during training; empty for none'),
            Flag('gallery_split', str, '', 'labelled split to classify it by (default: train_split)', ours=True),
            Flag('eval_interval', int, 10, 'epochs between evaluations; the last is always one', least=1, ours=True),
            Flag('evaluators', str, ['knn'], 'by what: k-NN, logistic regression', _EVALUATORS, many=True, ours=True),
            Flag('k', int, [10, 20], 'neighbours', many=True, least=1, ours=True),
            Flag('temperature', float, 0.07, 'of their votes', least=1e-6, ours=True),
            *shared('validation_batch_size', crop_pct=0.875),
        ),
        'run': (
            *shared('seed', 'log_interval', 'save_epochs', 'workers', 'pin_mem', 'experiment', output='output/dino'),
            *shared('log_wandb', 'wandb_project', 'wandb_tags', 'wandb_resume_id', checkpoint_hist=1),
        ),
    },
    REFUSED,
)

_FROZEN = (
    Flag('checkpoint', str, '', 'file of weights: ours, timm\'s or the authors\'; every key must fit', ours=True),
    Flag('weights', str, 'teacher', "whose (a moving average is a teacher's); untrained: what its training began with",
         ('teacher', 'student', 'untrained'), ours=True),
    *shared('pretrained', 'in_chans', 'img_size', 'crop_pct', 'mean', 'std', 'interpolation', 'model_kwargs'),
    *shared('validation_batch_size', 'fast_norm', model='', batch_size=128),
)  # fmt: skip
_RUN = (
    Flag('results', str, '', 'JSON file to add the numbers to; print it with --table', ours=True),
    Flag('table', bool, False, 'print all of it at the end', ours=True),
    Flag('title', str, '', 'name of the model in the table (default: the checkpoint, or the model)', ours=True),
    *shared('seed', 'workers', 'pin_mem'),
)
_INHERITING = (
    'Model, data set and normalisation are those that the checkpoint was trained with, unless given. The data are read '
    'as by violin train.'
)

KNN = Table(
    'violin knn',
    f'Weighted k-NN on frozen features. {_INHERITING}',
    {
        'data': (
            *_DATA,
            Flag('gallery_split', str, 'train', 'labelled split to classify by', ours=True),
            Flag('query_split', str, 'validation', 'split to classify', ours=True),
        ),
        'model': _FROZEN,
        'k-NN': (
            Flag('k', int, [10, 20, 100, 200], 'neighbours', many=True, least=1, ours=True),
            Flag('temperature', float, 0.07, 'of their votes', least=1e-6, ours=True),
            Flag('pixels', bool, False, 'measure raw pixels on the same gallery, too', ours=True),
        ),
        'device': _DEVICE,
        'run': _RUN,
    },
    REFUSED,
)

LINEAR = Table(
    'violin linear',
    f'A linear classifier on frozen features. {_INHERITING}',
    {
        'data': (
            *_DATA,
            *shared('train_split', 'val_split', 'num_classes', 'scale', 'ratio', 'hflip'),
            *shared(train_interpolation='bicubic'),
        ),
        'model': _FROZEN,
        'classifier': (
            Flag('blocks', int, 4, 'class tokens of how many last blocks', least=1, ours=True),
            Flag('patch_mean', bool, False, 'append the mean patch token of the last block', ours=True),
            Flag('closed', bool, False, 'logistic regression on features computed once, instead of SGD', ours=True),
            Flag('cost', float, 1.0, "its C: the loss's weight against the penalty |W|^2 / 2", least=1e-12, ours=True),
            *shared('lr', 'lr_base_size', 'momentum', lr_base=1e-3, lr_base_scale='linear', epochs=100),
            *shared(weight_decay=0.0, val_interval=10),
        ),
        'device': _DEVICE,
        'run': (*_RUN, *shared('log_interval')),
    },
    REFUSED,
)
