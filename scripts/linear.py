"""Measure frozen features by a linear classifier; the same as `violin linear`.

python scripts/linear.py --checkpoint output/dino/RUN/last.pth.tar --val-split test --closed
"""

import sys
from pathlib import Path

# A clone works without being installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from violin_timm.cli import linear

if __name__ == '__main__':
    sys.exit(linear(sys.argv[1:]))
