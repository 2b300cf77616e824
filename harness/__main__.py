"""`python -m harness`."""

import sys
import traceback

from harness.cli import BUG, main

if __name__ == "__main__":
    try:
        code = main()
    except Exception:
        # Python's own exit code for this is 1, which would read as "an op failed".
        traceback.print_exc()
        code = BUG
    sys.exit(code)
