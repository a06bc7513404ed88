"""Values of one parameter of a sweep: all of them for a grid, or drawn from one of wandb's distributions.

A distribution is a row of `DISTRIBUTIONS`; where none is named it follows from the keys, as wandb documents.
"""

from __future__ import annotations

import math
import random
from typing import Any, Callable, Mapping

from ..engine.config import ConfigError, nearest

__all__ = ['DISTRIBUTIONS', 'draw', 'grid_values']

Draw = Callable[[random.Random, Mapping[str, Any]], Any]
BOUNDS: dict[str, Any] = {'min': None, 'max': None}
NORMAL = {'mu': 0.0, 'sigma': 1.0}


def _quantised(sample: Draw) -> Draw:
    """The draw rounded to multiples of `q`; whole numbers where `q` is one."""

    def _draw(generator: random.Random, spec: Mapping[str, Any]) -> Any:
        return _multiple(round(sample(generator, spec) / spec['q']), spec['q'])

    return _draw


def _multiple(count: int, q: float) -> Any:
    return count * q if isinstance(q, int) else float(f'{count * q:.12g}')  # 0.3, not 0.30000000000000004


def _log_uniform(generator: random.Random, spec: Mapping[str, Any]) -> float:
    return math.exp(generator.uniform(math.log(spec['min']), math.log(spec['max'])))


# name: (keys with their defaults, None where there is none; draw)
_CONTINUOUS: dict[str, tuple[dict[str, Any], Draw]] = {
    'uniform': (BOUNDS, lambda g, s: g.uniform(s['min'], s['max'])),
    'log_uniform': (BOUNDS, lambda g, s: math.exp(g.uniform(s['min'], s['max']))),
    'log_uniform_values': (BOUNDS, _log_uniform),
    'normal': (NORMAL, lambda g, s: g.gauss(s['mu'], s['sigma'])),
    'log_normal': (NORMAL, lambda g, s: math.exp(g.gauss(s['mu'], s['sigma']))),
    'beta': ({'a': 1.0, 'b': 1.0}, lambda g, s: g.betavariate(s['a'], s['b'])),
}
DISTRIBUTIONS: dict[str, tuple[dict[str, Any], Draw]] = {
    'constant': ({'value': None}, lambda g, s: s['value']),
    'categorical': ({'values': None}, lambda g, s: g.choice(s['values'])),
    'categorical_w_probabilities': (
        {'values': None, 'probabilities': None},
        lambda g, s: g.choices(s['values'], s['probabilities'])[0],
    ),
    'int_uniform': (BOUNDS, lambda g, s: g.randint(s['min'], s['max'])),
    'inv_log_uniform': (BOUNDS, lambda g, s: math.exp(-g.uniform(s['min'], s['max']))),
    'inv_log_uniform_values': (BOUNDS, _log_uniform),
    **_CONTINUOUS,
    **{f'q_{name}': ({**keys, 'q': 1}, _quantised(sample)) for name, (keys, sample) in _CONTINUOUS.items()},
}


def draw(name: str, spec: Mapping[str, Any], generator: random.Random) -> Any:
    """One value of the parameter `name`, from its distribution.

    Raises:
        ConfigError: There is no such distribution, or a key of it is missing, unknown or no fit.
    """
    distribution, full = _complete(name, spec)
    return DISTRIBUTIONS[distribution][1](generator, full)


def grid_values(name: str, spec: Mapping[str, Any]) -> list[Any]:
    """All values of the parameter `name`.

    Raises:
        ConfigError: As `draw`, or its distribution has no grid.
    """
    distribution, full = _complete(name, spec)
    if distribution == 'constant':
        return [full['value']]
    if distribution == 'categorical':
        values = full['values']
        if len(set(map(str, values))) < len(values):
            raise ConfigError(f'parameters: {name}: got {values}; each value may be given once')
        return values
    if distribution == 'int_uniform':
        return list(range(full['min'], full['max'] + 1))
    if distribution == 'q_uniform':
        count = math.ceil((full['max'] - full['min']) / full['q'] - 1e-9)  # max excluded, as wandb does
        return [float(f'{full["min"] + step * full["q"]:.12g}') for step in range(count)]
    allowed = 'constant, categorical, int_uniform, q_uniform'
    raise ConfigError(f'parameters: {name}: distribution: got {distribution!r}; a grid takes {allowed}')


def _complete(name: str, spec: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The distribution's name, and its keys with the defaults filled in."""
    distribution = spec.get('distribution') or _implied(name, spec)
    if distribution not in DISTRIBUTIONS:
        among = f'; choose from {", ".join(DISTRIBUTIONS)}'
        raise ConfigError(f'parameters: {name}: distribution: got {distribution!r}{among}')
    keys = DISTRIBUTIONS[distribution][0]
    for key in spec:
        if key not in keys and key != 'distribution':
            raise ConfigError(f'parameters: {name}: unknown key {key!r} of {distribution}{nearest(str(key), keys)}')
    full = {**keys, **{key: value for key, value in spec.items() if key != 'distribution'}}
    for key, value in full.items():
        _check(name, distribution, key, value)
    if 'max' in full and not full['min'] < full['max']:
        raise ConfigError(f'parameters: {name}: got min {full["min"]}, max {full["max"]}; expected min below max')
    if 'probabilities' in full and len(full['probabilities']) != len(full['values']):
        raise ConfigError(f'parameters: {name}: got {len(full["probabilities"])} probabilities for {full["values"]}')
    return distribution, full


def _implied(name: str, spec: Mapping[str, Any]) -> str:
    if 'value' in spec:
        return 'constant'
    if 'values' in spec:
        return 'categorical_w_probabilities' if 'probabilities' in spec else 'categorical'
    if 'min' in spec and 'max' in spec:
        return 'int_uniform' if type(spec['min']) is type(spec['max']) is int else 'uniform'
    raise ConfigError(f'parameters: {name}: got {dict(spec)}; expected value, values, min and max, or a distribution')


def _check(name: str, distribution: str, key: str, value: Any) -> None:
    """Refuse a missing key, and what is no list or number of the right kind."""
    if value is None:
        raise ConfigError(f'parameters: {name}: {key}: got none; {distribution} needs it')
    if key in ('values', 'probabilities'):
        if not isinstance(value, list) or not value:
            raise ConfigError(f'parameters: {name}: {key}: got {value!r}; expected a list')
    elif key != 'value':
        types = int if distribution == 'int_uniform' else (int, float)
        if not isinstance(value, types) or isinstance(value, bool):
            kind = 'a whole number' if types is int else 'a number (in YAML, 1e-3 is a text; write 1.0e-3)'
            raise ConfigError(f'parameters: {name}: {key}: got {value!r}; expected {kind}')
        if value <= 0 and (key in ('q', 'a', 'b') or (key == 'min' and distribution.endswith('_values'))):
            raise ConfigError(f'parameters: {name}: {key}: got {value!r}; expected more than 0')
