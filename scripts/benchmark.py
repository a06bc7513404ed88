"""Time and memory beside timm's plain models; the same as `violin benchmark`.

python scripts/benchmark.py --suite quick
"""

import sys
from pathlib import Path

# A clone works without being installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from violin_timm.evals.benchmark import main

if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))
