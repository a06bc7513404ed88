"""Folders that several processes fill: whose a run is, and whether it has ended."""

import errno
import fcntl
import json

import pytest

from violin_timm.engine.runs import finished, lock, unlock


def test_a_lock_has_one_holder_until_it_is_given_back(tmp_path):
    free, held = lock(tmp_path / '.lock')
    assert free and lock(tmp_path / '.lock') == (False, None)
    unlock(held)
    free, again = lock(tmp_path / '.lock')
    assert free
    unlock(again)


@pytest.mark.parametrize('number', [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_named_and_not_taken_for_a_held_lock(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, 'refused')

    monkeypatch.setattr(fcntl, 'flock', refuse)
    with pytest.raises(OSError, match=r'no lock .*\.lock') as raised:
        lock(tmp_path / '.lock')
    assert raised.value.errno == number


def test_half_a_result_is_none(tmp_path):
    whole = json.dumps({'model': 'violin_deit_tiny', 'top1': 50.0})
    for text, expected in ((whole, True), (whole[:-5], False), ('[]', False), ('{"failed": 1}', False)):
        (tmp_path / 'result.json').write_text(text)
        assert finished(tmp_path) is expected
