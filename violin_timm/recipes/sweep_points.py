"""A sweep file in wandb's format, read into points: the parameters of one run each.

wandb refuses keys that it does not know, but `description` is free text. What its format cannot say therefore stands
at the end of that text, as YAML below a line `table:`; `Table` lists the keys. All other keys are wandb's, and
mean what they mean there.
One parameter value is one text, number or truth value, as wandb hands it on: `model-kwargs: mask=none alpha=none`.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Iterator, Mapping

import yaml

from ..engine.config import ConfigError, _Loader, as_dict, nearest, parse
from ..engine.flags import FLAGS
from .sweep_draws import draw, grid_values

__all__ = ['Point', 'Sweep', 'Table', 'read_sweep']

KEYS = ('program', 'command', 'method', 'metric', 'parameters', 'run_cap', 'name', 'project', 'entity', 'description')
UNSUPPORTED = frozenset('controller early_terminate image_uri job metrics scheduler'.split())  # noqa: SIM905
MACROS = ('${env}', '${interpreter}', '${program}', '${args}')
OURS = ('output', 'experiment', 'resume', 'eval_only')  # flags that the runner sets, or that end without a result
LONGEST = 100  # characters of a folder's name


@dataclass(frozen=True)
class Table:
    """The `table:` section: how runs are compared.

    Attributes:
        seed_parameter: Runs that differ in it alone are repetitions; runs of two arms that share it are a pair.
        baseline: Arm that the others are compared with; None for no comparison.
        arms: Short names: `name: value` where one parameter makes the arms, else `name: {parameter: value, ...}`.
        select: Parameters chosen for each arm by the mean of `select_by` over seeds, in the sense of `metric.goal`.
        select_by: Key of `result.json`, a dot for each level; a validation metric, never the test's.
        report: Keys of `result.json` in the table.
        random_seed: Seed of the draws of `method: random`.
    """

    seed_parameter: str = 'seed'
    baseline: str | None = None
    arms: Mapping[str, Any] = field(default_factory=dict)
    select: tuple[str, ...] = ()
    select_by: str = 'best_metric'
    report: tuple[str, ...] = ('best_metric',)
    random_seed: int = 0


@dataclass(frozen=True)
class Point:
    """One run.

    Attributes:
        name: Of its folder: the parameters that vary, with a hash where they are too long or not fit for one.
        parameters: All, by name.
        arguments: For `violin train`.
        settings: What these come to, with the config read and the defaults filled in.
        arm: Name of the arm it belongs to.
        choice: Values of the selected parameters, as text; empty without selection.
        seed: Value of the seed parameter, as text; empty where there is none.
    """

    name: str
    parameters: Mapping[str, Any]
    arguments: tuple[str, ...]
    settings: Mapping[str, Any]
    arm: str
    choice: str
    seed: str


@dataclass(frozen=True)
class Sweep:
    """A sweep file: its points, in the order in which they run, and how they are compared."""

    path: Path
    points: tuple[Point, ...]
    table: Table
    maximize: bool


def read_sweep(path: Path, log_wandb: bool = False) -> Sweep:
    """Read and check a sweep file, every point's settings included.

    Args:
        path: The file.
        log_wandb: Keep a `--log-wandb` of its `command`, which is there for wandb's agent.

    Raises:
        ConfigError: A key, value or point that cannot be.
    """
    try:
        content = yaml.load(path.read_text(encoding='utf-8'), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise ConfigError(f'sweep: {path} is not YAML: {err}') from err
    try:
        return _sweep(path, content, log_wandb)
    except ConfigError as err:
        raise ConfigError(f'{path}: {err}') from err


def _sweep(path: Path, content: Any, log_wandb: bool) -> Sweep:
    _check_keys(content)
    table = read_table(content.get('description', ''))
    fixed = [word for word in fixed_arguments(content) if log_wandb or word != '--log-wandb']
    goal = _goal(content.get('metric', {}), table)
    specs = content['parameters']
    for name, spec in specs.items():
        _check_parameter(str(name), spec)
    varying = [name for name, spec in specs.items() if 'value' not in spec]
    for name in table.select:
        if name not in varying or name == table.seed_parameter:
            choices = ', '.join(other for other in varying if other != table.seed_parameter)
            raise ConfigError(f'table: select: got {name!r}; choose from the parameters that vary: {choices}')
    drawn = _grid(specs, table) if content['method'] == 'grid' else _random(specs, table, content.get('run_cap'))
    points = {}
    for parameters in itertools.islice(drawn, content.get('run_cap')):
        point = _point(parameters, varying, fixed, table)
        points.setdefault(point.name, point)
    _check_arms(table, points.values(), [n for n in varying if n not in (table.seed_parameter, *table.select)])
    return Sweep(path, tuple(points.values()), table, goal == 'maximize')


def _check_keys(content: Any) -> None:
    if not isinstance(content, dict):
        raise ConfigError(f'got {type(content).__name__}; expected a mapping with method and parameters')
    for key in content:
        if key in UNSUPPORTED:
            raise ConfigError(f"{key} is a key of wandb's that violin sweep does not support")
        if key not in KEYS:
            hint = '; it belongs under table: in the description' if key in _table_keys() else nearest(str(key), KEYS)
            raise ConfigError(f'unknown key {key!r}{hint}')
    if content.get('method') not in ('grid', 'random'):
        raise ConfigError(f'method: got {content.get("method")!r}; choose from grid, random')
    if not isinstance(content.get('parameters'), dict) or not content['parameters']:
        raise ConfigError(f'parameters: got {content.get("parameters")!r}; expected a mapping of flags to values')
    cap = content.get('run_cap')
    if cap is not None and (type(cap) is not int or cap < 1):
        raise ConfigError(f'run_cap: got {cap!r}; expected a whole number, at least 1')
    if cap is None and content['method'] == 'random':
        raise ConfigError('run_cap: got none; method random needs it, or it would never end')


def _table_keys() -> list[str]:
    return [entry.name for entry in fields(Table)]


def read_table(description: Any) -> Table:
    """The `table:` section of a description: what follows the first line that is one word and a colon."""
    lines = str(description).splitlines()
    heads = [number for number, line in enumerate(lines) if re.fullmatch(r'[\w-]+:\s*', line)]
    if not heads:
        return Table()
    if (title := lines[heads[0]].strip()) != 'table:':
        raise ConfigError(f'description: unknown section {title!r}; violin sweep reads one called table:')
    try:
        content = yaml.load('\n'.join(lines[heads[0] :]), Loader=_Loader)
    except yaml.YAMLError as err:
        raise ConfigError(f'description: what follows table: is not YAML: {err}') from err
    if set(content) != {'table'} or not isinstance(content['table'] or {}, dict):
        raise ConfigError('description: table: must come last, and hold a mapping')
    values = content['table'] or {}
    expected = {'baseline': str, 'seed_parameter': str, 'select_by': str, 'arms': dict, 'random_seed': int}
    for key, value in values.items():
        if key not in _table_keys():
            raise ConfigError(f'table: unknown key {key!r}{nearest(str(key), _table_keys())}')
        if key in ('select', 'report'):
            value = values[key] = tuple([value] if isinstance(value, str) else value or ())
            if not all(isinstance(item, str) for item in value):
                raise ConfigError(f'table: {key}: got {value!r}; expected a name or a list of names')
        elif not isinstance(value, expected[key]):
            raise ConfigError(f'table: {key}: got {value!r}; expected {expected[key].__name__}')
    return Table(**values)


def fixed_arguments(content: Mapping[str, Any]) -> list[str]:
    """Arguments that `command` gives to every run; it, or `program`, must start `violin train`."""
    command, program = content.get('command', list(MACROS)), content.get('program')
    if not isinstance(command, list) or '${args}' not in command:
        raise ConfigError(f'command: got {command!r}; expected a list with ${{args}}, where the parameters go')
    for word in command:
        if str(word).startswith('${') and word not in MACROS:
            raise ConfigError(f'command: got {word!r}; choose from {", ".join(MACROS)}')
    words = [str(word) for word in command if word not in MACROS]
    for start in (['-m', 'violin_timm', 'train'], ['violin', 'train']):
        if words[: len(start)] == start:
            return words[len(start) :]
    if Path(str(program)).name != 'train.py':
        raise ConfigError(f'program: got {program!r}; violin sweep runs violin train, for wandb scripts/train.py')
    return words


def _goal(metric: Any, table: Table) -> str:
    """`minimize`, wandb's default, or `maximize`."""
    for key in metric if isinstance(metric, dict) else [metric]:
        if key not in ('name', 'goal', 'target'):
            raise ConfigError(f'metric: got {key!r}; expected a mapping of name, goal')
    if (goal := metric.get('goal', 'minimize')) not in ('minimize', 'maximize'):
        raise ConfigError(f'metric: goal: got {goal!r}; choose from minimize, maximize')
    if table.select and 'goal' not in metric:
        raise ConfigError(f'metric: goal: got none; select needs it, to know whether {table.select_by} should be high')
    return goal


def _check_parameter(name: str, spec: Any) -> None:
    key = name.replace('-', '_')
    if key in OURS:
        raise ConfigError(f'parameters: {name} is set by violin sweep itself')
    if key not in FLAGS and key != 'config':
        raise ConfigError(f'parameters: unknown flag {name!r}{nearest(key, FLAGS)}')
    if not isinstance(spec, dict):
        raise ConfigError(f'parameters: {name}: got {spec!r}; expected value, values, or a distribution')
    listed = [spec['value']] if 'value' in spec else spec.get('values', [])
    for value in listed if isinstance(listed, list) else [listed]:
        if not isinstance(value, (str, int, float)):
            raise ConfigError(f'parameters: {name}: got {value!r}; expected a text, in it spaces between several')


def _grid(specs: Mapping[str, Any], table: Table) -> Iterator[dict[str, Any]]:
    """All combinations, the seed changing last, so that an unfinished sweep already compares all arms."""
    values = {name: grid_values(name, spec) for name, spec in specs.items()}
    order = sorted(values, key=lambda name: name != table.seed_parameter)
    for combination in itertools.product(*(values[name] for name in order)):
        parameters = dict(zip(order, combination))
        yield {name: parameters[name] for name in values}


def _random(specs: Mapping[str, Any], table: Table, cap: int) -> Iterator[dict[str, Any]]:
    generator = random.Random(table.random_seed)
    for _ in range(cap):
        yield {name: draw(name, spec, generator) for name, spec in specs.items()}


def _point(parameters: dict[str, Any], varying: list[str], fixed: list[str], table: Table) -> Point:
    arguments = (*fixed, *itertools.chain.from_iterable(_argument(*item) for item in parameters.items()))
    chosen = {name: parameters[name] for name in varying}
    seed = str(chosen.pop(table.seed_parameter, ''))
    choice = ', '.join(str(chosen.pop(name)) for name in table.select)
    return Point(
        folder_name({name: parameters[name] for name in varying}),
        parameters,
        arguments,
        as_dict(parse(list(arguments))),
        _arm(chosen, table),
        choice,
        seed,
    )


def _argument(name: str, value: Any) -> list[str]:
    """A parameter on the command line; the parts of a flag that takes several are apart there."""
    option, flag = '--' + name.replace('_', '-'), FLAGS.get(name.replace('-', '_'))
    if flag and (flag.many or flag.type is dict):
        return [option, *str(value).split()]
    return [f'{option}={value}']


def folder_name(parameters: Mapping[str, Any]) -> str:
    """`lr=0.001__model-kwargs=mask=none+alpha=none__seed=0`; a hash makes up for what a name cannot hold."""
    text = '__'.join(f'{name}={value}' for name, value in sorted(parameters.items())) or 'run'
    name = re.sub(r'[^\w.,=+-]', '_', text.replace(' ', '+'), flags=re.ASCII)
    if name.replace('+', ' ') == text and len(name) <= LONGEST:
        return name
    digest = hashlib.sha256(json.dumps(parameters, sort_keys=True).encode()).hexdigest()[:10]
    return f'{name[: LONGEST - 11]}-{digest}'


def _arm(chosen: Mapping[str, Any], table: Table) -> str:
    """The short name of the arm and what it leaves open, or the values that make it."""
    rest, names = dict(chosen), []
    for name, wanted in table.arms.items():
        wanted = wanted if isinstance(wanted, dict) else dict.fromkeys(chosen, wanted)
        if wanted and all(key in chosen and str(chosen[key]) == str(value) for key, value in wanted.items()):
            names, rest = [name], {key: value for key, value in chosen.items() if key not in wanted}
            break
    if len(chosen) == 1 and rest:
        return str(*rest.values()) or 'default'
    return ' '.join(names + [f'{key}={value}' for key, value in rest.items()]) or 'all'


def _check_arms(table: Table, points: Any, names: list[str]) -> None:
    arms = list(dict.fromkeys(point.arm for point in points))
    for name in table.arms:
        if not any(arm == name or arm.startswith(f'{name} ') for arm in arms):
            raise ConfigError(f'table: arms: {name!r} fits no point; the parameters are {", ".join(names)}')
    if table.baseline is not None and table.baseline not in arms:
        raise ConfigError(f'table: baseline: got {table.baseline!r}; choose from {", ".join(arms)}')
