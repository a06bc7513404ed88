"""From a command line and a YAML file to the settings of a run, refusing whatever is not one.

    command line  >  YAML file (--config)  >  defaults of the command's table

Both sources pass through `coerce`, so a value means the same wherever it is written: YAML 1.1 reads `lr: 1e-3` as text,
and it becomes the number that `--lr 1e-3` is. Nothing here imports torch or timm, so `--help` and typos answer at once.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import math
import re
import sys
from pathlib import Path
from typing import Any, Iterable, Mapping, NoReturn

import yaml

from .flags import TRAIN, Flag, Table

PACKAGE = Path(__file__).resolve().parent.parent
WORDS = {'true': True, 'yes': True, 'on': True, '1': True, 'false': False, 'no': False, 'off': False, '0': False}
EXPECTED = {
    bool: 'true or false',
    int: 'a whole number',
    float: 'a number',
    str: 'text (in YAML, quote it)',
    dict: 'key=value pairs (in YAML, a mapping)',
}
EXPONENT = re.compile(r'[+-]?(\d+\.?\d*|\.\d+)[eE][+-]?\d+')


class ConfigError(ValueError):
    """A setting that cannot be; its message names the key, what came and what is allowed."""


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice, of which YAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        seen = []
        for node_of_key, _ in node.value:
            key = self.construct_object(node_of_key, deep=True)
            if key in seen:
                raise ConfigError(f'{key}: given twice, the second time on line {node_of_key.start_mark.line + 1}')
            seen.append(key)
        return super().construct_mapping(node, deep)


def nearest(name: str, names: Iterable[str], among: str = '') -> str:
    """`; did you mean ...?`, or `; choose from ...` where the choices are few and none is near, or nothing."""
    names = sorted(names)
    close = difflib.get_close_matches(name, names, n=1)
    if close:
        return f'; did you mean {close[0]}?'
    return f'; choose from {", ".join(names)}' if len(names) <= 20 else among


def refuse(name: str, where: str, spelled: str | None = None, table: Table = TRAIN) -> NoReturn:
    """Raise `ConfigError` for a name that is no flag of ours.

    Args:
        name: Normalised name, with underscores.
        where: The file it came from, or '' for the command line.
        spelled: How it was written there.
        table: Flags of the command.
    """
    spelled = spelled or name
    inside = f' in {where}' if where else ''
    if name in table.refused:
        hint = ' (use --data-dir)' if name == 'data' else ''
        raise ConfigError(f'{spelled}{inside} is a timm flag that {table.command} does not support{hint}')
    kind = 'key' if where else 'flag'
    hint = nearest(name, table.flags)
    if not where:
        hint = re.sub(r'mean (\w+)', lambda found: 'mean ' + table.flags[found[1]].option, hint)
    raise ConfigError(f'unknown {kind} {spelled!r}{inside}{hint}')


def coerce(flag: Flag, value: Any, where: str = '') -> Any:
    """`value`, from YAML or as text from the command line, as the flag's type.

    Raises:
        ConfigError: The value does not fit the flag's type, length or choices.
    """
    if value is None:
        if flag.default is None or flag.nullable:
            return None
        _misfit(flag, value, where)
    if flag.type is dict:
        return _pairs(flag, value, where)
    if not flag.many:
        return _one(flag, value, where)
    least, most = (flag.length, flag.length) if flag.length else (0 if flag.default == [] else 1, math.inf)
    if not isinstance(value, (list, tuple)) or not least <= len(value) <= most:
        _misfit(flag, value, where)
    return [_one(flag, item, where) for item in value]


def _one(flag: Flag, value: Any, where: str) -> Any:
    """A single value as `flag.type`; bools are no numbers, fractions no whole numbers, numbers no text."""
    result = value
    if flag.const is not None and isinstance(value, bool):
        result = flag.const if value else None
    elif flag.type is bool and isinstance(value, str):
        result = WORDS.get(value.lower(), value)
    elif flag.type in (int, float) and isinstance(value, (str, int)) and not isinstance(value, bool):
        try:
            result = flag.type(value)
        except ValueError:
            _misfit(flag, value, where)
    if result is not None and type(result) is not flag.type:
        _misfit(flag, value, where)
    if flag.choices and result not in flag.choices:
        _misfit(flag, value, where)
    # Written so that nan, which no comparison holds for, is refused too.
    if isinstance(result, (int, float)) and not result >= (-math.inf if flag.least is None else flag.least):
        _misfit(flag, value, where)
    return result


def _pairs(flag: Flag, value: Any, where: str) -> dict:
    """A mapping from YAML, or `key=value` texts, whose values are Python literals where they can be (as timm's are)."""
    if isinstance(value, Mapping):
        # The one gap between YAML and Python literals: YAML 1.1 reads 1e-3 as text.
        number = {key: float(v) for key, v in value.items() if isinstance(v, str) and EXPONENT.fullmatch(v)}
        return {str(key): number.get(key, v) for key, v in value.items()}
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) and '=' in v for v in value if v):
        _misfit(flag, value, where)
    result = {}
    pairs = []
    for item in filter(None, value):  # an agent of wandb hands all pairs over as one text
        parts = re.split(r'\s+(?=\w+=)', item.strip())
        pairs += parts if all('=' in part for part in parts) else [item.strip()]  # a key may have a blank in it
    for key, text in (pair.split('=', 1) for pair in pairs):
        try:
            result[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            result[key] = text
    return result


def _misfit(flag: Flag, value: Any, where: str) -> NoReturn:
    expected = EXPECTED[flag.type] + ('' if flag.least is None else f', at least {flag.least}')
    if flag.many:
        expected = f'a list of {flag.length or "one or more"}, each {expected}'
    if flag.choices:
        expected = 'one of ' + ', '.join(repr(choice) if choice == '' else choice for choice in flag.choices)
    inside = f' in {where}' if where else ''
    raise ConfigError(f'{flag.name}: got {value!r}{inside}; expected {expected}')


def find_config(name: str) -> Path:
    """Path of a config: as given, else below the configs that ship with the package or the clone.

    `configs/quick/digits.yaml` and `quick/digits.yaml` are therefore found from any folder.

    Raises:
        ConfigError: There is no such file.
    """
    roots = [PACKAGE]
    if (PACKAGE.parent / 'pyproject.toml').is_file():
        roots.append(PACKAGE.parent)
    places = [Path(name)] + [place for root in roots for place in (root / name, root / 'configs' / name)]
    for place in places:
        if place.is_file():
            return place
    shipped = [str(path.relative_to(root)) for root in roots for path in root.glob('configs/**/*.yaml')]
    raise ConfigError(f'config: no file {name!r}{nearest(name, set(shipped))}')


def read_yaml(path: Path, table: Table = TRAIN) -> dict[str, Any]:
    """The settings a YAML file names, coerced. `batch-size` and `batch_size` are one key.

    Raises:
        ConfigError: The file is not a mapping, or a key or value is not one of ours.
    """
    try:
        content = yaml.load(path.read_text(encoding='utf-8'), Loader=_Loader)
    except (yaml.YAMLError, UnicodeDecodeError) as err:
        raise ConfigError(f'config: {path} is not YAML: {err}') from err
    except ConfigError as err:
        raise ConfigError(f'{err} of {path}') from err
    if not isinstance(content or {}, dict):
        raise ConfigError(f'config: {path} holds {type(content).__name__}; expected a mapping of flag names to values')
    values: dict[str, Any] = {}
    for key, value in (content or {}).items():
        name = str(key).replace('-', '_')
        if name not in table.flags:
            refuse(name, str(path), str(key), table)
        if name in values:
            raise ConfigError(f'{name}: given twice in {path}')
        values[name] = coerce(table.flags[name], value, str(path))
    return values


class _Parser(argparse.ArgumentParser):
    """argparse that raises instead of leaving the program."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def build_parser(table: Table = TRAIN) -> argparse.ArgumentParser:
    """The parser of a command. It returns the flags that were given, as text, and no defaults.

    Every boolean takes an optional value, so that `--amp off` overrides a YAML file that says `amp: true`.
    """
    parser = _Parser(
        prog=table.command,
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        usage='%(prog)s [--config FILE] [--flag value ...]',
        description=table.description,
    )
    parser.add_argument('-c', '--config', metavar='FILE', help='YAML file of flag names; the command line beats it')
    for title, flags in table.groups.items():
        group = parser.add_argument_group(title)
        for flag in flags:
            names = [flag.option] + ([flag.alias] if flag.alias else [])
            nargs = flag.length or ('*' if flag.type is dict else '+' if flag.many else None)
            bare = {'nargs': '?', 'const': True} if flag.type is bool or flag.const else {'nargs': nargs}
            shown = f' (default: {flag.default})' if flag.default not in (None, '', False, {}, []) else ''
            among = f'; one of {", ".join(c for c in flag.choices if c)}' if flag.choices else ''
            metavar = 'K=V' if flag.type is dict else flag.type.__name__.upper()
            group.add_argument(
                *names,
                dest=flag.name,
                metavar='on|off' if flag.type is bool else metavar,
                help=(flag.help + among + shown).replace('%', '%%'),
                **bare,
            )
    return parser


def parse(argv: list[str] | None = None, table: Table = TRAIN) -> argparse.Namespace:
    """Settings of a run from a command line (default: the program's).

    Returns:
        One attribute per row of the table, in its order.

    Raises:
        ConfigError: Anything unknown, unsupported, mistyped or out of its choices.
    """
    given, rest = build_parser(table).parse_known_args(sys.argv[1:] if argv is None else argv)
    if rest:
        spelled = rest[0].split('=')[0]
        if not spelled.startswith('-'):
            raise ConfigError(f'unexpected argument {spelled!r}; the data set goes to --data-dir')
        refuse(spelled.lstrip('-').replace('-', '_'), '', spelled, table)
    named = vars(given)
    config = named.pop('config', None)
    values = read_yaml(find_config(config), table) if config else {}
    values.update({name: coerce(table.flags[name], value) for name, value in named.items()})
    return settings(table, **values)


def settings(table: Table = TRAIN, /, **values: Any) -> argparse.Namespace:
    """The settings of a run from Python: the defaults, and `values` over them, checked as those of a file are.

    Raises:
        ConfigError: As `parse`.
    """
    for name in values:
        if name not in table.flags:
            refuse(name, '', table=table)
    result = {name: copy.deepcopy(flag.default) for name, flag in table.flags.items()}
    result.update({name: coerce(table.flags[name], value) for name, value in values.items()})
    return argparse.Namespace(**result)


def completed(args: argparse.Namespace, **values: Any) -> argparse.Namespace:
    """Settings of another command with the rest of `violin train`'s flags at their defaults, for code that reads those.

    Args:
        args: Settings of the command; unchanged.
        values: What is to be otherwise.
    """
    return argparse.Namespace(**{**vars(settings()), **vars(args), **values})


def as_dict(args: argparse.Namespace) -> dict[str, Any]:
    """The settings as a plain dict in the order of their table: what `args.yaml` and checkpoints hold."""
    return dict(vars(args))


def as_yaml(args: argparse.Namespace) -> str:
    """Text of an `args.yaml` that reruns the run with `--config`: `resume: auto` is left out, all else is as given."""
    values = as_dict(args)
    if values.get('resume') == 'auto':
        values['resume'] = ''
    return yaml.safe_dump(values, sort_keys=False, default_flow_style=None, width=120)
