"""One thread of compute for each process of the suite: the workers share few cores, and OpenMP teams that share cores
stall each other. Set before torch is imported; the services that tests start inherit it."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
