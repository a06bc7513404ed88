"""The house's import direction, and what is imported only when used.

curves <- geometry <- masks <- strategies <- settings <- backends <- attention <- models <- {data, engine, peft}
<- evals <- recipes <- commands. `viz` reads models and is imported by commands alone, or where a recipe draws.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import violin_timm

PACKAGE = Path(violin_timm.__file__).parent
ROOT = PACKAGE.parent

# Every part imports from its own layer and from those below. A new part counts as a command, which nothing may
# import, until it has its place here.
LAYERS = [
    {'curves'},
    {'geometry'},
    {'masks'},
    {'strategies'},
    {'settings'},
    {'backends'},
    {'attention'},
    {'models'},
    {'data', 'engine', 'peft'},
    {'evals'},
    {'recipes'},
    {'commands'},
]
LAYER = {part: level for level, parts in enumerate(LAYERS) for part in parts}
LAYER['viz'] = LAYER['models']
LAZY = ('wandb', 'peft', 'matplotlib', 'sklearn')


def part_of(module):
    """Part of the house of a dotted module name below the package; the package and its commands are 'commands'."""
    part = module.split('.')[0] if module else 'commands'
    return part if part in LAYER else 'commands'


def modules():
    """Dotted name below the package -> path, for the package's files and the scripts."""
    found = {}
    for path in sorted(PACKAGE.rglob('*.py')):
        parts = path.relative_to(PACKAGE).with_suffix('').parts
        found['.'.join(parts)] = path
    for path in sorted((ROOT / 'scripts').glob('*.py')):
        found[f'scripts.{path.stem}'] = path
    return found


def imported(name, path, inside_functions=True):
    """Dotted names below the package that a module imports."""
    package = name.split('.')[:-1]
    result = set()
    for node in statements(ast.parse(path.read_text()), inside_functions):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            base = ['violin_timm', *package[: len(package) - (node.level - 1)]]
            base += node.module.split('.') if node.module else []
            targets = ['.'.join([*base, alias.name]) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            targets = [f'{node.module}.{alias.name}' for alias in node.names]
        else:
            continue
        result |= {t.removeprefix('violin_timm').lstrip('.') for t in targets if t.split('.')[0] == 'violin_timm'}
    return result


def statements(node, inside_functions):
    for child in ast.iter_child_nodes(node):
        yield child
        if inside_functions or not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from statements(child, inside_functions)


MODULES = modules()


@pytest.mark.parametrize('name', MODULES)
def test_imports_point_down_the_house(name):
    own = 'commands' if name.startswith('scripts.') else part_of(name)
    for target in imported(name, MODULES[name]):
        part = part_of(target)
        if part == 'commands' and own != 'commands':
            assert target.split('.')[0] in ('__version__', 'version'), f'{name} imports {target}'
        else:
            assert LAYER[part] <= LAYER[own], f'{name} ({own}) imports {target}'


@pytest.mark.parametrize('name', MODULES)
def test_viz_is_imported_by_commands_or_where_a_recipe_draws(name):
    own = 'commands' if name.startswith('scripts.') else part_of(name)
    targets = imported(name, MODULES[name], inside_functions=own not in ('recipes', 'evals'))
    if own not in ('viz', 'commands'):
        assert 'viz' not in {part_of(target) for target in targets}


def test_no_module_imports_itself_by_a_detour():
    """Within a layer too, order is what imports have."""
    edges = {}
    for name, path in MODULES.items():
        targets = imported(name, path)
        known = {t for t in targets if t in MODULES} | {t.rpartition('.')[0] for t in targets}
        edges[name] = {t for t in known if t in MODULES} - {name}
    done, pending = set(), []

    def visit(name):
        assert name not in pending, f'cycle: {" -> ".join([*pending, name])}'
        if name not in done:
            pending.append(name)
            for target in sorted(edges[name]):
                visit(target)
            done.add(pending.pop())

    for name in edges:
        visit(name)
    assert len(done) == len(MODULES)
    assert 'models.vit' in edges['models.plug'] and 'curves' in edges['geometry']


def test_parser_sees_the_imports():
    """Or the test above would pass on anything."""
    assert 'curves.curve_ranks' in imported('geometry', MODULES['geometry'])
    assert 'attention.ViolinAttention' in imported('models.vit', MODULES['models.vit'])
    assert 'strategies.combine' in imported('backends.eager', MODULES['backends.eager'])
    assert 'models.vit.ViolinMixin' in imported('models.plug', MODULES['models.plug'])
    assert {part_of(name) for name in MODULES} >= {p for level in LAYERS[:8] for p in level}


@pytest.mark.parametrize('lower, upper', [('curves', 'geometry'), ('masks', 'attention'), ('models', 'data')])
def test_upward_import_would_be_seen(lower, upper, tmp_path):
    path = tmp_path / 'module.py'
    path.write_text(f'def late():\n    from violin_timm.{upper} import anything\n')
    assert {part_of(t) for t in imported(lower, path)} == {upper}
    assert not imported(lower, path, inside_functions=False)
    assert LAYER[upper] > LAYER[lower]


def test_curves_need_numpy_alone():
    tree = ast.parse(MODULES['curves'].read_text())
    roots = {a.name.split('.')[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    roots |= {n.module.split('.')[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert roots - set(sys.stdlib_module_names) == {'numpy'}


def fresh(code):
    return subprocess.run([sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_optional_packages_are_imported_only_when_used():
    """Importing, building and running a model, in a fresh interpreter."""
    loaded = fresh(
        'import sys, timm, torch, violin_timm\n'
        "model = timm.create_model('violin_pixel_nano')\n"
        'model(torch.zeros(1, 1, 8, 8))\n'
        f'print([name for name in {LAZY} if name in sys.modules])\n'
    )
    assert loaded.strip() == '[]'


def test_import_registers_the_models_and_opens_no_connection():
    listed = fresh(
        'import socket\n'
        'def refuse(*args, **kwargs): raise OSError("no network")\n'
        'socket.socket.connect = socket.create_connection = refuse\n'
        'import timm\n'
        "assert not timm.list_models('violin*')\n"
        'import violin_timm\n'
        "print(len(timm.list_models('violin*')))\n"
    )
    assert int(listed) >= 12


def test_public_names():
    public = {'CURVES', 'ViolinAttention', 'add_violin', 'curve_order', 'curve_ranks'}
    assert set(violin_timm.__all__) - {'__version__'} == public
    for name in violin_timm.__all__:
        assert getattr(violin_timm, name) is not None
