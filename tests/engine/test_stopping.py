"""What is left of a process that ends must not keep it from ending."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import multiprocessing, time
from violin_timm.engine.stopping import leave_to_parent

def work():
    leave_to_parent(0)
    ready.set()
    time.sleep(600)

context = multiprocessing.get_context('fork')
ready = context.Event()
context.Process(target=work, daemon=True).start()
assert ready.wait(100)
"""


def test_a_worker_that_leaves_sigterm_to_its_parent_ends_with_it():
    done = subprocess.run([sys.executable, '-c', PROGRAM], timeout=200, cwd=Path(__file__).parents[2])
    assert done.returncode == 0
