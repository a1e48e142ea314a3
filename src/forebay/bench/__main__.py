"""`python -m forebay.bench`: see `main.py`."""

import sys

from forebay.bench.main import main

if __name__ == "__main__":
    sys.exit(main())
