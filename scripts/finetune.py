"""Fine-tune on one's own images, arm beside arm; the same as `violin finetune`.

python scripts/finetune.py --data-dir FOLDER --shots 100
"""

import sys
from pathlib import Path

# A clone works without being installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from violin_timm.cli import finetune

if __name__ == '__main__':
    sys.exit(finetune(sys.argv[1:]))
