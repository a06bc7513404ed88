"""The parts of scripts/test_timm.py that need neither network nor timm's tests."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / 'scripts' / 'test_timm.py'
SIZES = {'violin_a': 10, 'violin_b': 20, 'violin_c_patch8': 30}
SOURCE = """\
FEAT_INTER_FILTERS = [
    'deit',
]
NON_STD_FILTERS = [
    'vit_*',
]
EXCLUDE_FEAT_FILTERS = NON_STD_FILTERS[:]
"""


@pytest.fixture(scope='module')
def suite():
    spec = importlib.util.spec_from_file_location('scripts_test_timm', SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def item(test, model):
    return SimpleNamespace(
        originalname=test, nodeid=f'{test}[{model}]', callspec=SimpleNamespace(params={'model_name': model})
    )


def collect(suite, variants, items):
    config = SimpleNamespace(hook=SimpleNamespace(pytest_deselected=lambda items: None))
    selection = suite.Selection(variants)
    selection.pytest_collection_modifyitems(config, items)
    return selection


def test_edit_extends_both_lists(suite):
    names = {}
    exec(suite.edit(SOURCE, ['violin_deit', 'violin_dino']), names)
    assert names['FEAT_INTER_FILTERS'] == ['violin_deit', 'violin_dino', 'deit']
    assert names['NON_STD_FILTERS'] == names['EXCLUDE_FEAT_FILTERS'] == ['violin*', 'vit_*']


@pytest.mark.parametrize(
    'source',
    [
        SOURCE.replace('NON_STD_FILTERS = [', 'NON_STD = ['),
        SOURCE.replace('FEAT_INTER_FILTERS = [', 'FEAT_INTER_FILTERS = list(['),
        SOURCE + SOURCE,
    ],
)
def test_edit_refuses_other_tests(suite, source):
    with pytest.raises(ValueError, match=r'FILTERS: got [02] lines'):
        suite.edit(source, ['violin_deit'])


def test_select(suite):
    assert suite.select(['all'], SIZES) == list(SIZES)
    assert suite.select(['small'], SIZES, limit=20) == ['violin_a', 'violin_b']
    assert suite.select(['violin_b', 'violin_a', 'violin_b'], SIZES) == ['violin_b', 'violin_a']
    with pytest.raises(ValueError, match="got 'violin_d'; choose small, all, or some of violin_a"):
        suite.select(['violin_a', 'violin_d'], SIZES)


def test_options_and_the_rest(suite):
    args, extra = suite.parse(['--models', 'violin_a', 'violin_b', '--', '-x', '--list'])
    assert args.models == ['violin_a', 'violin_b'] and not args.list
    assert extra == ['-x', '--list']
    assert suite.parse([])[0].models == ['small']


def test_every_deselection_has_a_reason(suite):
    assert all(reason for _, _, reason in suite.DESELECTED)
    assert 'network' in suite.deselection('test_model_load_pretrained', 'violin_a')
    assert suite.deselection('test_model_forward', 'violin_a') is None


def test_selection_goes_by_exact_names(suite):
    items = [item(test, model) for test in suite.REQUIRED for model in ('violin_a', 'violin_a_patch8', 'deit_tiny')]
    items += [item('test_model_load_pretrained', 'violin_a.tag'), item('test_model_backward', 'violin_a')]
    items.append(SimpleNamespace(originalname='test_violin', nodeid='test_violin'))
    selection = collect(suite, ['violin_a'], items)
    assert [i.nodeid for i in items] == [f'{test}[violin_a]' for test in (*suite.REQUIRED, 'test_model_backward')]
    assert sum(selection.deselected.values()) == 1
    assert any(line.split()[:2] == ['violin_a', '4'] for line in selection.table())


def test_a_variant_without_its_tests_is_an_error(suite):
    items = [item(test, 'violin_a') for test in suite.REQUIRED[:-1]]
    with pytest.raises(pytest.UsageError, match=f'violin_a: .* no {suite.REQUIRED[-1]}'):
        collect(suite, ['violin_a'], items)
