"""`python -m violin_timm`, and with it `torchrun -m violin_timm`."""

import sys

from violin_timm.cli import main

if __name__ == '__main__':  # loader processes import this file again
    sys.exit(main())
