"""scripts/slurm.sbatch with stand-ins for SLURM's programs and for torchrun."""

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parent.parent / 'scripts' / 'slurm.sbatch'

# srun drops its own options and runs the rest; torchrun notes what it is given, and maybe waits for SIGTERM to save.
PROGRAMS = {
    'srun': 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
    'scontrol': 'if [ "$1" = show ]; then printf "node7\\nnode8\\n"; else echo "$@" >> "$NOTES/scontrol"; fi',
    'torchrun': """
        trap 'sleep 0.2; echo saved > "$NOTES/saved"; exit 143' TERM
        printf '%s\\n' "$@" > "$NOTES/torchrun"
        if [ -n "${WAIT:-}" ]; then while true; do sleep 0.05; done; fi
        exit "${STATUS:-0}"
    """,
}

pytestmark = pytest.mark.skipif(not shutil.which('bash'), reason='needs bash')


@pytest.fixture
def start(tmp_path):
    """Start the script with arguments, in the environment of a job."""
    programs = tmp_path / 'programs'
    programs.mkdir()
    for name, body in PROGRAMS.items():
        program = programs / name
        program.write_text(f'#!/usr/bin/env bash\n{body}\n')
        program.chmod(0o755)
    job = {
        'SLURM_JOB_ID': '12345', 'SLURM_JOB_NAME': 'violin', 'SLURM_JOB_NUM_NODES': '2', 'NOTES': str(tmp_path),
        'SLURM_JOB_NODELIST': 'node[7-8]', 'PATH': f'{programs}{os.pathsep}{os.environ["PATH"]}',
    }  # fmt: skip

    def _start(*arguments, **environment):
        return subprocess.Popen(['bash', str(SCRIPT), *arguments], env={**os.environ, **job, **environment})

    return _start


def wait_for(path, seconds=60):
    end = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < end, f'{path} did not come'
        time.sleep(0.02)


def test_torchrun_gets_the_rendezvous_and_the_arguments(start, tmp_path):
    assert start('--config', 'a b.yaml', '--experiment', 'mine', COMMAND='dino', NPROC='4').wait(60) == 0
    given = (tmp_path / 'torchrun').read_text().splitlines()
    assert given[: given.index('-m')] == [
        '--nnodes', '2', '--nproc-per-node', '4', '--max-restarts', '3', '--rdzv-backend', 'c10d',
        '--rdzv-id', '12345-0', '--rdzv-endpoint', 'node7:22345',
    ]  # fmt: skip
    # the last --experiment is the one that counts
    assert given[given.index('-m') :] == [
        '-m', 'violin_timm', 'dino', '--experiment', 'violin-12345', '--resume', 'auto',
        '--config', 'a b.yaml', '--experiment', 'mine',
    ]  # fmt: skip
    assert not (tmp_path / 'scontrol').exists()


def test_a_failure_is_no_reason_to_requeue(start, tmp_path):
    assert start(STATUS='1').wait(60) == 1
    assert not (tmp_path / 'scontrol').exists()


def test_sigterm_lets_the_run_save_and_requeues_the_job(start, tmp_path):
    job = start(WAIT='yes')
    wait_for(tmp_path / 'torchrun')
    job.send_signal(signal.SIGTERM)
    assert job.wait(60) == 143
    assert (tmp_path / 'saved').exists()
    assert (tmp_path / 'scontrol').read_text() == 'requeue 12345\n'
