"""Train every point of a sweep file; the same as `violin sweep`.

python scripts/sweep.py configs/sweeps/digits_arms.yaml --jobs 2
"""

import sys
from pathlib import Path

# A clone works without being installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from violin_timm.recipes.sweep import command

if __name__ == '__main__':
    sys.exit(command(sys.argv[1:]))
