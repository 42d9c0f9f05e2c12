"""`python -m sapwood`: the same as `sapwood`."""

import sys

from .cli import main

sys.exit(main())
