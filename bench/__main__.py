"""`python -m bench`: see `main.py`."""

import sys

from bench.main import main

if __name__ == "__main__":
    sys.exit(main())
