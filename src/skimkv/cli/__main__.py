"""python -m skimkv.cli"""

import sys

from . import main

sys.exit(main())
