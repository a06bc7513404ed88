"""Pretrain a backbone without labels; the same as `violin dino`.

python scripts/dino.py --config configs/quick/dino_fashion.yaml
torchrun --nproc-per-node 8 scripts/dino.py --config configs/dino/small_100.yaml --data-dir IMAGENET
"""

import sys
from pathlib import Path

# A clone works without being installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from violin_timm.cli import dino

if __name__ == '__main__':
    sys.exit(dino(sys.argv[1:]))
