"""Fine-tune on the tasks of VTAB-1K, arm beside arm; the same as `violin vtab`.

python scripts/vtab.py --config configs/vtab/deit_small.yaml --data-dir /data/vtab
"""

import sys
from pathlib import Path

# A clone works without being installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from violin_timm.cli import vtab

if __name__ == '__main__':
    sys.exit(vtab(sys.argv[1:]))
