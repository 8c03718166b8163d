"""No test asks a model hub, and no worker's first backward is Dynamo's."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

from lamella_testing import start_autograd

start_autograd()  # A first backward under FakeTensorMode would start threads, and no later test could fork.
