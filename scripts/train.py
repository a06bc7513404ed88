"""Train an image classifier; the same as `violin train`.

python scripts/train.py --config configs/quick/digits.yaml
torchrun --nproc-per-node 4 scripts/train.py --config CONFIG.yaml --data-dir DIR
"""

import sys
from pathlib import Path

# A clone works without being installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from violin_timm.cli import train

if __name__ == '__main__':
    sys.exit(train(sys.argv[1:]))
