"""Run the command line as a module: `python -m skimkv.cli`."""

import sys

from . import main

sys.exit(main())
