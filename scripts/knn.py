"""Measure frozen features by k-NN; the same as `violin knn`.

python scripts/knn.py --checkpoint output/dino/RUN/last.pth.tar --query-split test
"""

import sys
from pathlib import Path

# A clone works without being installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from violin_timm.cli import knn

if __name__ == '__main__':
    sys.exit(knn(sys.argv[1:]))
